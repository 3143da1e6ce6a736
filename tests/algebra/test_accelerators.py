"""Algorithms that only accelerators take, tried on a CPU: they give what those of a CPU give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions, kronecker
from packprop.engine.algebra import cells, decompositions, kernels, statistics
from packprop.engine.tensors import tensors_in
from tests.references.running import assert_near

FIRST_ORDER = ("BatchL2Grad", "SumGradSquared", "Variance")
SECOND_ORDER = ("DiagGGNExact", "DiagHessian", "KFLR")


class Shared(nn.Module):
    """Layers that positions share, in groups and not, and one that they do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Conv1d(4, 6, 3, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).mT
        out: Tensor = self.head(torch.tanh(self.second(hidden)).mean(2))
        return out


def saved(extension: str) -> list[Tensor]:
    """Return what an extension saves for each parameter, with norms by both algorithms."""
    torch.manual_seed(0)
    model, loss = packprop.extend(Shared()), packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 7, 3), torch.randint(3, (5,))
    asked = getattr(extensions, extension)()
    found: list[Tensor] = []
    for norms in ("products", "gradients"):
        with packprop.algorithms(norms=norms), packprop.backpack(asked):
            loss(model(x), y).backward()
        for parameter in model.parameters():
            values = getattr(parameter, asked.savefield)
            found += tensors_in([values])
            if extension == "KFLR":
                found.append(kronecker.dense(kronecker.eigen(values)))
    return found


@pytest.mark.parametrize("extension", [*FIRST_ORDER, *SECOND_ORDER])
def test_values_are_those_of_a_processor(extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved(extension)
    asked: list[str] = []

    def kind(tensor: Tensor) -> str:
        asked.append("cuda")
        return "cuda"

    for module in (cells, decompositions, kernels, statistics):
        monkeypatch.setattr(module, "device_kind", kind)
    for place, (found, known) in enumerate(zip(saved(extension), expected, strict=True)):
        assert_near(found, known, f"value {place}", tolerance=1e-5)
    assert asked
