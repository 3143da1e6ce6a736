"""Gradients of single samples and their statistics.

A sample's gradient is a row of ``grad_batch``. The rows sum to ``.grad``, so that under a mean loss each has
the factor ``1/N``. A factor on the loss multiplies the rows, and its square multiplies their squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from packprop.algebra.monoid import CAT, MOMENTS, Moments
from packprop.algebra.statistics import gram, moments, per_sample_grad, sq_norm, sum_sq
from packprop.types import GRADIENT, Extension, Row


@dataclass(frozen=True, eq=False)
class BatchGrad(Extension):
    """Gradient of each sample's loss term, ``grad_batch``: ``[n, *p]``.

    Sums over positions are taken in at least float32; rows are rounded to the parameter's precision once.

    Args:
        subsampling: Indices of samples; rows come in their order, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    rounded: ClassVar[bool] = True
    savefield = "grad_batch"
    rows = (Row(GRADIENT, per_sample_grad, over_n=CAT[1], over_v=CAT[0]),)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        """Drop the axis of the one column."""
        gradients: Tensor = values[0]
        return gradients[0]


@dataclass(frozen=True, eq=False)
class BatchL2Grad(Extension):
    """Squared L2 norm of each row of ``grad_batch``, ``batch_l2``: ``[n]``.

    Squares are formed, added up and handed over in at least float32.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "batch_l2"
    rows = (Row(GRADIENT, sq_norm, over_n=CAT[0], degree=2),)


@dataclass(frozen=True, eq=False)
class SumGradSquared(Extension):
    """Squares of the entries of ``grad_batch``, summed over samples, ``sum_grad_squared``: ``[*p]``.

    Squares are formed, added up and handed over in at least float32.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "sum_grad_squared"
    rows = (Row(GRADIENT, sum_sq, degree=2),)


@dataclass(frozen=True, eq=False)
class Variance(Extension):
    """Population variance of the rows of ``grad_batch``, ``variance``: ``[*p]``; never negative.

    Nothing cancels. Mean and squared deviations are computed from per-sample gradients, by Welford's recurrence
    (1962) where these come one at a time, or for linear layers in float32 from sums in float64. They are merged
    over chunks as by Chan, Golub and LeVeque (1979), in at least float32, and handed over so.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "variance"
    rows = (Row(GRADIENT, moments, over_n=MOMENTS, degree=1),)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        """Squared deviations divided by the number of samples."""
        total: Moments = values[0]
        return total.deviation / total.samples


@dataclass(frozen=True, eq=False)
class BatchDotGrad(Extension):
    """Inner products of the rows of ``grad_batch``, ``batch_dot``: ``[n, n]``.

    Products are formed, added up and handed over in at least float32.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "batch_dot"
    rows = (Row(GRADIENT, gram, whole=True, degree=2),)
