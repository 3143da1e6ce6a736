"""Averages of the batch behind a parameter that meets the inputs entry by entry, as the guide has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import packprop
from packprop import PackpropError, extensions
from tests.cases.models.wrapping import Apply
from tests.references.running import assert_near

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(0, keepdim=True).expand_as(h),
    "joined": lambda h: torch.cat([h, h.mean(0, keepdim=True).expand_as(h)], -1)[:, 1:4],
    "shifted": lambda h: h.exp() - h.mean(0, keepdim=True).expand_as(h),
}


def made(statistic: Callable[[Tensor], Tensor], samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Apply(lambda m, x: statistic(x + m.w))
    model.register_parameter("w", nn.Parameter(torch.randn(3).double()))
    return model, torch.randn(samples, 3).double(), torch.arange(samples) % 3


@pytest.mark.parametrize("of", STATISTICS)
@pytest.mark.parametrize("samples", [3, 5])
def test_terms_have_their_own_gradients(of: str, samples: int) -> None:
    """``x + w`` counts as made of parameters: the values are those of each term of the loss."""
    model, x, y = made(STATISTICS[of], samples)
    terms = F.cross_entropy(model(x), y, reduction="none") / samples
    expected = [torch.autograd.grad(term, model.w, retain_graph=True)[0] for term in terms]
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert_near(model.w.grad_batch, torch.stack(expected), of)


@pytest.mark.parametrize("samples", [3, 5])
def test_statistics_beside_their_rows_are_refused(samples: int) -> None:
    model, x, y = made(lambda h: h / h.norm(), samples)
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
