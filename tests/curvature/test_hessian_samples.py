"""Hessian diagonals of models and losses that couple samples or entries in unusual ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import assert_near


def diagonal_of(value: Any, parameter: Tensor) -> Tensor:
    """By double backward, entry by entry ``[p]``."""
    (slope,) = torch.autograd.grad(value(), parameter, create_graph=True)
    rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in slope.flatten()]
    return torch.stack(rows).diagonal()


class Blocks(nn.Module):
    """Positions of each sample mixed by a matrix of its own, all of them blocks of one."""

    def __init__(self, samples: int, positions: int) -> None:
        super().__init__()
        self.samples = samples
        self.embed, self.read = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("mix", torch.block_diag(*torch.randn(samples, positions, positions)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix @ self.embed(x.flatten(0, 1)))
        return self.read(y.unflatten(0, (self.samples, -1)).mean(1))


@pytest.mark.parametrize("asked", [extensions.DiagHessian(), extensions.BatchDiagHessian()])
def test_a_product_over_the_axis_of_samples_has_a_jacobian_for_each(asked: Any) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Blocks(3, 2).double())
    x, y = torch.randn(3, 2, 3, dtype=torch.float64), torch.tensor([0, 2, 1])

    def value() -> Tensor:
        with packprop.record():
            return nn.functional.cross_entropy(model(x), y)

    root = value()
    with packprop.backpack(asked):
        root.backward()
    for name, parameter in model.named_parameters():
        found = getattr(parameter, asked.savefield)
        found = found.sum(0) if asked.name == "BatchDiagHessian" else found
        assert_near(found.flatten(), diagonal_of(value, parameter), name)


class OneEach(nn.Module):
    """Nonlinear functions of one number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.shift, self.scale = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * torch.sigmoid(self.layer(x).squeeze(-1) + self.shift))


@pytest.mark.parametrize("samples", [1, 4])
def test_one_number_for_each_sample(samples: int) -> None:
    torch.manual_seed(0)
    model = packprop.extend(OneEach().double())
    x, y = torch.randn(samples, 3, dtype=torch.float64), torch.randn(samples, dtype=torch.float64)

    def value() -> Tensor:
        with packprop.record():
            return nn.functional.mse_loss(model(x), y)

    root = value()
    with packprop.backpack(extensions.DiagHessian()):
        root.backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.diag_h.flatten(), diagonal_of(value, parameter), name)


COUPLINGS: dict[str, Any] = {
    "square of the loss": lambda f, y: nn.functional.cross_entropy(f, y) ** 2,
    "negative": lambda f, y: -nn.functional.cross_entropy(f, y),
    "over samples": lambda f, y: f.logsumexp((0, 1)),
    "with a penalty": lambda f, y: nn.functional.cross_entropy(f, y) + 0.1 * f.sum().square(),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_whatever_is_made_of_the_loss(name: str) -> None:
    """The diagonal is that of the final scalar; if it couples samples, there are none for single samples."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1])

    def value() -> Tensor:
        with packprop.record():
            return COUPLINGS[name](model(x), y)

    root = value()
    with packprop.backpack(extensions.DiagHessian()):
        root.backward()
    for key, parameter in model.named_parameters():
        (slope,) = torch.autograd.grad(value(), parameter, create_graph=True)
        rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in slope.flatten()]
        assert_near(parameter.diag_h.flatten(), torch.stack(rows).diagonal(), key)
    root = value()
    if name == "negative":
        with packprop.backpack(extensions.BatchDiagHessian()):
            root.backward()
        for parameter in model.parameters():
            assert_near(parameter.diag_h_batch.sum(0), parameter.diag_h, name)
    else:
        with (
            pytest.raises(PackpropError, match=r"between samples|mixes the samples"),
            packprop.backpack(extensions.BatchDiagHessian()),
        ):
            root.backward()


@pytest.mark.parametrize("targets", [[1, 0, 2], [0, 1, 2], [1, 0, 0, 0, 0, 0, 2], [2, 1, 2, 1]])
@pytest.mark.parametrize("root", [lambda loss: (loss + 9).sqrt(), torch.exp], ids=["root", "exponential"])
def test_samples_that_the_loss_ignores_hide_no_others(root: Any, targets: list[int]) -> None:
    """Any two samples may be those that a function of the batch's loss couples."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)).double())
    x, y = torch.randn(len(targets), 4).double(), torch.tensor(targets)

    def value() -> Tensor:
        with packprop.record():
            return root(nn.functional.cross_entropy(model(x), y, ignore_index=0, reduction="sum"))

    loss = value()
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.diag_h.flatten(), diagonal_of(value, parameter), name)
