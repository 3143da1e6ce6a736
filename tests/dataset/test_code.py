"""What code changes by itself is no option of a run: told from the code of functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import packprop
from packprop import BadInput
from packprop.applications.dataset.code import code_of
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.identity import describer_of
from packprop.extensions import SumGradSquared

TABLE: dict[str, Any] = {"k": 1.0}
COUNTS = [0]
LAST: Any = None

FILLS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "an entry": (lambda self, x: self.cache.__setitem__("a", x), set()),
    "a method": (lambda self, x: self.seen.append(x * self.scale), {"seen"}),
    "a method of an entry": (lambda self, x: self.seen[self.now].append(x), {"seen"}),
    "a method of a result": (lambda self, x: (x * self.factors[0]).add(1.0), set()),
    "a method of a call": (lambda self, x: torch.tanh(x).mul(self.cfg["k"]).add(self.scale), set()),
    "a method of a local": (lambda self, x: [].append(self.factors[0] * x), set()),
    "a global": (lambda self, x: COUNTS.append(self.count), {"COUNTS"}),
}


def entry(self: Any, x: Any) -> None:
    self.cache[self.key + 1] = x * self.scale


def entry_of_entry(self: Any, x: Any) -> None:
    self.cache[self.key]["a"] = x


def augmented_entry(self: Any, x: Any) -> None:
    self.cache[self.key] += x * self.scale


def entry_of_local(self: Any, x: Any) -> Any:
    h = x.new_zeros(3)
    h[:2] = torch.tanh(x)[:2] * self.cfg["temperature"]
    h[0] += self.cfg["shift"]
    return h


def entry_of_global(self: Any, x: Any) -> None:
    TABLE["last"] = x * self.scale


def global_is_read(self: Any, x: Any) -> Any:
    d: dict[str, Any] = {}
    d["h"] = torch.tanh(x) * TABLE["k"]
    return d


def sliced(self: Any, x: Any) -> None:
    self.kept[self.start : self.stop] = x


def removed(self: Any, x: Any) -> None:
    del self.cache[self.key]


FILLING = {
    entry: {"cache"},
    entry_of_entry: {"cache"},
    augmented_entry: {"cache"},
    entry_of_local: set[str](),
    entry_of_global: {"TABLE"},
    global_is_read: set[str](),
    sliced: {"kept"},
    removed: {"cache"},
}


def own(self: Any, x: Any) -> None:
    self.count += 1
    self.last, self.first = x * self.scale, x


def of_a_part(self: Any, x: Any) -> None:
    self.part.total = x


def of_a_local(self: Any, x: Any) -> Any:
    out = SimpleNamespace()
    out.scale = x * self.scale
    out.scale += self.shift
    return out


WRITING = {own: {"count", "last", "first"}, of_a_part: {"total"}, of_a_local: set[str]()}


@pytest.mark.parametrize("how", FILLS)
def test_containers_that_methods_change(how: str) -> None:
    function, expected = FILLS[how]
    assert code_of(function.__code__).filled == expected


@pytest.mark.parametrize("function", FILLING, ids=lambda function: function.__name__)
def test_containers_whose_entries_change(function: Any) -> None:
    assert code_of(function.__code__).filled == FILLING[function]


@pytest.mark.parametrize("function", WRITING, ids=lambda function: function.__name__)
def test_attributes_that_are_assigned(function: Any) -> None:
    assert code_of(function.__code__).written == WRITING[function]


def counted(f: Any, y: Any) -> Any:
    TABLE["step"] += 1
    return f


def helped(f: Any, y: Any) -> Any:
    return counted(f, y)


def noted(f: Any, y: Any) -> Any:
    COUNTS.append(len(f))
    return f


def set_globally(f: Any, y: Any) -> Any:
    global LAST
    LAST = f
    return f


def enclosed() -> Any:
    calls = 0
    seen: list[Any] = []

    def loss(f: Any, y: Any) -> Any:
        nonlocal calls
        calls += 1
        return f

    def kept(f: Any, y: Any) -> Any:
        seen[:] = [f]
        return f

    return loss, kept


def of_its_own(f: Any, y: Any) -> Any:
    table: dict[str, Any] = {"a": f}
    table["b"] = TABLE["k"] * y

    def inside() -> Any:
        return table["a"]

    return inside()


class Counting(nn.Module):
    """Counts in an attribute of its own, which is looked at before each replay."""

    def forward(self, f: Any, y: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return f


@pytest.mark.parametrize("loss", [counted, helped, noted, set_globally, *enclosed()], ids=lambda f: f.__name__)
def test_losses_that_change_something_around_them(loss: Any) -> None:
    assert describer_of(nn.Linear(2, 2), loss).changes
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, given, out: loss(out, given))
    assert describer_of(hooked, nn.CrossEntropyLoss()).changes


@pytest.mark.parametrize(
    "loss",
    [of_its_own, Counting(), nn.CrossEntropyLoss()],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_losses_that_change_nothing_around_them(loss: Any) -> None:
    assert not describer_of(nn.Linear(2, 2), loss).changes


class Head(nn.Module):
    """Counts its calls, and reads an option in the statement that fills a tensor."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.cfg, self.calls, self.layer = {"temperature": temperature}, 0, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = x.new_zeros(len(x), 2)
        h[:, :2] = torch.tanh(self.layer(x)) * self.cfg["temperature"]
        return h


