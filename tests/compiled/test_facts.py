"""Whatever decides what a pass does is part of its kind: a replay never gives the numbers of an older state."""

from __future__ import annotations

import copy
import functools
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.applications.compiled.facts import MOST_PARTS, Same, facts_of
from packprop.errors import PackpropWarning
from packprop.extensions import BatchL2Grad
from tests.compiled.steps import replays
from tests.selection import one_in

CALLS = 6


class Scale(NamedTuple):
    value: float


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Model(nn.Module):
    """Multiplies by whatever ``take`` finds in ``held``."""

    def __init__(self, held: Any, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(3, 4), nn.Linear(3, 4)
        self.used, self.act, self.head = self.first, torch.tanh, nn.Linear(4, 2)
        self.held, self._take = held, take

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.used(x))) * self._take(self.held)
        return out


def nested(value: float) -> Any:
    return types.SimpleNamespace(inner=types.SimpleNamespace(value=value))


HELD: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "number": (float, float),
    "NumPy number": (np.float64, float),
    "array": (lambda v: np.array([v, 1.0]), lambda held: float(held[0])),
    "ordered dictionary": (lambda v: OrderedDict(a=v), lambda held: held["a"]),
    "named tuple": (Scale, lambda held: held.value),
    "deque": (lambda v: deque([v]), lambda held: held[0]),
    "set": (lambda v: {v}, lambda held: next(iter(held))),
    "object": (nested, lambda held: held.inner.value),
    "slots": (Slotted, lambda held: held.value),
    "list of objects": (lambda v: [nested(v)], lambda held: held[0].inner.value),
    "partial": (lambda v: functools.partial(float, v), lambda held: held()),
    "closure": (lambda v: lambda: v, lambda held: held()),
    "bound method": (lambda v: nested(v).__getattribute__, lambda held: held("inner").value),
    "module that is not registered": (lambda v: [nn.Softplus(beta=v)], lambda held: held[0].beta),
}


def settled(model: nn.Module, loss: Any = F.cross_entropy) -> tuple[Any, Tensor, Any]:
    """A step that is replayed, and its batch."""
    step = packprop.compile(model, loss, BatchL2Grad(), backend="eager")
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    for _ in range(CALLS):
        step(x, y)
    assert replays(step) > 0
    return step, x, y


def check(step: Any, model: nn.Module, x: Any, y: Any, loss: Any = F.cross_entropy) -> None:
    expected = loss(model(x), y)
    for _ in range(CALLS):
        torch.testing.assert_close(step(x, y), expected.detach())


@one_in(8)
@pytest.mark.parametrize("name", HELD)
def test_values_of_attributes(name: str) -> None:
    torch.manual_seed(0)
    make, take = HELD[name]
    model = Model(make(2.0), take)
    step, x, y = settled(model)
    model.held = make(3.0)
    check(step, model, x, y)


class Numbers(list[float]):
    """A list that has an attribute, as any class of one's own may."""

    factor = 1.0


def with_attribute(value: float) -> Any:
    def factor() -> float:
        return float(factor.value)  # type: ignore[attr-defined]  # functions take any

    factor.value = value  # type: ignore[attr-defined]  # functions take any
    return factor


def setting(name: str) -> Callable[[Any, float], None]:
    return lambda held, value: setattr(held, name, value)


def first(held: Any, value: float) -> None:
    held[0] = value


SECOND = np.timedelta64(1, "s")
IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any, float], None]]] = {
    "array": (lambda: np.ones(1), lambda held: float(held[0]), first),
    "times": (
        lambda: np.array([SECOND]),
        lambda h: float(h[0] / SECOND),
        lambda h, v: first(h, int(v) * SECOND),
    ),
    "attribute of a list": (Numbers, lambda held: held.factor, setting("factor")),
    "attribute of a function": (lambda: with_attribute(1.0), lambda held: held(), setting("value")),
    "object": (lambda: nested(1.0), lambda held: held.inner.value, lambda h, v: setattr(h.inner, "value", v)),
    "generator": (random.Random, lambda held: held.getstate()[1][0] % 7 + 1.0, lambda h, v: h.seed(v)),
}


