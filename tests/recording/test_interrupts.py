"""After an error nothing stays switched on."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.per_sample import batch, check_rows, network


class Failing(nn.Module):
    """Raises in its forward pass when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("nested", [False, True])
def test_an_error_in_the_forward_pass_leaves_nothing_on(error: BaseException, nested: bool) -> None:
    failing = Failing().double()
    model = packprop.extend(nn.Sequential(failing, nn.Linear(3, 3).double()) if nested else failing)
    x, y = batch()
    failing.error = error
    with pytest.raises(type(error)):
        model(x)
    failing.error = None
    check_rows(model, x, y)
    assert not torch.overrides._get_current_function_mode_stack()
    outside = torch.nn.Parameter(torch.ones(3).double())
    assert not (outside * x).grad_fn.metadata


@pytest.mark.parametrize("calls", [1, 2])
def test_a_part_that_is_called_by_itself_after_an_interrupt(calls: int) -> None:
    """A part is known to be inside a call by where its caller is, and is not once that call is gone."""
    failing = Failing().double()
    model = packprop.extend(nn.Sequential(nn.Sequential(failing), nn.Linear(3, 3).double()))
    x, y = batch()
    for _ in range(calls):
        model(x)
        failing.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        failing.error = None
        check_rows(failing, x, y)
        check_rows(failing.layer, x, y)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_error_inside_record_leaves_nothing_on(error: BaseException) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with pytest.raises(type(error)), packprop.record():
        model(x)
        raise error
    assert not torch.overrides._get_current_function_mode_stack()
    check_rows(model, x, y)


def test_an_interrupt_in_a_frozen_encoder_inside_record() -> None:
    """packprop's modes are off there: they come back before the recording ends."""
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    encoder.layers[0].register_forward_pre_hook(lambda *_: interrupt())
    packprop.extend(encoder)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), packprop.record():
        encoder(torch.randn(2, 3, 4))
    assert not torch.overrides._get_current_function_mode_stack()
    check_rows(packprop.extend(network()), *batch())


class Interrupted(nn.Module):
    """A loss of one's own."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside-backpack"])
def test_an_interrupt_in_a_loss_declares_nothing_for_others(inside: bool) -> None:
    """No hook tells that the call is over."""
    loss = packprop.extend(Interrupted(), sample_axis=1)
    layer = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    context = packprop.backpack(extensions.BatchGrad()) if inside else contextlib.nullcontext()
    with pytest.raises(KeyboardInterrupt), context:
        loss(layer(x), y)
    value = F.mse_loss(layer(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    assert len(layer.weight.grad_batch) == 4


def test_an_interrupt_in_a_loss_inside_another_one() -> None:
    inner = packprop.extend(Interrupted(), sample_axis=1)
    outer = packprop.extend(nn.Sequential())
    outer.forward = inner.__call__
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 3).double().softmax(1)
    layer = packprop.extend(nn.Linear(3, 3).double())
    with pytest.raises(KeyboardInterrupt):
        outer(layer(x), y)
    value = packprop.extend(nn.CrossEntropyLoss(label_smoothing=0.1))(layer(x), y)
    assert not torch.overrides._get_current_function_mode_stack()
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        value.backward()
    assert len(layer.weight.grad_batch) == 4


def test_an_error_in_the_backward_pass_leaves_nothing_on() -> None:
    model = packprop.extend(network())
    x, y = batch()
    out = model(x)

    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    out.register_hook(fail)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    with pytest.raises(KeyError), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert not hasattr(model[0].weight, "grad_batch")
    check_rows(model, x, y)
    plain = F.cross_entropy(model(x), y)
    plain.backward()
