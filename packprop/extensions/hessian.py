"""Diagonals of the Hessian of the loss as reduced, in the parameters.

See NOTE [Hessian diagonal] (``engine/curvature/routes.py``) for the routes to them. If all nodes
between the uses and the loss are (piecewise) linear, they equal those of the GGN, and cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from packprop.engine.algebra.monoid import CAT
from packprop.engine.algebra.statistics import batch_sq, sum_sq
from packprop.extensions.arguments import require_draws
from packprop.types import HESSIAN, Extension, Row, Seed


@dataclass(frozen=True, eq=False)
class DiagHessian(Extension):
    """Diagonal of the Hessian, ``diag_h``: ``[*p]``; exact on any twice differentiable graph.

    It belongs to the whole loss: a term that no sample enters, such as a penalty, is part of it. It adds up in
    at least float32, and keeps this precision.

    Args:
        subsampling: Indices of samples, at the scale of the full batch; this leaves out terms without samples.
    """

    subsampling: Sequence[int] | None = None
    cheaper: ClassVar[str] = "DiagGGNMC or DiagHessianMC"
    savefield = "diag_h"
    rows = (Row(HESSIAN, sum_sq),)


@dataclass(frozen=True, eq=False)
class BatchDiagHessian(Extension):
    """Diagonal of the Hessian of each sample's loss, ``diag_h_batch``: ``[n, *p]``; rows sum to ``diag_h``.

    Terms that no sample enters belong to no row. Rows add up in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples; rows come in their order, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    cheaper: ClassVar[str] = "BatchDiagGGNMC"
    savefield = "diag_h_batch"
    rows = (Row(HESSIAN, batch_sq, over_n=CAT[0]),)


@dataclass(frozen=True, eq=False)
class DiagHessianMC(Extension):
    """Unbiased estimate of the Hessian's diagonal from random signs, ``diag_h_mc``: ``[*p]``.

    It takes one Hessian-vector product for each draw (Bekas et al. 2007), for models too large for the exact
    diagonal. The variance of an entry is the sum of squares of the other entries in its row of the Hessian,
    including those between parameters, divided by the number of draws. Draws add up in at least float32, and
    their mean keeps this precision.

    Args:
        mc_samples: Number of draws.
        generator: Makes the draws repeatable, and leaves the global random state alone.
    """

    mc_samples: int = 1
    generator: torch.Generator | None = None
    savefield = "diag_h_mc"
    of_batch = True

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        require_draws(self.name, self.mc_samples)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The mean over draws."""
        return (Row(Seed("hessian_mc", self.mc_samples, self.generator), sum_sq),)