@one_in(12)
@pytest.mark.parametrize("place", ["attribute", "private", "private list", "closure", "hook"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_values_that_change_in_place(name: str, place: str) -> None:
    torch.manual_seed(0)
    make, take, change = IN_PLACE[name]
    held, model = make(), Model(1.0, float)
    change(held, 2.0)
    if place == "attribute":
        model.held, model._take = held, take
    elif place == "private":
        model._held, model._take = held, lambda _: take(model._held)
    elif place == "private list":
        model._held = [held]
        model._take = lambda _: take(model._held[0])
    elif place == "closure":
        model.held, model._take = lambda: take(held), lambda function: function()
    else:
        model.head.register_forward_hook(Scaled(held, take))
    step, x, y = settled(model)
    change(held, 3.0)
    check(step, model, x, y)


class Scaled:
    """A hook that is an object."""

    def __init__(self, held: Any, take: Callable[[Any], float]) -> None:
        self.held, self.take = held, take

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.take(self.held)


class Marked(float):
    unit = "m"


class Private:
    __slots__ = ("__value",)

    def __init__(self, value: float) -> None:
        self.__value = value

    @property
    def value(self) -> float:
        return self.__value


REPLACED: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "kind of number": (Marked, float),
    "private slots": (Private, lambda held: held.value),
    "values of a dictionary": (lambda v: {"a": v}.values(), lambda held: next(iter(held))),
    "named tuple": (Scale, lambda held: held.value),
    "NumPy number": (np.float32, float),
}


@one_in(4)
@pytest.mark.parametrize("name", ["held", "_held"])
@pytest.mark.parametrize("kind", REPLACED)
def test_values_of_classes_of_their_own(kind: str, name: str) -> None:
    torch.manual_seed(0)
    make, take = REPLACED[kind]
    model = Model(None, lambda _: take(getattr(model, name)))
    setattr(model, name, make(2.0))
    step, x, y = settled(model)
    setattr(model, name, make(3.0))
    check(step, model, x, y)


def test_the_state_of_hooks_on_all_modules_and_new_code_of_a_function() -> None:
    torch.manual_seed(0)
    box, model = [2.0], Model(1.0, float)
    model.act = lambda h: h.tanh()

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return out * box[0] if isinstance(out, Tensor) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        step, x, y = settled(model)
        box[0] = 3.0
        check(step, model, x, y)
        model.act.__code__ = (lambda h: h.relu()).__code__
        check(step, model, x, y)
    finally:
        handle.remove()


LARGE = 400_000


def filled(table: Any, value: float) -> None:
    """Change all entries of a table in place."""
    if isinstance(table, (Tensor, np.ndarray)):
        table[:] = value
    else:
        for key in range(LARGE) if isinstance(table, list) else [*table]:
            table[key] = value


TABLES: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda: torch.ones(LARGE), lambda table: table[0]),
    "value of a tensor": (lambda: torch.ones(LARGE), lambda table: table[0].item()),
    "value of a sum": (lambda: torch.ones(LARGE), lambda table: float((2 * table).mean())),
    "array": (lambda: np.ones(LARGE), lambda table: torch.from_numpy(table)[0]),
    "value of an array": (lambda: np.ones(LARGE), lambda table: float(table[0])),
    "list": (lambda: [1.0] * LARGE, lambda table: table[0]),
    "dictionary": (lambda: dict.fromkeys(range(LARGE), 1.0), lambda table: table[5]),
}


@one_in(4)
@pytest.mark.parametrize("name", TABLES)
def test_large_tables_that_change_in_place(name: str) -> None:
    torch.manual_seed(0)
    make, read = TABLES[name]
    table, model = make(), nn.Linear(3, 2).double()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f * read(table), y)

    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackpropWarning)
        step = packprop.compile(model, loss, BatchL2Grad(), backend="eager")
        for number in range(CALLS + 6):
            if number > CALLS + 2:
                filled(table, 1.0 + number)
            assert step(x, y).item() == pytest.approx(loss(model(x), y).item())
    assert (replays(step) == 0) == ("value of a" in name and "array" not in name)


def test_values_of_literals_may_be_read() -> None:
    model = nn.Linear(3, 2)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f * torch.tensor(2.0).item(), y)

    step = packprop.compile(model, loss, BatchL2Grad(), backend="eager")
    for _ in range(CALLS + 2):
        step(torch.randn(4, 3), torch.randn(4, 2))
    assert replays(step) > 0


