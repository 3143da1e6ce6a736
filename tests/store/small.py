"""A small model, its gradients one sample at a time, and a store to write them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop.extensions import BatchGrad

SIZE = 7


def problem(size: int = SIZE, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return packprop.extend(model), torch.randn(size, 3).double(), torch.randint(2, (size,))


def rows_one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of each sample's own loss, ``[n, *p]``; zeros where it does not depend on a parameter."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for each, target in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(each[None]), target[None])
        gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(values) for name, values in rows.items()}


def written(folder: Path, cuts: list[int], **options: Any) -> tuple[nn.Module, Tensor, Tensor]:
    """A finished store of gradients and losses, written by hand in batches of some sizes."""
    model, x, y = problem(sum(cuts))
    with packprop.StoreWriter(folder, model, [BatchGrad()], **options) as writer:
        for inputs, targets in zip(x.split(cuts), y.split(cuts), strict=True):
            write_batch(writer, model, inputs, targets)
    return model, x, y


def write_batch(writer: packprop.StoreWriter, model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> None:
    output = model(x)
    losses = nn.functional.cross_entropy(output, y, reduction="none").detach()
    with packprop.record():
        loss = nn.functional.cross_entropy(output, y)
    with packprop.backpack(*writer.extensions):
        loss.backward()
    writer.write(terms=len(x), loss=losses, **options)
