"""What may change between calls, and is seen: values, parameters, modules, precision, random state, hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropWarning
from tests.compiled.steps import batch, check_call, compiled, network, quietly, replays, settle
from tests.references.running import assert_near
from tests.selection import often, one_in, thorough

LOSS = nn.CrossEntropyLoss()
ASKED = (extensions.BatchGrad(), extensions.DiagGGNExact())


def halved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def swapped(model: nn.Module) -> None:
    model[0].weight.data = torch.randn_like(model[0].weight)


def with_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def stepped(model: nn.Module) -> None:
    with_gradients(model)
    torch.optim.Adam(model.parameters(), 0.1).step()


@one_in(3)
@often(lambda change: change in (halved, replaced, with_gradients))
@pytest.mark.parametrize("change", [halved, loaded, replaced, swapped, with_gradients, stepped])
def test_values_may_change(change: Callable[[nn.Module], None]) -> None:
    model = network()
    step = compiled(model, *ASKED)
    settle(step)
    change(model)
    check_call(step, model, LOSS, *batch(), *ASKED)
    check_call(step, model, LOSS, *batch(), *ASKED)
    assert replays(step) == 2


def frozen(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    del model[0].weight.grad_batch  # what an earlier pass has left stays


def other_layer(model: nn.Module) -> None:
    model[1] = nn.Tanh()


def other_slope(model: nn.Module) -> None:
    model[1].negative_slope = 0.7


def in_single(model: nn.Module) -> None:
    model.float()


@one_in(5)
@pytest.mark.parametrize("change", [frozen, other_layer, other_slope, in_single])
def test_what_a_pass_does_may_change(change: Callable[[nn.Module], None]) -> None:
    model = network()
    model[1] = nn.LeakyReLU(0.1)
    step = compiled(model, extensions.BatchGrad())
    settle(step)
    change(model)
    kind = torch.float32 if change is in_single else torch.float64
    for number in range(5):
        x, y = batch()
        check_call(step, model, LOSS, x.to(kind), y, extensions.BatchGrad())
        assert replays(step) == max(0, number - 2)


def test_gradients_accumulate() -> None:
    model = network()
    step = compiled(model, extensions.BatchL2Grad())
    settle(step)
    model.zero_grad()
    x, y = batch()
    step(x, y)
    once = model[0].weight.grad.clone()
    step(x, y)
    assert_near(model[0].weight.grad, 2 * once, "gradient")
    assert model[0].weight.grad is not model[0].weight.batch_l2


@thorough
def test_the_last_batch_is_smaller() -> None:
    model = network()
    step = compiled(model, *ASKED)
    for _ in range(3):
        for _ in range(4):
            check_call(step, model, LOSS, *batch(5), *ASKED)
        check_call(step, model, LOSS, *batch(2), *ASKED)
    assert replays(step) == 12 - 3
    check_call(step, model, LOSS, *batch(2), *ASKED)
    assert replays(step) == 10


def test_dropout_is_fresh_and_repeatable() -> None:
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    step = compiled(model, extensions.BatchGrad())
    settle(step)
    x, y = batch()
    torch.manual_seed(1)
    first, second = step(x, y), step(x, y)
    torch.manual_seed(1)
    assert torch.equal(step(x, y), first)
    assert not torch.equal(first, second)
    check_call(step, model, LOSS, x, y, extensions.BatchGrad())
    model.eval()
    for _ in range(5):
        check_call(step, model, LOSS, x, y, extensions.BatchGrad())
    assert torch.equal(step(x, y), step(x, y))


def test_draws_are_fresh_and_repeatable_by_their_generator() -> None:
    model, source = network(), torch.Generator().manual_seed(0)
    step = compiled(model, extensions.DiagGGNMC(generator=source))
    settle(step)
    x, y = batch()
    before = torch.get_rng_state()
    source.manual_seed(5)
    step(x, y)
    first = model[0].weight.diag_ggn_mc.clone()
    step(x, y)
    assert not torch.equal(model[0].weight.diag_ggn_mc, first)
    source.manual_seed(5)
    step(x, y)
    assert torch.equal(model[0].weight.diag_ggn_mc, first)
    assert torch.equal(torch.get_rng_state(), before)
    assert replays(step) == 3


def test_statistics_of_batches_are_written_to_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    other = copy.deepcopy(model)
    step = compiled(model)
    for _ in range(6):
        x, y = batch()
        step(x, y)
        LOSS(other(x), y).backward()
        for (name, own), buffer in zip(model.named_buffers(), other.buffers(), strict=True):
            assert_near(own.double(), buffer.double(), name)
    assert replays(step) == 3
    assert_near(model[0].weight.grad, other[0].weight.grad, "gradient")


def test_autocast_is_that_of_the_call() -> None:
    model = network().float()
    step = compiled(model, extensions.BatchGrad())
    x, y = torch.randn(5, 3), torch.randint(3, (5,))
    for _ in range(4):
        step(x, y)
    plain = step(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            eager = step(x, y)
        halved(model)
        low = step(x, y)
        assert replays(step) == 3
    again = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(LOSS(again(x), y), low, "loss", 1e-6)
    assert not torch.equal(low, eager)
    assert not torch.equal(plain, eager)


class Twisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh()


def test_an_axis_of_samples_that_is_declared_around_the_call() -> None:
    model = packprop.extend(Twisted())
    step = packprop.compile(model, nn.MSELoss(), extensions.BatchGrad(), backend="eager")
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for _ in range(4):
        step(x, y)
    assert replays(step) == 1
    for _ in range(5):
        with packprop.record(sample_axis=1):
            step(x, y)
        assert model.weight.grad_batch.shape == (3,)
    assert replays(step) == 3
    step(x, y)
    assert model.weight.grad_batch.shape == (4,)


class Branch(nn.Module):
    """A branch that begins with zeros, whose nonlinearity has as many features in front as samples behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer((2 * self.inner(x).T).tanh().T)
        return out


