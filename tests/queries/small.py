"""A small model with convolutions, its gradients one sample at a time, and stores of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop import extensions, kronecker
from tests.store.small import rows_one_by_one

SIZE, LOSS = 9, nn.CrossEntropyLoss()
QUERIES = slice(2, 5)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
    return nn.Sequential(*layers).double(), torch.randn(SIZE, 1, 4, 4).double(), torch.randint(3, (SIZE,))


def written(folder: Path, *more: Any, stored: Any = None, **options: Any) -> tuple[Any, packprop.Result]:
    """A problem, its gradients in two shards of a store, and what else was asked for over all samples."""
    model, x, y = problem()
    stored = stored or extensions.BatchGrad()
    for shard, (start, stop) in enumerate([(0, 4), (4, SIZE)]):
        writer = packprop.StoreWriter(folder, model, [stored], shard=shard, shards=2, **options)
        with writer:
            data = x[start:stop], y[start:stop]
            packprop.compute(model, LOSS, data, [stored], store=writer, batch_size=2, progress=False)
    if not more:
        return (model, x, y), packprop.Result({}, 0, 0.0)
    return (model, x, y), packprop.compute(model, LOSS, (x, y), more, progress=False)


def influence(folder: Path, problem: Any, **options: Any) -> packprop.Influence:
    model, x, y = problem
    return packprop.influence(folder, model, LOSS, (x[QUERIES], y[QUERIES]), **options)


def apart(blocks: Any) -> dict[str, Any]:
    """The blocks of a result without what joins those of weights and biases."""
    return {
        name: block._replace(correlations=None) if isinstance(block, kronecker.Eigen) else block
        for name, block in blocks.items()
    }


def gradients(problem: Any) -> dict[str, Tensor]:
    """Gradients of each sample's own loss, flat, by parameter."""
    return {name: rows.flatten(1) for name, rows in rows_one_by_one(*problem).items()}


def by_row(found: packprop.Influence) -> Tensor:
    """All products in the order of rows, which are all there; both ends agree."""
    largest, smallest = found.largest, found.smallest
    assert torch.equal(largest.products, smallest.products.flip(1))
    assert (largest.products.diff(dim=1) <= 0).all()
    return torch.empty_like(largest.products).scatter(1, largest.rows, largest.products)


def ggn_blocks(problem: Any) -> dict[str, Tensor]:
    """The block of each parameter in the GGN of the mean loss, from Jacobians of one sample after the other."""
    model, x, _ = problem
    blocks: dict[str, Tensor] = {}
    for sample in x:
        output = model(sample[None])[0]
        chances = output.detach().softmax(0)
        hessian = chances.diag() - torch.outer(chances, chances)
        for name, parameter in model.named_parameters():
            jacobian = torch.stack([torch.autograd.grad(o, parameter, retain_graph=True)[0] for o in output])
            part = jacobian.flatten(1).mT @ hessian @ jacobian.flatten(1) / len(x)
            blocks[name] = blocks.get(name, 0) + part
    return blocks
