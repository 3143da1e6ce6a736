"""What each library makes of a trained model: products ``[q, n]``, larger where a sample helps a query more."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from benchmarks.attribution.problems import Data
from packprop import Refinement
from packprop.extensions import EKFAC, BatchGrad, SqrtGGNExact

Method = Callable[[nn.Module, nn.Module, Data, Data, float], Tensor]
"""From model, loss, the data it was trained on, queries, and damping."""

METHODS: dict[str, Method] = {}
"""By name, packprop's own first; what is not installed is left out."""

NOTES: dict[str, dict[str, Any]] = {}
"""What the last call of a method has to say beside its products."""


SAMPLED = {"EKFAC", "kronfluence, EKFAC"}
"""Methods that draw labels."""


def method(name: str) -> Callable[[Method], Method]:
    """Put a function into the table."""

    def put(function: Method) -> Method:
        METHODS[name] = function
        return function

    return put


@contextmanager
def stored(model: nn.Module, loss: nn.Module, data: Data, *more: Any) -> Iterator[tuple[Path, packprop.Result]]:
    """A store of the data's gradients, which is gone afterwards, and what else is computed on the way."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        yield store, packprop.compute(model, loss, data, [BatchGrad(), *more], store=store, progress=False)


def searched(
    name: str, store: Path, model: nn.Module, loss: nn.Module, queries: Data, **options: Any
) -> Tensor:
    """Products in the order of the samples."""
    samples = packprop.Store(store).samples
    found = packprop.influence(store, model, loss, queries, k=samples, **options)
    NOTES[name] = (
        {}
        if found.residuals is None
        else {
            "readings": found.data_readings,
            "largest residual": float(found.residuals.max()),
        }
    )
    side = found.largest
    products = torch.zeros(side.products.shape, dtype=torch.float64)
    return products.scatter_(1, side.rows.long(), side.products.double())


@method("inner products")
def _inner_products(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
    with stored(model, loss, data) as (store, _):
        return searched("inner products", store, model, loss, queries)


def _by_ekfac(name: str, refine: dict[str, Any] | None, **options: Any) -> None:
    def found(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
        with stored(model, loss, data, EKFAC(**options)) as (store, result):
            more = {} if refine is None else {"refine": Refinement(data, progress=False, **refine)}
            return searched(name, store, model, loss, queries, curvature=result, damping=damping, **more)

    METHODS[name] = found


_by_ekfac("EKFAC", None)
_by_ekfac("EKFAC, exact", None, fisher="exact")
_by_ekfac("EKFAC, refined", {"tolerance": 1e-2})


def _refined(name: str, factor: float, **options: Any) -> None:
    def found(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
        with stored(model, loss, data) as (store, _):
            refine = Refinement(data, tolerance=1e-2, progress=False, **options)
            return searched(name, store, model, loss, queries, damping=factor * damping, refine=refine)

    METHODS[name] = found


_refined("refined, no preconditioner", 1.0)
_refined("refined by the Hessian, three times the damping", 3.0, matrix="hessian")  # with less it is indefinite


def gradients(model: nn.Module, loss: nn.Module, data: Data) -> Tensor:
    """Gradients of each sample's loss, summed over its terms ``[n, p]``."""
    with stored(model, loss, data) as (store, _):
        arrays = packprop.Store(store)["grad_batch"]
        return torch.cat([arrays[name].torch().flatten(1) for name, _ in model.named_parameters()], 1)


@method("dense GGN")
def _dense(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
    """From columns of square roots, a few samples at a time."""
    size = sum(p.numel() for p in model.parameters())
    matrix, samples = damping * torch.eye(size, dtype=torch.float64), len(data[0])
    for start in range(0, samples, 50):
        some = data[0][start : start + 50], data[1][start : start + 50]
        roots = packprop.compute(model, loss, some, [SqrtGGNExact()], progress=False)["sqrt_ggn_exact"]
        flat = torch.cat([roots[name].flatten(2) for name, _ in model.named_parameters()], 2).flatten(0, 1)
        matrix += (flat.mT @ flat).double() * (len(some[0]) / samples)
    rows = gradients(model, loss, data).double()
    return gradients(model, loss, queries).double() @ torch.linalg.solve(matrix, rows.mT)
