"""Shapes that mislead: axes as long as the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.cases.models.wrapping import Apply, Raw
from tests.graph.one_by_one import check, double


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Linear(4, 4), id="linear"),
        pytest.param(
            lambda: Apply(
                lambda m, x: m.b(m.a(x).tanh().transpose(1, 2)).transpose(1, 2),
                a=nn.Linear(4, 4),
                b=nn.Linear(4, 4),
            ),
            id="mixer",
        ),
        pytest.param(
            lambda: Apply(
                lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh().cumsum(0)).transpose(0, 1),
                a=nn.Linear(4, 4),
                b=nn.Linear(4, 4),
            ),
            id="time-first",
        ),
        pytest.param(
            lambda: Raw(
                lambda m, x: torch.tanh(x.permute(2, 0, 1) @ m.w).permute(1, 2, 0) + m.b,
                w=(4, 4),
                b=(4, 4),
            ),
            id="permuted",
        ),
        pytest.param(lambda: nn.Conv1d(4, 4, 3, padding=1), id="convolution"),
        pytest.param(lambda: nn.LayerNorm((4, 4)), id="layer-norm"),
        pytest.param(lambda: Raw(lambda m, x: (m.w @ x.flatten(1).T).T, w=(4, 16)), id="weight-first"),
        pytest.param(
            lambda: Apply(lambda m, x: m.a(x.transpose(0, 1))[0].transpose(0, 1), a=nn.GRU(4, 4)),
            id="recurrent-time-first",
        ),
    ],
)
def test_every_axis_as_long_as_the_batch(model: Callable[[], nn.Module]) -> None:
    check(double(model()), torch.randn(4, 4, 4).double())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_batch_sizes_that_divide_other_axes(size: int) -> None:
    model = Apply(
        lambda m, x: (
            m.b(m.a(x.reshape(-1, 2)).tanh().view(x.shape[0], 4, 6).transpose(0, 1)).mean(0) + m.c(x.mean(1))
        ),
        a=nn.Linear(2, 6),
        b=nn.Linear(6, 2),
        c=nn.Linear(2, 2),
    )
    check(double(model), torch.randn(size, 4, 2).double())