def test_what_does_not_end_replays() -> None:
    """Parameters of an LSTM that are replaced, large private tables, hooks beside large objects, odd names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 4), First(), nn.Linear(4, 2)).double()
    model._words = {(str(number), "x"): number for number in range(5000)}  # type: ignore[assignment]  # modules take any
    model.my_hooks = [len]  # type: ignore[assignment]  # modules take any
    table = [[number] for number in range(5000)]
    model[2].register_forward_hook(lambda *_: print(end="", file=None) if len(table) < 5 else None)
    step = packprop.compile(model, F.cross_entropy, BatchL2Grad(), backend="eager")
    x, y = torch.randn(2, 5, 3).double(), torch.randint(2, (5,))
    for _ in range(CALLS + 4):
        model[0].weight_hh_l0 = nn.Parameter(model[0].weight_hh_l0.detach().clone())
        step(x, y)
    assert replays(step) > 0


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.source = nn.Linear(3, 2), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + torch.rand(len(x), 2, generator=self.source)
        return out


def test_a_generator_of_a_module_is_drawn_from_as_in_ordinary_passes() -> None:
    torch.manual_seed(0)
    model = Noisy()
    other = copy.deepcopy(model.layer)
    x, y, source = torch.randn(5, 3), torch.randint(2, (5,)), torch.Generator().manual_seed(1)
    step = packprop.compile(model, F.cross_entropy, BatchL2Grad(), backend="eager")
    for _ in range(CALLS):
        expected = F.cross_entropy(other(x) + torch.rand(5, 2, generator=source), y)
        torch.testing.assert_close(step(x, y), expected.detach())
    assert replays(step) > 0


class First(nn.Module):
    def forward(self, out: Any) -> Tensor:
        found: Tensor = out[0][-1]
        return found


def test_the_sign_of_zero() -> None:
    torch.manual_seed(0)
    model = Model(0.0, lambda held: float(np.copysign(2.0, held)))
    step, x, y = settled(model)
    model.held = -0.0
    check(step, model, x, y)


@contextmanager
def doubled_everywhere() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        yield
    finally:
        handle.remove()


CHANGES: dict[str, Callable[[Model], None]] = {
    "submodule": lambda m: setattr(m, "used", m.other),
    "function": lambda m: setattr(m, "act", torch.relu),
    "forward of an instance": lambda m: setattr(m.head, "forward", lambda h: F.linear(h, 2 * m.head.weight)),
    "True in place of 1": lambda m: setattr(m, "held", True),
    "attribute of a parameter": lambda m: setattr(m.head.weight, "factor", 3.0),
    "private NumPy number": lambda m: setattr(m, "_factor", np.float32(3)),
    "NumPy number of a parameter": lambda m: setattr(m.head.weight, "factor", np.float32(3)),
}


@one_in(6)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_model(name: str) -> None:
    torch.manual_seed(0)
    model = Model(1, lambda held: 3.0 if held is True else getattr(model.head.weight, "factor", model._factor))
    model._factor = np.float32(1)
    step, x, y = settled(model)
    CHANGES[name](model)
    check(step, model, x, y)


def test_hooks_on_all_modules() -> None:
    torch.manual_seed(0)
    model = Model(1.0, float)
    step, x, y = settled(model)
    with doubled_everywhere():
        check(step, model, x, y)
    check(step, model, x, y)


class Weighted:
    """A loss that is no module."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        return self.weight * F.cross_entropy(f, y)


@pytest.mark.parametrize("bound", [True, False])
def test_attributes_of_a_loss(bound: bool) -> None:
    torch.manual_seed(0)
    own, model = Weighted(), Model(1.0, float)
    loss = own.__call__ if bound else own
    step, x, y = settled(model, loss)
    own.weight = 2.0
    check(step, model, x, y, loss)


@dataclass
class Targets:
    classes: Tensor
    weight: float


@one_in(8)
@pytest.mark.parametrize(
    "make",
    [
        lambda y, w: Targets(y, w),
        lambda y, w: (y, np.array([w])),
        lambda y, w: (y, {w}),
        lambda y, w: (y, nested(w)),
    ],
)
def test_what_a_batch_holds_beside_tensors(make: Any) -> None:
    """Fresh objects in each call, whose identity an object of an earlier one may have had."""
    torch.manual_seed(0)
    model = Model(1.0, float)

    def loss(f: Tensor, given: Any) -> Tensor:
        classes, weight = (given.classes, given.weight) if isinstance(given, Targets) else given
        if isinstance(weight, types.SimpleNamespace):
            weight = weight.inner.value
        factor = weight if isinstance(weight, float) else float(next(iter(weight)))
        return F.cross_entropy(f, classes) * factor

    step = packprop.compile(model, loss, BatchL2Grad(), backend="eager")
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    for call in range(4 * CALLS):
        weight = float(1 + call // CALLS)
        torch.testing.assert_close(step(x, make(y, weight)), loss(model(x), make(y, weight)).detach())
    assert replays(step) > 0


def test_layers_that_python_drops() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = Model(1.0, lambda held: held if random.random() < 2 else 0.0)
    step = packprop.compile(model, F.cross_entropy, BatchL2Grad(), backend="eager")
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    step(x, y)
    with pytest.warns(PackpropWarning, match="random numbers from Python or NumPy"):
        step(x, y)
    for _ in range(CALLS):
        step(x, y)
    assert not replays(step)


def test_values_that_hold_themselves_or_too_much() -> None:
    own: list[Any] = [1]
    own.append(own)
    assert facts_of(own) == facts_of(own)
    assert facts_of([*range(MOST_PARTS)]) == facts_of([*range(MOST_PARTS)])
    large = [[0] for _ in range(MOST_PARTS)]
    assert facts_of(large) != facts_of(large)
    assert Same(own) == Same(own)
    assert facts_of(1) != facts_of(True)
    assert facts_of(float("nan")) == facts_of(float("nan"))
