"""One way of asking: an extension, several, or a list, in each call; the same words for the same thing."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import BadInput, extensions
from tests.house.pages import ROOT
from tests.selection import one_in

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def network() -> nn.Module:
    return nn.Linear(4, 3)


def backward(context: Callable[..., Any], *asked: Any, **options: Any) -> dict[str, Tensor]:
    model, loss = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    with context(*asked, **options):
        loss(model(X), Y).backward()
    return {
        name: getattr(model.weight, name) for name in ("batch_l2", "variance") if hasattr(model.weight, name)
    }


def stepped(*asked: Any) -> dict[str, Tensor]:
    model = network()
    packprop.compile(model, nn.CrossEntropyLoss(), *asked, backend="eager")(X, Y)
    return {
        name: getattr(model.weight, name) for name in ("batch_l2", "variance") if hasattr(model.weight, name)
    }


def planned(*asked: Any) -> list[str]:
    plan = packprop.plan(network(), nn.CrossEntropyLoss(), (X, Y), *asked)
    return [getattr(extensions, name).savefield for name in plan.extensions]


CALLS: dict[str, Callable[..., Any]] = {
    "backpack": lambda *asked: backward(packprop.backpack, *asked),
    "clipped_gradients": lambda *asked: backward(packprop.clipped_gradients, *asked, max_norm=1.0),
    "compile": stepped,
    "compute": lambda *asked: packprop.compute(
        network(), nn.CrossEntropyLoss(), (X, Y), *asked, progress=False
    ),
    "plan": planned,
}
FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "several": lambda *each: each,
    "a list": lambda *each: ([*each],),
    "a tuple": lambda *each: (each,),
}


@one_in(2)
@pytest.mark.parametrize("call", CALLS)
def test_one_several_or_a_list(call: str) -> None:
    assert [*CALLS[call](extensions.BatchL2Grad())] == ["batch_l2"]
    for form in FORMS.values():
        found = CALLS[call](*form(extensions.BatchL2Grad(), extensions.Variance()))
        assert [*found] == ["batch_l2", "variance"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", FORMS)
def test_a_class_is_one_error(call: str, form: str) -> None:
    with pytest.raises(BadInput) as error:
        CALLS[call](*FORMS[form](extensions.Variance(), extensions.BatchL2Grad))
    assert call in error.value.asked
    parts = (error.value.where, error.value.why, error.value.instead)
    assert parts == ("extension BatchL2Grad", "it is a class, not an instance", "write BatchL2Grad()")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", ["BatchL2Grad", None, 3, {"BatchL2Grad": 1}])
def test_what_is_no_extension_is_one_error(call: str, wrong: Any) -> None:
    with pytest.raises(BadInput, match="it is not an extension"):
        CALLS[call](wrong)


def test_a_monitor_takes_one_quantity_or_several() -> None:
    for quantities in ("gradient_norm", ["gradient_norm"], ("gradient_norm",)):
        monitor = packprop.Monitor(model := network(), quantities=quantities, log=None)
        with monitor.step():
            nn.functional.cross_entropy(model(X), Y).backward()
        assert monitor.last is not None
        assert {*monitor.last} == {"samples", "gradient_norm", "gradient_norm/(model)"}
    for wrong in ("gradientnorm", [], extensions.Variance(), [extensions.Variance]):
        with pytest.raises(BadInput, match="quantities"):
            packprop.Monitor(network(), quantities=wrong, log=None)


@pytest.mark.parametrize("second", [nn.CrossEntropyLoss(), network()])
def test_extend_takes_one_module(second: nn.Module) -> None:
    model = network()
    with pytest.raises(BadInput, match="one call extends one module") as error:
        packprop.extend(model, *[second])
    assert error.value.instead == "extend(model); extend(loss)"
    assert not model._forward_pre_hooks
    packprop.extend(model, False, True)


PAGE = (ROOT / "docs/reference/arguments.md").read_text(encoding="utf-8")
ROWS = {
    row[1].strip(" `"): [cell.strip() for cell in row[2:-1]]
    for row in (line.split("|") for line in PAGE.splitlines() if line.startswith("| `"))
}
PUBLIC = {
    name: inspect.signature(found).parameters
    for name in packprop.__all__
    if callable(found := getattr(packprop, name))
    and (inspect.isfunction(found) or name in ("Monitor", "StoreWriter"))
}
# Their own meaning in each: what is called on, and names of things that are compared or registered.
POSITIONAL = {"functions", "inputs"}


def test_the_table_has_every_argument_that_calls_share() -> None:
    names = [name for parameters in PUBLIC.values() for name in parameters]
    shared = {name for name in names if names.count(name) > 1} - POSITIONAL
    assert shared - {*ROWS} == set()
    assert {*ROWS} - {*names} == set()


@pytest.mark.parametrize("argument", ROWS)
def test_a_row_names_the_calls_that_have_it(argument: str) -> None:
    listed = set(re.findall(r"`(\w+)`", ROWS[argument][0]))
    assert listed == {name for name, parameters in PUBLIC.items() if argument in parameters}


@pytest.mark.parametrize("argument", ROWS)
def test_a_shared_argument_has_one_default(argument: str) -> None:
    """Or the table says which calls have another."""
    of_calls = {str(parameters[argument].default) for parameters in PUBLIC.values() if argument in parameters}
    stated = re.findall(r"`([^`]+)`", ROWS[argument][1])
    assert len(of_calls - {str(inspect.Parameter.empty)}) <= max(1, len(stated)), of_calls
    for text in stated:
        assert text.strip("\"'") in {default.strip("\"'") for default in of_calls}, text


def test_options_of_the_command_have_the_same_words() -> None:
    from packprop.applications.reports.arguments import parser

    commands: Any = parser()._subparsers
    (choices,) = (action.choices for action in commands._group_actions)
    profile = {action.dest for action in choices["profile"]._actions}
    assert {*PUBLIC["profile"]} & {*ROWS} - {"model", "loss", "data"} <= profile
    query = {action.dest for action in choices["query"]._actions}
    assert {"k", "memory", "batch_size", "device", "damping"} <= query


SHARED_ATTRIBUTES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "batch_l2": lambda: (extensions.BatchL2Grad(subsampling=[0]), extensions.BatchL2Grad()),
    "diag_ggn_mc": lambda: (extensions.DiagGGNMC(mc_samples=1), extensions.DiagGGNMC(mc_samples=2)),
    "kfac": lambda: (extensions.KFAC(mc_samples=1), extensions.KFAC(mc_samples=2)),
    "grad_batch_projected": lambda: (extensions.Projected(), extensions.Projected(seed=1)),
    "ggnmp": lambda: (extensions.GGNMP(), extensions.HMP(savefield="ggnmp")),
}


@pytest.mark.parametrize("call", CALLS)
def test_two_extensions_with_one_attribute_are_named(call: str) -> None:
    first, second = extensions.BatchL2Grad(subsampling=[0]), extensions.BatchL2Grad()
    both = re.escape(f"{first!r} and {second!r} are both saved as 'batch_l2'")
    with pytest.warns(packprop.PackpropWarning, match=both), contextlib.suppress(BadInput):
        CALLS[call](first, second)  # compute(...) refuses them, because its result would hold both


@pytest.mark.parametrize("field", SHARED_ATTRIBUTES)
def test_different_options_are_different_values(field: str) -> None:
    with pytest.warns(packprop.PackpropWarning, match=f"both saved as '{field}'"):
        packprop.backpack(*SHARED_ATTRIBUTES[field]())


@pytest.mark.parametrize("subsampling", [None, [3, 1]])
def test_an_attribute_holds_the_value_of_the_last_extension(subsampling: list[int] | None) -> None:
    model, last = packprop.extend(network()), extensions.BatchL2Grad(subsampling=subsampling)
    found = []
    for given in ((extensions.BatchL2Grad(subsampling=[2]), last), (last,)):
        with warnings.catch_warnings(action="ignore"), packprop.backpack(*given):
            nn.functional.cross_entropy(model(X), Y).backward()
        found.append(model.weight.batch_l2)
    torch.testing.assert_close(*found)


def test_equal_extensions_and_attributes_of_their_own() -> None:
    products = (extensions.GGNMP(), extensions.GGNMP(savefield="other"))
    units = (extensions.BatchGrad(), extensions.BatchGrad(per="token"))
    with warnings.catch_warnings(action="error"):
        packprop.backpack(*products, *units, extensions.Variance(), extensions.Variance())
