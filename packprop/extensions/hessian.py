"""Diagonals of the Hessian of the loss as reduced, in the parameters.

See NOTE [Hessian diagonal] (``packprop/hessian.py``) for the ways that they are taken. On graphs that are
linear by parts above the last layer they equal the GGN's, and cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from packprop.monoid import CAT
from packprop.statistics import batch_sq, sum_sq
from packprop.types import HESSIAN, Extension, Row


@dataclass(frozen=True, eq=False)
class DiagHessian(Extension):
    """Diagonal of the Hessian, ``diag_h``: ``[*p]``; exact on any twice differentiable graph."""

    savefield = "diag_h"
    rows = (Row(HESSIAN, sum_sq),)


@dataclass(frozen=True, eq=False)
class BatchDiagHessian(Extension):
    """Diagonal of the Hessian of each sample's loss, ``diag_h_batch``: ``[n, *p]``; rows sum to ``diag_h``."""

    savefield = "diag_h_batch"
    rows = (Row(HESSIAN, batch_sq, over_n=CAT[0]),)
