"""Attention that is not trained computes what it does without packprop; what lies behind it is recorded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.engine.recording.recorder import CHOOSERS
from tests.references.running import assert_near
from tests.selection import one_in, thorough


def frozen_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)


class Padded(nn.Module):
    """A frozen encoder of padded sequences, and a trainable head."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.head = body or frozen_encoder(), nn.Linear(8, 3)

    def encode(self, x: Tensor) -> Tensor:
        mask = (x == 0).all(2)
        if isinstance(self.encoder, nn.MultiheadAttention):
            return self.encoder(x, x, x, key_padding_mask=mask)[0]
        return self.encoder(x, src_key_padding_mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).mean(1)


class Checkpointed(Padded):
    """The same, under a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.head(self.encode(x)).mean(1), x, use_reentrant=False)


class Captured(Padded):
    """The head reads what a hook has kept of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.encoder.layers[1].register_forward_hook(lambda _, args, out: self.kept.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.encode(x)
        return self.head(self.kept.pop().to_padded_tensor(0.0, x.shape)).mean(1)


MODELS: dict[str, Callable[[], Padded]] = {
    "encoder": Padded,
    "layer": lambda: Padded(frozen_encoder().layers[0]),
    "attention": lambda: Padded(nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)),
    "checkpointed": Checkpointed,
    "captured": Captured,
}


def sequences() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 5, 8)
    x[1, 3:] = x[2, 4:] = 0
    return x.double(), torch.tensor([0, 2, 1, 0])


INSIDE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "inside-backpack": lambda: packprop.backpack(extensions.BatchGrad()),
    "inside-record": packprop.record,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]().double()


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.filterwarnings("ignore:No backward pass was seen")
def test_outputs_stay_what_they_are(
    model: nn.Module,
    context: Callable[[], AbstractContextManager[Any]],
    inside: Callable[[], AbstractContextManager[Any]],
) -> None:
    """To rounding: a layer alone takes its kernel only where there are no hooks on it."""
    x, _ = sequences()
    with context():
        expected = model(x)
        packprop.extend(model)
        with inside():
            found = model(x)
    torch.testing.assert_close(found, expected)


@one_in(2)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_what_lies_behind_is_recorded(model: nn.Module, inside: bool) -> None:
    x, y = sequences()
    loss_function = nn.CrossEntropyLoss(reduction="sum")
    expected = []
    for sample in range(len(x)):
        loss_function(model(x)[sample : sample + 1], y[sample : sample + 1]).backward()
        expected.append(model.head.weight.grad)
        model.zero_grad()
    packprop.extend(model)
    packprop.extend(loss_function)
    if inside:
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss_function(model(x), y).backward()
    else:
        loss = loss_function(model(x), y)
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
    assert_near(model.head.weight.grad_batch, torch.stack(expected), "head.weight")
    assert model.head.weight.diag_ggn_exact.shape == (3, 8)


def test_an_encoder_in_front_of_an_extended_head() -> None:
    """Both are called inside ``record()``: the encoder's inputs are data."""
    encoder, head = packprop.extend(frozen_encoder()), packprop.extend(nn.Linear(8, 3))
    x, y = sequences()
    x, plain = x.float(), copy.deepcopy(encoder)
    expected = packprop.restore(plain)(x, src_key_padding_mask=(x == 0).all(2))
    with packprop.record():
        hidden = encoder(x, src_key_padding_mask=(x == 0).all(2))
        loss = packprop.extend(nn.CrossEntropyLoss())(head(hidden).mean(1), y)
    torch.testing.assert_close(hidden, expected)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    torch.testing.assert_close(head.weight.grad_batch.sum(0), head.weight.grad)


def test_an_encoder_that_is_trained_is_recorded() -> None:
    model = Padded().double().requires_grad_(True)
    x, y = sequences()
    expected = model(x)
    packprop.extend(model)
    out = model(x)
    assert torch.equal(out, expected)
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.CrossEntropyLoss())(out, y).backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, name)


def test_another_mode_stays_in_force() -> None:
    """PyTorch takes the slow path under it without packprop, too."""
    model = Padded().double()
    x, _ = sequences()
    with torch.device("cpu"):
        expected = model(x)
        assert torch.equal(packprop.extend(model)(x), expected)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_error_inside_puts_recording_back(error: BaseException) -> None:
    model = packprop.extend(Padded().double())
    x, y = sequences()

    def fail(*_: Any) -> None:
        raise error

    handle = model.encoder.layers[0].linear1.register_forward_hook(fail)
    with pytest.raises(type(error)), packprop.backpack(extensions.BatchGrad()), packprop.record():
        model(x)
    assert not torch.overrides._get_current_function_mode_stack()
    handle.remove()
    with packprop.backpack(extensions.BatchGrad()), packprop.record():
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    torch.testing.assert_close(model.head.weight.grad_batch.sum(0), model.head.weight.grad)
    assert not torch.overrides._get_current_function_mode_stack()


@thorough
def test_no_other_module_of_torch_asks_for_modes() -> None:
    """A module that begins to ask after an upgrade of torch has to stand in the table."""
    modules = {value for value in vars(nn).values() if isinstance(value, type) and issubclass(value, nn.Module)}
    asking = {module for module in modules if "has_torch_function" in inspect.getsource(module)}
    assert asking == set(CHOOSERS)