@pytest.mark.filterwarnings("ignore:A compiled step runs passes eagerly")
def test_a_place_of_samples_that_zeros_hide_is_not_taken_over() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Branch())
    step = packprop.compile(model, nn.MSELoss(), extensions.DiagHessian(), backend="eager")
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    for _ in range(4):
        step(x, y)
    nn.init.normal_(model.outer.weight)
    step(x, y)
    found = [parameter.diag_h for parameter in model.parameters()]  # type: ignore[attr-defined]  # packprop's
    with packprop.backpack(extensions.DiagHessian()):
        nn.MSELoss()(model(x), y).backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        assert_near(one, parameter.diag_h, "diagonal")  # type: ignore[attr-defined]  # packprop's


class Ramp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.linspace(0.5, 1, 3)).to(x.dtype)


def test_the_default_precision_is_that_of_the_call() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Ramp(), nn.Linear(3, 3))
    step = compiled(model)
    x, y = torch.randn(5, 3), torch.randint(3, (5,))
    for _ in range(4):
        step(x, y)
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(4):
            check_call(step, model, LOSS, x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    assert replays(step) == 2


def test_a_hook_may_take_results_away() -> None:
    model, seen = network(), []

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            seen.append(parameter.diag_ggn_exact.sum().item())
            del parameter.diag_ggn_exact

    step = compiled(model, extensions.DiagGGNExact(), extension_hook=hook)
    x, y = batch()
    for _ in range(5):
        step(x, y)
    assert seen[12:16] == pytest.approx(seen[:4])
    assert seen[16:] == pytest.approx(seen[:4])
    assert not hasattr(model[0].weight, "diag_ggn_exact")
    assert replays(step) == 2


@one_in(3)
@pytest.mark.parametrize(
    "kind", ["on a parameter", "behind accumulation", "on a module", "in the forward pass"]
)
def test_hooks_on_gradients_are_called(kind: str) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if kind == "in the forward pass" and x.requires_grad:
                x.register_hook(count)
            return x

    model, calls = nn.Sequential(network(), Scaled()), []

    def count(*_: Any) -> None:
        calls.append(1)

    step = compiled(model, extensions.BatchGrad())
    if kind != "in the forward pass":
        settle(step)
        quietly(step, *batch())
    if kind == "on a parameter":
        model[0][0].weight.register_hook(count)
    elif kind == "behind accumulation":
        model[0][0].weight.register_post_accumulate_grad_hook(count)
    elif kind == "on a module":
        model[0][2].register_full_backward_hook(count)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            step(*batch())
    assert ["hook" in str(each.message) for each in said] == [True]
    assert len(calls) == 5


def test_a_function_as_loss_and_a_model_that_returns_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.body(x), labels)}

    model = network()
    step = compiled(model, *ASKED, loss=F.cross_entropy)
    settle(step)
    check_call(step, model, F.cross_entropy, *batch(), *ASKED)
    assert replays(step) == 1
    other = WithLoss()
    own = packprop.compile(other, None, *ASKED, backend="eager")
    for _ in range(4):
        x, y = batch()
        loss = own({"x": x, "labels": y})
    assert_near(loss, F.cross_entropy(other.body(x), y), "loss")
    assert replays(own) == 1


