"""Products of queries' gradients with the inverse of a whole data set's damped matrix, by conjugate gradients.

Blocks of single parameters leave out the coupling of parameters, and Kronecker factors only approximate the
blocks. Here they are a preconditioner: the result is the product with the inverse of the GGN itself, or of the
Hessian, of all parameters together, up to a residual that ``Influence`` names (Koh and Liang 2017, section 3,
by conjugate gradients; Martens 2010). All current queries share each reading of the data, and the search space
(``engine/algebra/conjugate_gradients.py`` says how). So a hundred queries take fewer readings than one. If
there are only a few queries, packprop adds random vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packprop.applications.dataset.batches import Data
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.given import Objective
from packprop.applications.dataset.products import DataProduct
from packprop.applications.queries.preconditioning import Preconditioner, together
from packprop.engine.algebra import ConjugateGradients, EntryOrder, NotPositive
from packprop.engine.curvature import Matrix, finite, indefinite, require_tolerance, warn_of_residuals
from packprop.engine.tensors import accumulation_dtype, as_matrix

SETS = 8
"""Vectors, each as long as all parameters, that one query keeps alive at once: see ``ConjugateGradients``."""


@dataclass(frozen=True, eq=False)
class Refinement:
    """Options for how ``influence`` refines queries.

    Args:
        data: The data of the curvature, on which you trained the model: in any form of ``compute`` that
            packprop can read more than once.
        matrix: ``"ggn"``, or ``"hessian"``, which must be positive with its damping.
        tolerance: The residual ``|b - A x| / |b|`` at which packprop stops refining a query.
        readings: The maximum number of readings of the data for each group of queries. If they are not enough,
            a warning names the residual, and packprop keeps the best solutions.
        width: The minimum number of vectors in a reading, as far as ``memory`` allows. If there are fewer
            queries, packprop adds random vectors: fewer readings are then enough, and each takes longer.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches.
        checkpoint: A folder, made if it is missing, in which packprop keeps the work after readings and after
            each finished group of queries. A call with the same arguments continues from there.
        progress: Show a bar for each reading on standard error, if that is a terminal.
    """

    data: Data
    matrix: Matrix = "ggn"
    tolerance: float = 1e-3
    readings: int = 20
    width: int = 32
    batch_size: int | None = None
    checkpoint: str | Path | None = None
    progress: bool = True


class Refiner:
    """Turns raw gradients of groups of queries into products with the inverse.

    Args:
        objective: The model and the loss.
        refinement: The options.
        names: The names of the parameters whose gradients count.
        preconditioner: An approximate inverse; ``None`` for none.
        damping: Added to the diagonal of the matrix.
        room: Bytes for current vectors in a batch.

    Attributes:
        matrix: The name of the matrix.
        checkpoint: The folder that keeps the work.
        parameters: The parameters whose gradients count, by name.
        batches: The data.
        residuals: The residuals ``[q]`` of each finished group.

    Raises:
        BadInput: For data that packprop can read only once, or wrong options.
    """

    def __init__(
        self,
        objective: Objective,
        refinement: Refinement,
        names: Sequence[str],
        preconditioner: Preconditioner | None,
        damping: float,
        room: int,
    ) -> None:
        asked = objective.asked
        self.matrix, self.checkpoint = refinement.matrix, refinement.checkpoint
        require_tolerance(asked, refinement.tolerance, "readings", refinement.readings)
        require_tolerance(asked, refinement.tolerance, "width", refinement.width)
        self._asked, self._refinement, self._damping = asked, refinement, damping
        self._preconditioner, self._device = preconditioner, objective.device
        trained = objective.trained
        self.parameters = {name: trained[name] for name in names}
        self.batches = objective.batches(refinement.data, refinement.batch_size)
        options: dict[str, Any] = {"memory": None, "room": room, "progress": refinement.progress}
        own = [*self.parameters.values()]
        self._product = DataProduct(objective, self.batches, refinement.matrix, own, **options)
        self.residuals: list[Tensor] = []

    @property
    def facts(self) -> dict[str, Any]:
        """A description of the work, beside model, loss and data, as a value of JSON."""
        describer, refinement = Describer(), self._refinement
        blocks = None if self._preconditioner is None else vars(self._preconditioner)
        return {
            "matrix": [refinement.matrix, self._damping],
            "tolerance, readings and width": [refinement.tolerance, refinement.readings, refinement.width],
            "curvature": describer.of(blocks, "the curvature"),
            "parameters": [*self.parameters],
        }

    @property
    def readings(self) -> int:
        """The number of complete readings of the data."""
        return self._product.readings

    @property
    def query_bytes(self) -> int:
        """Bytes of a query while it is refined."""
        return SETS * self._dtype.itemsize * sum(p.numel() for p in self.parameters.values())

    @property
    def _dtype(self) -> torch.dtype:
        dtypes = (accumulation_dtype(parameter.dtype) for parameter in self.parameters.values())
        return functools.reduce(torch.promote_types, dtypes, torch.float32)

    def __call__(
        self,
        rows: dict[str, Tensor],
        orders: Mapping[str, EntryOrder | None],
        known: dict[str, Tensor] | None,
        most: int,
        keep: Callable[[ConjugateGradients], None],
    ) -> dict[str, Tensor]:
        """Return products of ``rows`` with the inverse, ``[q, *p]`` by parameter, on the CPU; release ``rows``.

        Args:
            rows: Gradients ``[q, *p]`` by parameter.
            orders: The order of each parameter's entries, as far as it is known.
            known: The state of this group that an earlier call has kept; ``None`` if there is none.
            most: The number of vectors that fit at once.
            keep: Called after each reading.

        Raises:
            PackpropError: If the matrix is indefinite, or not finite.
        """
        right = torch.cat([as_matrix(rows.pop(name)).to(self._device, self._dtype) for name in [*rows]], 1)
        precondition = None if self._preconditioner is None else lambda flat: self._preconditioned(flat, orders)
        refinement = self._refinement
        beside = max(0, min(refinement.width, most) - len(right))
        iterations = ConjugateGradients(right, precondition, refinement.tolerance, beside)
        del right
        if known is not None:
            iterations.restore(known)
        try:
            while not iterations.is_done and iterations.steps < refinement.readings:
                iterations.step(self._damped)
                keep(iterations)
        except NotPositive as error:
            where = f"the {refinement.matrix} of the data, with damping={self._damping:g}"
            raise indefinite(self._asked, where, error) from None
        self.residuals.append(iterations.residuals.cpu())
        warn_of_residuals(
            "influence(..., refine=...)", self.residuals[-1], refinement.tolerance, iterations.steps
        )
        return self._apart(iterations.solutions.cpu())

    def _damped(self, directions: Tensor) -> Tensor:
        products = self._product([*self._apart(directions).values()])
        flat = torch.cat([as_matrix(product) for product in products], 1).to(directions)
        return finite(self._asked, flat.add_(directions, alpha=self._damping))

    def _apart(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views ``[v, *p]`` of flat vectors, by parameter."""
        pieces = flat.split([parameter.numel() for parameter in self.parameters.values()], 1)
        named = zip(self.parameters.items(), pieces, strict=True)
        return {name: piece.reshape(len(piece), *parameter.shape) for (name, parameter), piece in named}

    def _preconditioned(self, flat: Tensor, orders: Mapping[str, EntryOrder | None]) -> Tensor:
        assert self._preconditioner is not None
        found = torch.empty_like(flat)
        given, places = self._apart(flat), self._apart(found)
        for names in together(self._preconditioner, self.parameters):
            products = {name: given[name] for name in names}
            if self._preconditioner.knows(names[0], orders):
                products = self._preconditioner(self._asked, products, orders)
            else:  # no loss, or no query, depends on it: damping alone changes no solution
                products = {name: each / (self._damping or 1.0) for name, each in products.items()}
            for name, product in products.items():
                places[name].copy_(product)
        return found
