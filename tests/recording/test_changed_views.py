"""A layer's output that is a view of something inside of it, and is changed in place by another use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import packprop
from tests.cases.models.wrapping import Apply
from tests.references.running import assert_near, assert_rows_of_terms


def check(model: nn.Module, x: Tensor) -> None:
    """Gradients of single samples, beside those of each sample's own terms."""
    y = packprop.extend(model)(x)
    loss = packprop.extend(nn.MSELoss(reduction="sum"))(y, torch.zeros_like(y))
    assert_rows_of_terms(y.square(), loss, model.parameters())
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, name)


def shifted(m: nn.Module, x: Tensor) -> Tensor:
    """Positions are added in place to what a layer made of sequences, of which PyTorch returns a view."""
    h = m.layer(x)
    h += m.shift(torch.arange(x.shape[1]))
    return m.norm(h)


@pytest.mark.parametrize("bias", [True, False])
def test_no_layer_gets_zeros_for_a_history_that_is_gone(bias: bool) -> None:
    """They were zero, without any error, when functions were recorded in the forward pass."""
    model = Apply(
        shifted, layer=nn.Linear(3, 4, bias=bias), shift=nn.Embedding(5, 4), norm=nn.LayerNorm(4)
    ).double()
    check(model, torch.randn(2, 5, 3).double())


def test_a_view_of_a_layer_that_is_changed_in_place() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layer(x)
        part = h.view(len(h), 2, 2)
        part += m.shift
        return part * 2

    model = Apply(forward, layer=nn.Linear(3, 4), shift=nn.Embedding(2, 2)).double()
    model.shift = nn.Parameter(torch.randn(2).double())
    check(model, torch.randn(3, 3).double())