def test_the_same_tensor_as_input_and_target() -> None:
    model = nn.Sequential(nn.Linear(3, 3)).double()
    step = compiled(model, extensions.BatchGrad(), loss=nn.MSELoss())
    for _ in range(4):
        x, _ = batch()
        check_call(step, model, nn.MSELoss(), x, x, extensions.BatchGrad())
    assert replays(step) == 1
    check_call(step, model, nn.MSELoss(), x, torch.zeros_like(x), extensions.BatchGrad())


class Configured(nn.Module):
    """A layer that looks up a number in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(factor=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.config.factor


def test_objects_of_modules_are_looked_into() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Configured()).double()
    step = compiled(model, extensions.BatchGrad())
    settle(step)
    model[1].config.factor = 3.0
    check_call(step, model, LOSS, *batch(), extensions.BatchGrad())
    assert replays(step) == 0


def test_options_of_extensions_are_those_of_the_call() -> None:
    """A list of samples that is changed in place was a constant of the graph."""
    model, chosen = network(), [0, 1]
    step = compiled(model, extensions.BatchGrad(subsampling=chosen))
    settle(step)
    chosen[:] = [2, 1]
    check_call(step, model, LOSS, *batch(), extensions.BatchGrad(subsampling=[2, 1]))
    assert replays(step) == 0


@thorough
def test_class_weights_and_dropout_inside_attention() -> None:
    attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 4), attention, nn.Flatten(), nn.Linear(8, 3)).double()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())
    step = compiled(model, *ASKED[:1], loss=loss)
    for _ in range(5):
        x, y = torch.randn(4, 2, 3).double(), torch.randint(3, (4,))
        check_call(step, model, loss, x, y, *ASKED[:1])
    assert replays(step) == 2


def test_weights_become_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)).double()
    step = compiled(model, extensions.BatchGrad())
    settle(step)
    model[2].weight = model[0].weight
    for _ in range(4):
        check_call(step, model, LOSS, *batch(), extensions.BatchGrad())
    assert replays(step) == 1


def test_nothing_is_extended_afterwards_and_results_of_others_stay() -> None:
    model = network()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model[0].weight.own = 1
    step = compiled(model, *ASKED)
    for _ in range(4):
        step(*batch())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model[0].weight.own == 1


def test_values_that_are_not_finite_are_warned_of_in_the_same_words() -> None:
    model = network()
    step = compiled(model, extensions.BatchGrad())
    settle(step)
    x, y = batch()
    x[0] = torch.nan
    packprop.extend(other := copy.deepcopy(model))
    with packprop.record():
        loss = F.cross_entropy(other(x), y)
    with pytest.warns(PackpropWarning) as eager, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    with pytest.warns(PackpropWarning) as own:
        assert step(x, y).isnan()
    assert [str(each.message) for each in own] == [str(each.message) for each in eager]
    assert model[0].weight.grad_batch[0].isnan().all()
    assert model[0].weight.grad_batch[1:].isfinite().all()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_call(step, model, LOSS, *batch(), extensions.BatchGrad())


@thorough
def test_a_budget_is_obeyed_by_the_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 40), nn.Sigmoid(), nn.Linear(40, 12)).double()
    wide, narrow = (compiled(model, extensions.DiagGGNExact(), memory=most) for most in (None, "120KiB"))
    x, y = torch.randn(50, 3).double(), torch.randint(12, (50,))
    for step in (wide, narrow):
        for _ in range(5):  # the first one finds no gradients to accumulate to
            step(x, y)
        check_call(step, model, LOSS, x, y, extensions.DiagGGNExact())
        assert replays(step) >= 1
    assert wide.graph is not None
    assert narrow.graph is not None
    assert len(narrow.graph.nodes) > len(wide.graph.nodes)
