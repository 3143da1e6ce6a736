"""What ``torch.compile`` compiles is right, and refused by name where more is asked for of one node."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.recording import unrecorded
from tests.references.per_sample import batch, network, rows_by_loop
from tests.references.running import assert_near
from tests.selection import one_in
from tests.versions import needs_recent

Made = tuple[nn.Module, nn.Module]
BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unrecorded, "_traced", unrecorded._Traced())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def before(backend: str) -> Made:
    model = network()
    return packprop.extend(torch.compile(model, backend=backend)), model


def after(backend: str) -> Made:
    model = packprop.extend(network())
    return torch.compile(model, backend=backend), model


def whole(backend: str) -> Made:
    """The compiler may not leave anything out."""
    model = packprop.extend(network())
    return torch.compile(model, backend=backend, fullgraph=True), model


def in_place_before(backend: str) -> Made:
    model = network()
    model.compile(backend=backend)
    return packprop.extend(model), model


def in_place_after(backend: str) -> Made:
    model = packprop.extend(network())
    model.compile(backend=backend)
    return model, model


def submodule(backend: str) -> Made:
    model = network()
    model[0] = torch.compile(model[0], backend=backend)
    return packprop.extend(model), model


class Own(nn.Linear):
    """The compiler skips calls of modules of PyTorch's own that begin outside of what it compiles."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def submodule_in_place(backend: str) -> Made:
    model = network()
    model[0] = Own(3, 4).double()
    packprop.extend(model)[0].compile(backend=backend, fullgraph=True)
    return model, model


WAYS = (before, after, whole, in_place_before, in_place_after, submodule, submodule_in_place)


@one_in(10)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_training_is_what_it_is_without_packprop(make: Callable[[str], Made], backend: str) -> None:
    called, model = make(backend)
    plain, (x, y) = network(), batch()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            loss = loss_function(called(x), y)
            loss.backward()
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    assert_near(loss.detach(), expected.detach(), "loss")
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert_near(found.grad, wanted.grad, "grad")
    assert not [warning for warning in seen if issubclass(warning.category, packprop.PackpropWarning)]


@one_in(5)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:packprop does not record")
def test_more_than_the_gradient_is_refused(make: Callable[[str], Made], inside: bool) -> None:
    called, _ = make("aot_eager")
    x, y = batch()
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    out = None if inside else called(x)
    with (
        pytest.raises(packprop.PackpropError, match=r"0\.(_orig_mod\.)?weight") as error,
        packprop.backpack(extensions.BatchGrad()),
    ):
        loss_function(called(x) if out is None else out, y).backward()
    assert "torch.compile" in str(error.value)


@one_in(3)
@needs_recent
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:packprop does not record")
def test_a_backend_that_calls_torch_functions(make: Callable[[str], Made], inside: bool) -> None:
    """As ``backend="eager"`` does: the nodes of these functions are in the graph."""
    called, model = make("eager")
    x, y = batch()
    plain = network()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    expected = rows_by_loop(plain, x, y).values()
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        out = None if inside else called(x)
        with packprop.backpack(extensions.BatchGrad()):
            loss_function(called(x) if out is None else out, y).backward()
        for parameter, rows in zip(model.parameters(), expected, strict=True):
            assert_near(parameter.grad_batch, rows, "rows")


def test_the_warning_comes_with_the_first_code_of_packprop_outside() -> None:
    """The compiler lets hooks that it traces take a note, and no more; a second compilation is not needed."""
    called, _ = after("aot_eager")
    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = nn.functional.cross_entropy(called(x), y)
        with torch.compiler.set_stance("fail_on_recompile"):
            called(x)
    told = pytest.warns(packprop.PackpropWarning, match="does not record what torch.compile compiles")
    with pytest.raises(packprop.PackpropError), told, packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_a_compiled_model_that_is_not_extended() -> None:
    """No name is known of what is in it, but its shape."""
    model = torch.compile(network(), backend="aot_eager")
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    refused = pytest.raises(packprop.PackpropError, match=r"\[4, 3\](.|\n)*_orig_mod")
    with refused, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())


@pytest.mark.filterwarnings("ignore:packprop does not record")
def test_the_way_out() -> None:
    """The same model, called without the compiler."""
    fast, model = after("aot_eager")
    x, y = batch()
    fast(x)
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.CrossEntropyLoss())(fast._orig_mod(x), y).backward()
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:packprop does not record")
def test_a_compiled_part_that_is_frozen(backend: str) -> None:
    """What lies behind it is recorded."""
    model = network()
    model[0].requires_grad_(False)
    model[0] = torch.compile(model[0], backend=backend)
    packprop.extend(model)
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    plain = network()
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    assert_near(model[2].weight.grad_batch, rows_by_loop(plain, x, y)["2.weight"], "2.weight")


class WithFunction(nn.Module):
    """A compiled function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(3, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_without_parameters(backend: str) -> None:
    """A pass goes through it."""

    def function(x: Tensor) -> Tensor:
        return x.tanh() * 2

    model = WithFunction(torch.compile(function, backend=backend, fullgraph=True)).double()
    packprop.extend(model)
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    model.function = function
    for name, expected in rows_by_loop(packprop.restore(model), x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)


def test_a_compiled_optimizer() -> None:
    model = packprop.extend(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        weight = model[0].weight.detach().clone()
        step()
    assert_near(model[0].weight.detach(), weight - 0.1 * model[0].weight.grad, "weight")