def test_a_checkpoint_of_another_option_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Head(1.0), (torch.randn(4, 3), torch.randint(2, (4,)))

    def run() -> packprop.Result:
        options: dict[str, Any] = {"checkpoint": tmp_path / "run", "progress": False}
        return packprop.compute(model, nn.CrossEntropyLoss(), data, [SumGradSquared()], **options)

    first = run()
    assert model.calls > 0
    assert run().samples == first.samples
    model.cfg = {"temperature": 3.0}
    with pytest.raises(BadInput, match=r"temperature: 1.0 there, 3.0 here"):
        run()


class Settings:
    temperature, calls = 1.0, 0


def tempered(f: Tensor, y: Tensor) -> Tensor:
    Settings.calls += 1
    return nn.functional.cross_entropy(f * Settings.temperature, y)


def test_a_class_whose_entries_a_loss_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loss counts on it is no option."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), (torch.randn(4, 3), torch.randint(2, (4,)))

    def run() -> packprop.Result:
        options: dict[str, Any] = {"checkpoint": tmp_path / "run", "progress": False}
        return packprop.compute(model, tempered, data, [SumGradSquared()], **options)

    first = run()
    assert Settings.calls > 0
    assert run().samples == first.samples
    monkeypatch.setattr(Settings, "temperature", 3.0)
    with pytest.raises(BadInput, match=r"temperature: 1.0 there, 3.0 here"):
        run()


def replacing(factor: float) -> nn.Module:
    """A module whose installed ``forward`` calls a method of the user's."""

    class Turned(nn.Conv1d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
            COUNTS[0] += 1
            return super()._conv_forward(x, factor * weight, bias)

    return Turned(2, 2, 1)


def replacing_a_value(factor: float) -> Any:
    class Sorted(BaseException):
        args = (factor,)

    return Sorted()


def wrapping(factor: float) -> Any:
    @functools.wraps(mse_loss)
    def inner(f: Tensor, y: Tensor) -> Tensor:
        return mse_loss(f * factor, y)

    return inner


def wrapping_a_forward(factor: float) -> Any:
    model: Any = nn.Linear(2, 2)
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda x: factor * forward(x))
    return model


def wrapped_by_installed_code(factor: float) -> Any:
    wrapper = torch.no_grad()(lambda x: factor * x)
    wrapper.__module__ = "torch"
    del wrapper.__wrapped__
    return wrapper


def with_attributes_of_our_names(factor: float) -> Any:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.methods, self.hooks = ("a", "b"), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return factor * x

    return Named()


CHANGED = [
    *(replacing, replacing_a_value, wrapping, wrapping_a_forward, wrapped_by_installed_code),
    with_attributes_of_our_names,
]


@pytest.mark.parametrize("made", CHANGED, ids=lambda made: made.__name__)
def test_changed_code_is_seen(made: Any) -> None:
    described = []
    for factor in (1.0, 1.0, 2.0):
        torch.manual_seed(0)
        described.append(Describer().of(made(factor), "it"))
    assert described[0] == described[1]
    assert described[0] != described[2]


def test_a_module_and_its_child_of_our_names_are_told_apart() -> None:
    child = nn.Sequential()
    child.add_module("class", nn.Tanh())
    child.add_module("methods", nn.ReLU())
    assert all(name in str(Describer().of(child, "it")) for name in ("Sequential", "Tanh", "ReLU"))


def test_methods_that_installed_code_may_call_change_something_around_them() -> None:
    assert describer_of(replacing(1.0), nn.CrossEntropyLoss()).changes


def test_what_only_such_methods_write_stays_an_option() -> None:
    class Scaled(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            self.scale = 1.0

    assert "scale" in str(Describer().of(Scaled(2, 2), "it"))


def scripted(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean()


def test_code_that_is_not_pythons_cannot_be_told() -> None:
    describer = Describer()
    script: Any = torch.jit.script
    assert "square" in str(describer.of(script(scripted), "the loss"))
    assert describer.untold == ["the loss"]
