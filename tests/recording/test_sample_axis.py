"""The axis of the samples in what the loss takes, as users declare it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.recording.marks import EXTENDED
from packprop.engine.recording.switch import extended, is_extended
from packprop.engine.recording.unchanged import unchanged
from packprop.errors import BadInput, PackpropError
from tests.cases.models.wrapping import Apply
from tests.references.running import assert_near
from tests.selection import one_in


def rows_of(model: nn.Module, terms: Tensor) -> dict[str, Tensor]:
    """Gradients of terms, one after the other."""
    named = dict(model.named_parameters())
    options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = [torch.autograd.grad(term, list(named.values()), **options) for term in terms]
    return {name: torch.stack(own) for name, own in zip(named, zip(*rows, strict=True), strict=True)}


def check(
    model: nn.Module,
    *inputs: Tensor,
    out_axis: int = 1,
    how: str = "extend",
    sample_axis: Any = 1,
    **named: Any,
) -> None:
    """BatchGrad of a squared error, against the gradient of each sample's terms."""
    with packprop.disable():
        out = model(*inputs, **named)
    target = torch.randn_like(out.detach())
    expected = rows_of(model, (out - target).square().movedim(out_axis, 0).flatten(1).sum(1))
    declared = {"sample_axis": sample_axis}
    packprop.extend(model, **(declared if how == "extend" else {}))
    for _ in range(2):
        with packprop.record(**(declared if how == "record" else {})):
            loss = F.mse_loss(model(*inputs, **named), target, reduction="sum")
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        for name, parameter in model.named_parameters():
            assert_near(parameter.grad_batch, expected[name], name, 1e-9, floor=1e-6)


def sequences(layer: nn.Module, last: bool = False) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        out = m.layer(x, x, x)[0] if isinstance(m.layer, nn.MultiheadAttention) else m.layer(x)[0]
        return m.head(torch.tanh(out[-1] if last else out))

    return Apply(forward, layer=layer, head=nn.Linear(4, 2)).double()


@one_in(5)
@pytest.mark.parametrize("how", ["extend", "record"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("times", "samples"), [(5, 3), (3, 5), (4, 4), (6, 3), (2, 4)])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: nn.LSTM(4, 4), id="lstm"),
        pytest.param(lambda: nn.RNN(4, 4), id="rnn"),
        pytest.param(lambda: nn.GRU(4, 4), id="gru"),
        pytest.param(lambda: nn.MultiheadAttention(4, 2), id="attention"),
    ],
)
def test_time_first(layer: Callable[[], nn.Module], times: int, samples: int, last: bool, how: str) -> None:
    x = torch.randn(times, samples, 4).double()
    check(sequences(layer(), last), x, out_axis=0 if last else 1, how=how, sample_axis=0 if last else 1)


@pytest.mark.parametrize(("times", "samples"), [(5, 3), (4, 4)])
def test_layers_by_position(times: int, samples: int) -> None:
    """Nothing in the graph tells time from samples: what was declared does, also if it is the leading axis."""
    x = torch.randn(times, samples, 3).double()
    for axis in (0, 1):
        layers = {"first": nn.Linear(3, 3), "head": nn.Linear(3, 2)}
        model = Apply(lambda m, x: m.head(torch.tanh(m.first(x))), **layers).double()
        check(model, x, out_axis=axis, sample_axis=axis)


