"""Diagonals of the Hessian of the loss as reduced, in the parameters.

See NOTE [Hessian diagonal] (``curvature/routes.py``) for the ways that they are taken. On graphs that are
linear by parts above the last layer they equal the GGN's, and cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packprop.algebra.monoid import CAT
from packprop.algebra.statistics import batch_sq, sum_sq
from packprop.extensions.sampled import require_draws
from packprop.types import HESSIAN, Extension, Row, Seed


@dataclass(frozen=True, eq=False)
class DiagHessian(Extension):
    """Diagonal of the Hessian, ``diag_h``: ``[*p]``; exact on any twice differentiable graph.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "diag_h"
    rows = (Row(HESSIAN, sum_sq),)


@dataclass(frozen=True, eq=False)
class BatchDiagHessian(Extension):
    """Diagonal of the Hessian of each sample's loss, ``diag_h_batch``: ``[n, *p]``; rows sum to ``diag_h``.

    Args:
        subsampling: Indices of samples; rows come in their order, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "diag_h_batch"
    rows = (Row(HESSIAN, batch_sq, over_n=CAT[0]),)


@dataclass(frozen=True, eq=False)
class DiagHessianMC(Extension):
    """Unbiased estimate of the Hessian's diagonal from random signs, ``diag_h_mc``: ``[*p]``.

    One Hessian-vector product for each draw (Bekas et al. 2007), for sizes where the exact diagonal is out of
    reach. Its variance is the sum of squares of a row's other entries, those between parameters included, over
    the draws.

    Args:
        mc_samples: Draws.
        generator: Makes the draws repeatable; the global random state is left alone then.
    """

    mc_samples: int = 1
    generator: torch.Generator | None = None
    savefield = "diag_h_mc"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        require_draws(self.name, self.mc_samples)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Means over draws."""
        return (Row(Seed("hessian_mc", self.mc_samples, self.generator), sum_sq),)
