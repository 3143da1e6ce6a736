"""Models and losses that nobody has extended, in whole or in part: the graph holds what a pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from packprop.recording.switch import is_extended
from tests.references.oracle import Oracle, Problem
from tests.references.per_sample import batch, network
from tests.references.refusals import check, each_row, refused, untouched
from tests.references.running import (
    DRAWS,
    ROWS,
    Row,
    assert_near,
    assert_rows_of_terms,
    check_exact,
    check_sampled,
    generator,
    make_all,
    results,
)
from tests.versions import needs_unwrapping

Forward = Callable[[nn.Module, Tensor], Tensor]


@contextmanager
def extending(model: nn.Module) -> Iterator[None]:
    yield
    packprop.extend(model)


def all_of_it(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def part_by_part(model: nn.Module, x: Tensor) -> Tensor:
    first, middle, last = model  # type: ignore[misc]  # a Sequential is iterable
    return F.linear(middle(first(x)), last.weight, last.bias)


def half_disabled(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model[0](x)  # type: ignore[index]  # a Sequential has parts
    with packprop.disable():
        out: Tensor = model[2](model[1](hidden))  # type: ignore[index]  # as above
    return out


PASSES: dict[str, tuple[bool, Callable[[nn.Module], AbstractContextManager[Any]], Forward]] = {
    "never-extended": (False, lambda _: nullcontext(), all_of_it),
    "extended-after": (False, extending, all_of_it),
    "disabled": (True, lambda _: packprop.disable(), all_of_it),
    "disabled-in-part": (True, lambda _: nullcontext(), half_disabled),
    "outside-of-its-call": (True, lambda _: nullcontext(), part_by_part),
    "outside-and-never-extended": (False, lambda _: nullcontext(), part_by_part),
}
LOSSES: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "extended": lambda: packprop.extend(nn.CrossEntropyLoss()),
    "module": nn.CrossEntropyLoss,
    "function": lambda: F.cross_entropy,
}


def prepared(way: str, loss: str) -> tuple[Problem, Tensor]:
    """A problem, and the value of its loss after one of the forward passes."""
    extended, around, forward = PASSES[way]
    model, (x, y) = network(), batch()
    problem = Problem.of_batch(model, nn.CrossEntropyLoss(), x, y, len(x))
    if extended:
        packprop.extend(model)
    with around(model):
        out = forward(model, x)
    return problem, LOSSES[loss]()(out, y)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", PASSES)
@pytest.mark.filterwarnings("error")
def test_every_extension(way: str, loss: str) -> None:
    """All values, beside loops over single samples."""
    problem, value = prepared(way, loss)
    with packprop.backpack(*make_all(ROWS)):
        value.backward()
    oracle = Oracle(problem)
    for row in ROWS:
        if not row.sampled:
            check_exact(problem, oracle, row)
    check_sampled(problem, oracle)


@each_row
@pytest.mark.filterwarnings("error")
def test_each_extension_alone(row: Row) -> None:
    """Where nothing at all was extended."""
    problem, value = prepared("never-extended", "function")
    parts = dict(problem.model.named_modules())
    with packprop.backpack(row(generator())):
        value.backward()
    if not row.sampled:
        check_exact(problem, Oracle(problem), row)
    elif row.attribute == "sqrt_ggn_mc":
        assert all(len(each) == DRAWS for each in results(problem, row.attribute).values())
    for name, expected in Oracle(problem).whole_gradient.items():
        assert_near(results(problem, "grad")[name] if problem.parameters[name].grad is not None else expected,
                    expected, name)
    assert not any(is_extended(part) or part._forward_hooks for part in parts.values())