@pytest.mark.parametrize(("times", "samples"), [(5, 3), (4, 4)])
def test_inputs_of_several_kinds(times: int, samples: int) -> None:
    """A transformer's mask has the samples first, its inputs second: they play no part."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    x, mask = torch.randn(times, samples, 4).double(), torch.zeros(samples, times, dtype=torch.bool)
    mask[0, -1] = True
    check(model, x, src_key_padding_mask=mask)


def test_initial_states_have_the_axis_too() -> None:
    model = Apply(lambda m, x, h, c: m.layer(x, (h, c))[0], layer=nn.LSTM(4, 4)).double()
    x, state = torch.randn(5, 3, 4).double(), torch.randn(1, 3, 4).double()
    check(model, x, state, state.clone())


def test_what_was_declared_is_checked() -> None:
    """Attention that takes samples for time mixes them."""
    model = packprop.extend(sequences(nn.MultiheadAttention(4, 2)), sample_axis=0)
    x = torch.randn(5, 3, 4).double()
    with packprop.record():
        out = model(x)
        loss = F.mse_loss(out, torch.randn_like(out))
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert "sample_axis=0" in str(caught.value)
    assert "5" in caught.value.why


def test_it_stays_with_copies_and_goes_with_restore() -> None:
    model = packprop.extend(sequences(nn.GRU(4, 4)), sample_axis=1)
    x = torch.randn(4, 4, 4).double()
    for each in (copy.deepcopy(model), packprop.extend(model)):
        assert rows_after(each, x) == 4
    assert not any("sample_axis" in name for name in vars(packprop.restore(model)))


def rows_after(model: nn.Module, x: Tensor) -> int:
    with packprop.record():
        out = model(x)
        loss = F.mse_loss(out, torch.zeros_like(out))
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    return len(model.head.weight.grad_batch)


def test_over_a_data_set() -> None:
    model = packprop.extend(sequences(nn.GRU(4, 4), last=True))
    data = [(torch.randn(5, n, 4).double(), torch.randn(n, 2).double()) for n in (3, 2)]
    result = packprop.compute(
        model, nn.MSELoss(reduction="sum"), data, [extensions.BatchGrad()], progress=False
    )
    (values,) = result.values()
    assert all(len(rows) == 5 for rows in values.values())


@pytest.mark.parametrize("around", [extended, lambda model: unchanged(model, "Something was asked for.")])
def test_an_axis_outlasts_a_context_that_extends_the_model(around: Any) -> None:
    """``compute``, monitors and profiles extend models for a while: declarations are there afterwards."""
    model = packprop.extend(nn.Sequential(packprop.extend(nn.Linear(4, 4), sample_axis=0)), sample_axis=1)
    before = [dict(vars(module)) for module in model.modules()]
    with around(model):
        pass
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model in EXTENDED


def test_a_context_that_extends_a_model_leaves_parts_alone_that_were_extended() -> None:
    head = packprop.extend(nn.TransformerEncoderLayer(4, 2, 4), sample_axis=1)
    model, before = nn.Sequential(nn.MultiheadAttention(4, 2), head), dict(vars(head))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with extended(model):
        assert is_extended(model)
    assert not is_extended(model)
    assert vars(head) == before
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model not in EXTENDED
    assert head in EXTENDED


class Doubled(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return 2 * self.loss(out, target)


class Squares(nn.Module):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().sum()


@pytest.mark.parametrize("make", [nn.MSELoss, Squares])
@pytest.mark.parametrize("around", ["nothing", "record", "record-with-axis", "loss"])
def test_the_axis_of_a_loss_holds_whatever_its_call_is_inside(around: str, make: Callable[[], Any]) -> None:
    loss = packprop.extend(make(), sample_axis=1)
    model = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    if around == "loss":
        loss = packprop.extend(Doubled(loss))
    context = {"record": packprop.record(), "record-with-axis": packprop.record(sample_axis=0)}
    out = model(x)
    with context.get(around, nullcontext()):
        value = loss(out, y)
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    assert len(model.weight.grad_batch) == 5


def test_the_axis_of_a_loss_holds_in_data_sets_monitors_and_plans() -> None:
    """They call it inside ``record()``."""
    model = packprop.extend(nn.Linear(3, 2).double())
    loss = packprop.extend(nn.MSELoss(reduction="sum"), sample_axis=1)
    data = [(torch.randn(4, n, 3).double(), torch.randn(4, n, 2).double()) for n in (5, 3)]
    (values,) = packprop.compute(model, loss, data, [extensions.BatchGrad()], progress=False).values()
    assert len(values["weight"]) == 8
    assert packprop.plan(model, loss, data[0], [extensions.BatchGrad()]).samples == 5
    monitor = packprop.Monitor(model, every=1, quantities=["sample_norms"], log=lambda *_: None)
    with monitor.step():
        loss(model(data[0][0]), data[0][1]).backward()
    assert monitor.last["samples"] == 5


def test_a_loss_with_an_axis_counts_for_the_documents_around_it() -> None:
    loss = packprop.extend(Squares(), sample_axis=1)
    model = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    with packprop.record(documents=torch.arange(20).view(4, 5)):
        value = loss(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    assert len(model.weight.grad_batch) == 20


class Step(nn.Module):
    """Calls the loss itself, as modules of training loops do."""

    def __init__(self, model: nn.Module, flattens: bool) -> None:
        super().__init__()
        self.model, self.flattens = model, flattens

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        return F.mse_loss(out.flatten(0, 1), y.flatten(0, 1)) if self.flattens else F.mse_loss(out, y)


@pytest.mark.parametrize("how", ["returns", "calls-the-loss", "calls-the-loss-on-rows"])
@pytest.mark.parametrize("sample_axis", [None, 0])
def test_the_axis_of_a_model_holds_in_an_extended_module_around_it(how: str, sample_axis: int | None) -> None:
    """Unless this module declares another one: monitors, ``compute`` and others extend what they get."""
    model = packprop.extend(nn.Linear(3, 2).double(), sample_axis=1)
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    if how == "returns":
        outer: nn.Module = packprop.extend(nn.Sequential(model), sample_axis=sample_axis)
        loss = F.mse_loss(outer(x), y)
    else:
        outer = packprop.extend(Step(model, how.endswith("rows")), sample_axis=sample_axis)
        loss = outer(x, y)
    for retain in (True, False):
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward(retain_graph=retain)
        assert len(model.weight.grad_batch) == (5 if sample_axis is None else 4)


@pytest.mark.parametrize("whole", [True, False])
def test_the_axis_around_a_model_holds_for_a_loss_in_arithmetic(whole: bool) -> None:
    model = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    with packprop.record(sample_axis=1):
        out = model(x)
        loss = (out - y).square().sum() if whole else out.sum()
    loss = loss if whole else (out - y).square().sum()
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert len(model.weight.grad_batch) == 5


def test_an_axis_that_nothing_takes_is_refused() -> None:
    model = packprop.extend(nn.Linear(3, 2).double())
    out = model(torch.randn(4, 5, 3).double())
    with pytest.raises(BadInput, match="sample_axis=1"), packprop.record(sample_axis=1):
        out.square().sum()
    with torch.no_grad(), packprop.record(sample_axis=1):
        out.square().sum()


class Terms(nn.Module):
    """No loss that packprop knows: it returns a number for each sample."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().sum((0, 2))


def test_the_axis_of_a_loss_that_packprop_does_not_know_is_refused() -> None:
    loss, out = packprop.extend(Terms(), sample_axis=1), nn.Linear(3, 2)(torch.randn(4, 5, 3))
    with pytest.raises(BadInput, match="sample_axis=1"):
        loss(out, torch.zeros(4, 5, 2))
    assert not torch.overrides._get_current_function_mode_stack()
    loss(out.detach(), torch.zeros(4, 5, 2))
