"""A weight that is reshaped on its way to a function, and has its own shape there: it is the weight itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import PackpropError, extensions
from tests.cases.models.wrapping import Apply
from tests.references.per_sample import check_rows
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


@pytest.mark.parametrize("samples", [4, 6])
@pytest.mark.parametrize("of", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights(of: str, samples: int) -> None:
    """A product with a buffer is made of parameters alone, also if it has as many rows as there are samples."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4).double(), orthogonal_map=of)
    model = packprop.extend(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3).double()))
    check_rows(model, torch.randn(samples, 4).double(), torch.arange(samples) % 3)


def test_samples_that_a_buffer_mixes() -> None:
    """The product with the buffer has rows of the batch in it, which the parameter has met before."""
    torch.manual_seed(0)
    model = packprop.extend(Apply(lambda m, x: m.base @ (m.w * x.clone())))
    model.register_parameter("w", nn.Parameter(torch.randn(4, 3).double()))
    model.register_buffer("base", torch.randn(4, 4).double())
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(4, 3).double()), torch.arange(4) % 3)
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
