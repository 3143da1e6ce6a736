"""Attention of PyTorch's own, of which one weight holds several projections."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from tests.references.running import assert_near, assert_rows_of_terms


class Attending(nn.Module):
    """Attention of the input to itself, or to its first positions; under a checkpoint if asked for."""

    def __init__(self, positions: int | None = None, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.positions, self.checkpointed = positions, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        others = x if self.positions is None else x[:, : self.positions]
        y, weights = self.attention(x, others, others)
        return torch.cat([y, weights], 2)


def values(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and gradients of single samples."""
    y = packprop.extend(model)(x)
    loss = packprop.extend(nn.MSELoss())(y, torch.zeros_like(y))
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    return y.detach(), {name: p.grad_batch for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{}, {"positions": 2}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 4, "vdim": 4, "bias": False}],
    ids=["self", "cross", "more-keys", "no-bias"],
)
def test_rows_of_every_projection(options: dict[str, Any]) -> None:
    model, x = packprop.extend(Attending(**options).double()), torch.randn(3, 5, 4).double()
    loss = packprop.extend(nn.MSELoss(reduction="sum"))(y := model(x), torch.zeros_like(y))
    assert_rows_of_terms(model(x).square(), loss, model.parameters())


@pytest.mark.parametrize("options", [{}, {"positions": 2}], ids=["self", "cross"])
def test_outputs_are_the_same_to_the_last_bit(options: dict[str, Any]) -> None:
    model, x = Attending(**options), torch.randn(3, 5, 4)
    assert torch.equal(packprop.extend(copy.deepcopy(model))(x), model(x))


def test_under_a_checkpoint() -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    plain = Attending(positions=2).double()
    again = Attending(positions=2, checkpointed=True).double()
    again.load_state_dict(plain.state_dict())
    (y, expected), (z, found) = values(plain, x), values(again, x)
    assert torch.equal(y, z)
    for name, gradients in expected.items():
        assert_near(found[name], gradients, name)


class Seen(TorchFunctionMode):
    """A mode of the user's, which notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_user_sees_the_whole_function() -> None:
    model, x = Attending(positions=2).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    _, expected = values(copy.deepcopy(model), x)
    with Seen() as seen:
        y = packprop.extend(model)(x)
    assert "multi_head_attention_forward" in seen.names
    assert "linear" not in seen.names
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.MSELoss())(y, torch.zeros_like(y)).backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad_batch, expected[name], name)
