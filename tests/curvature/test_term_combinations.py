"""The Hessian diagonal of the whole loss: terms that no sample enters, tied and checkpointed parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from tests.curvature.test_terms import hessian_diagonal
from tests.references.running import assert_near
from tests.selection import often, one_in


class Model(nn.Module):
    """Encoder and decoder share their weight, if tied; the first part lies in a checkpoint, if asked for."""

    def __init__(self, tied: bool, checkpointed: bool, smooth: bool) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)
        self.tied, self.checkpointed = tied, checkpointed
        self.act = nn.Tanh() if smooth else nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        weight = self.a.weight.T if self.tied else self.b.weight
        return self.head(self.act(F.linear(hidden, weight, self.b.bias)))

    def first(self, x: Tensor) -> Tensor:
        return self.act(self.a(x))


TERMS: dict[str, Callable[[Any], Tensor]] = {
    "weights": lambda m: sum((p**4).sum() for name, p in m.named_parameters() if "weight" in name),
    "biases": lambda m: sum((p**3).sum() for name, p in m.named_parameters() if "bias" in name),
    "weights and biases apart": lambda m: TERMS["weights"](m) + 3 * TERMS["biases"](m),
    "tied product": lambda m: (m.a.weight @ m.a.weight.T).square().sum(),
}


@one_in(5)
@often(lambda smooth, checkpointed, tied, term, factor: checkpointed == (factor == 1.0))
@pytest.mark.parametrize("smooth", [True, False], ids=["tanh", "relu"])
@pytest.mark.parametrize("checkpointed", [True, False], ids=["checkpoint", "direct"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["as-it-is", "scaled"])
def test_diagonal_of_the_whole_loss(
    term: Callable[[Any], Tensor], tied: bool, checkpointed: bool, smooth: bool, factor: float
) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Model(tied, checkpointed, smooth).double())
    x, y = torch.randn(5, 3).double(), torch.randint(3, (5,))
    asked = extensions.DiagHessian(), extensions.BatchDiagHessian()
    with packprop.backpack(*asked):
        (factor * (packprop.extend(nn.CrossEntropyLoss())(model(x), y) + 0.1 * term(model))).backward()
    model.checkpointed = False
    with packprop.disable():
        data = factor * F.cross_entropy(model(x), y)
        whole = data + factor * 0.1 * term(model)
    for name, p in model.named_parameters():
        if hasattr(p, "diag_h"):
            assert_near(p.diag_h, hessian_diagonal(whole, p), name)
            assert_near(p.diag_h_batch.sum(0), hessian_diagonal(data, p), f"{name} of samples")
        else:
            assert (tied, name) == (True, "b.weight")  # it meets no sample
