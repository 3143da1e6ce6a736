"""The definition of per-sample quantities: one entry of the unreduced loss after the other.

The whole batch goes through the model once, and the gradient of each entry of the unreduced loss is taken by
itself. Unlike one-sample forward passes this also covers dropout and other noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.running import assert_near


class GatedMean(nn.Module):
    """A mean over the batch behind a trainable gate that is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, 3]`` to ``[n, 2]``."""
        h = torch.tanh(self.first(x))
        out: Tensor = self.head(h + self.gate * h.mean(0))
        return out


def rows_of(
    model: nn.Module, forward: Callable[[], Tensor], target: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Per-sample gradients of a mean squared error, from one forward pass over the whole batch."""
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    with packprop.disable():
        terms = (forward() - target).square().flatten(1).sum(1) / target.numel()
    rows = [
        torch.autograd.grad(
            term,
            list(parameters.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for term in terms
    ]
    return {k: torch.stack(r) for k, r in zip(parameters, zip(*rows, strict=True), strict=True)}


def check(model: nn.Module, *inputs: Any, seed: int = 0, forward: Callable[[], Tensor] | None = None) -> None:
    """BatchGrad and the GGN diagonal of a mean squared error, against the definition."""
    packprop.extend(model)
    run = forward or (lambda: model(*inputs))
    with torch.no_grad():
        torch.manual_seed(seed)
        target = torch.randn_like(run())
    torch.manual_seed(seed)
    loss = packprop.extend(nn.MSELoss())(run(), target)
    with packprop.backpack(extensions.BatchGrad(), extensions.BatchDiagGGNExact()):
        loss.backward()
    diagonals = diagonals_of(model, run, seed)
    for name, expected in rows_of(model, run, target, seed).items():
        parameter = model.get_parameter(name)
        assert_near(parameter.grad_batch, expected, f"grad_batch of {name}", 1e-9, floor=1e-6)
        found = parameter.diag_ggn_exact_batch
        assert_near(found, diagonals[name], f"diag_ggn_exact_batch of {name}", 1e-9, floor=1e-6)


def diagonals_of(model: nn.Module, forward: Callable[[], Tensor], seed: int = 0) -> dict[str, Tensor]:
    """GGN diagonals by sample of a mean squared error: squares of the Jacobian's rows."""
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    with packprop.disable():
        output = forward()
    sums = {k: torch.zeros(len(output), *p.shape).to(p) for k, p in parameters.items()}
    for n, row in enumerate(output.flatten(1)):
        for entry in row:
            gradients = torch.autograd.grad(
                entry,
                list(parameters.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, gradient in zip(parameters, gradients, strict=True):
                sums[name][n] += 2 / output.numel() * gradient.square()
    return sums


def double(model: nn.Module) -> nn.Module:
    return model.double()
