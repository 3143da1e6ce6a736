"""What copies a model, or runs it without data, keeps nothing of it alive."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.memory.live import LiveBytes
from packprop.errors import BadInput
from packprop.testing import check_model
from tests.selection import often, one_in, thorough

TIMES = 10
pytestmark = pytest.mark.usefixtures("_new_objects_only")
LOSS = nn.CrossEntropyLoss()
parametrizations = nn.utils.parametrizations


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randint(3, (4,))


def plain(layer: nn.Module) -> nn.Module:
    return layer


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


CHANGES = [
    plain,
    parametrizations.weight_norm,
    old_weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
]


def make_model(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(change(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)).eval()


def planned(model: nn.Module) -> None:
    packprop.plan(model, LOSS, batch(), [extensions.BatchGrad(), extensions.DiagGGNExact()])


def planned_in_vain(model: nn.Module) -> None:
    with pytest.raises(BadInput, match="still takes"):
        packprop.plan(model, LOSS, batch(), [extensions.DiagGGNExact()], memory=1)


def passed(model: nn.Module, **options: Any) -> None:
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), **options):
        loss.backward()


def passed_within_a_budget(model: nn.Module) -> None:
    passed(model, memory="64MiB")


def counted(model: nn.Module) -> None:
    with LiveBytes():
        passed(model)


def compiled(model: nn.Module) -> None:
    step = packprop.compile(model, nn.CrossEntropyLoss(), extensions.BatchGrad(), backend="eager")
    for _ in range(3):
        step(*batch())
    assert step.graph is not None


def covered(model: nn.Module) -> None:
    packprop.coverage(model, batch()[0])


def checked(model: nn.Module) -> None:
    check_model(model, nn.CrossEntropyLoss(), *batch(), [extensions.BatchGrad()])


def computed(model: nn.Module) -> None:
    packprop.compute(
        model, LOSS, [batch(), batch()], [extensions.BatchL2Grad()], memory="64MiB", progress=False
    )


def profiled(model: nn.Module) -> None:
    packprop.profile(model, LOSS, [batch()], memory="64MiB", progress=False)


ENTRIES = [
    planned,
    planned_in_vain,
    passed,
    passed_within_a_budget,
    counted,
    compiled,
    covered,
    checked,
    computed,
    profiled,
]


OFTEN = (planned, passed_within_a_budget, compiled, computed)


def things_alive() -> Counter[str]:
    """How many tensors (also those without data) and modules there are."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when its retired names are looked at
        kinds = Tensor, nn.Module, torch.UntypedStorage
        return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


@one_in(6)
@often(lambda entry, change: change is parametrizations.weight_norm and entry in OFTEN)
@pytest.mark.parametrize(
    ("entry", "change"),
    [
        *((planned, change) for change in CHANGES),
        *((entry, parametrizations.weight_norm) for entry in ENTRIES[1:]),
    ],
    ids=lambda function: function.__name__,
)
def test_nothing_is_kept_alive(
    entry: Callable[[nn.Module], None], change: Callable[[nn.Module], nn.Module]
) -> None:
    """Each model and all that was made of it is gone, every one of ten times."""
    entry(make_model(change))  # what is kept once in a process
    before = things_alive()
    kept: list[Any] = []
    for _ in range(TIMES):
        model = make_model(change)
        entry(model)
        kept += [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
        kept += [weakref.ref(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())]
        del model
    assert things_alive() - before == Counter()
    assert not [reference() for reference in kept if reference() is not None]


@thorough
@often(lambda entry: entry in OFTEN)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_a_model_in_use_gathers_nothing(entry: Callable[[nn.Module], None]) -> None:
    """The same model, again and again: what there is after two calls is what there is after twelve."""
    model = make_model(parametrizations.weight_norm)
    entry(model)
    entry(model)
    before = things_alive()
    for _ in range(TIMES):
        entry(model)
    assert things_alive() - before == Counter()
