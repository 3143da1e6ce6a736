"""A weight that is reshaped on its way to a function, and has its own shape there: it is the weight itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from tests.references.running import assert_near
from tests.selection import one_in

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda w: w.reshape(2, 2, 3).reshape(4, 3),
    "view": lambda w: w.view(4, 3),
    "flatten": lambda w: w.flatten().unflatten(0, (4, 3)),
    "squeeze": lambda w: w.unsqueeze(0).squeeze(0),
    "clone": lambda w: w.clone(),
}
OTHER_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.T.reshape(4, 3),
    "scaled": lambda w: (2 * w).view(4, 3),
    "sorted": lambda w: w.flip(0),
}


class Reshaping(nn.Module):
    """A linear layer whose weight goes another way to its function."""

    def __init__(self, way: Callable[[Tensor], Tensor], checkpointed: bool) -> None:
        super().__init__()
        self.layer, self.way, self.checkpointed = nn.Linear(3, 4), way, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            result: Tensor = checkpoint(self.apply_to, x, use_reentrant=False)
            return result
        return self.apply_to(x)

    def apply_to(self, x: Tensor) -> Tensor:
        return F.linear(x, self.way(self.layer.weight), self.layer.bias.view(4))


def found(way: Callable[[Tensor], Tensor], checkpointed: bool) -> nn.Parameter:
    torch.manual_seed(0)
    model = packprop.extend(Reshaping(way, checkpointed).double())
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x).flatten(0, 1), torch.arange(10) % 4)
    exact = extensions.KFLR(), extensions.BatchGrad(), extensions.DiagGGNExact()
    with packprop.backpack(*exact):
        loss.backward()
    assert isinstance(model.layer.weight, nn.Parameter)
    return model.layer.weight


@one_in(2)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_reshaped_weight_keeps_its_structure(way: Callable[[Tensor], Tensor], checkpointed: bool) -> None:
    weight, plain = found(way, checkpointed), found(lambda w: w, False)
    for mine, theirs in zip(weight.kflr, plain.kflr, strict=True):
        assert_near(mine, theirs, "kflr")
    assert_near(weight.grad_batch, plain.grad_batch, "grad_batch")
    assert_near(weight.diag_ggn_exact, plain.diag_ggn_exact, "diag_ggn_exact")
    assert_near(weight.grad_batch.sum(0), weight.grad, "grad")


@pytest.mark.parametrize("way", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_other_entries_or_another_order_are_pulled_back(way: Callable[[Tensor], Tensor]) -> None:
    weight = found(way, False)
    assert len(weight.kflr) == 1
    assert_near(weight.grad_batch.sum(0), weight.grad, "grad")
