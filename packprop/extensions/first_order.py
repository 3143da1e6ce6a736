"""Per-sample gradients and their statistics.

A sample's gradient is a row of ``grad_batch``. The rows sum to ``.grad``, so that under a mean loss each has
the factor ``1/N``. A factor on the loss multiplies the rows, and its square multiplies their squares.

With ``per="token"``, rows are gradients of single tokens: of single terms of the loss, see
``packprop/extensions/by_token.py``. Their attribute has the same name with the suffix ``_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from packprop.engine.algebra.monoid import ADD_IN_PLACE, CAT, MOMENTS, Moments
from packprop.engine.algebra.statistics import (
    gram,
    moments,
    per_sample_grad,
    sq_norm,
    sum_sq,
    token_grads,
    token_moments,
    token_sq_norm,
    token_sum_sq,
)
from packprop.extensions.by_token import BySampleOrToken
from packprop.types import GRADIENT, GRADIENT_BY_TOKEN, Extension, Row


@dataclass(frozen=True, eq=False)
class BatchGrad(BySampleOrToken):
    """Gradient of each sample's loss term, ``grad_batch``: ``[n, *p]``.

    Sums over positions use at least float32; packprop rounds each row to the parameter's precision once.

    Args:
        subsampling: Indices of samples; rows come in their order, at the scale of the full batch.
        per: ``"token"`` for the gradient of each token's term, ``grad_batch_token``: ``[n, t, *p]``; the rows
            of a sample sum to its row of ``grad_batch``.
    """

    rounded: ClassVar[bool] = True
    savefield = "grad_batch"
    of_samples = Row(GRADIENT, per_sample_grad, over_n=CAT[1], over_v=CAT[0])
    of_tokens = Row(GRADIENT_BY_TOKEN, token_grads, over_n=CAT[1], over_v=ADD_IN_PLACE)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        """Drop the axis of the one column, or move samples before tokens."""
        gradients: Tensor = values[0]
        return gradients[0] if self.per == "sample" else gradients.transpose(0, 1)


@dataclass(frozen=True, eq=False)
class BatchL2Grad(BySampleOrToken):
    """Squared L2 norm of each row of ``grad_batch``, ``batch_l2``: ``[n]``.

    Squares are formed and add up in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
        per: ``"token"`` for each row of ``grad_batch_token``, ``batch_l2_token``: ``[n, t]``.
    """

    savefield = "batch_l2"
    of_samples = Row(GRADIENT, sq_norm, over_n=CAT[0], degree=2, condenses=True)
    of_tokens = Row(GRADIENT_BY_TOKEN, token_sq_norm, over_n=CAT[1], over_v=ADD_IN_PLACE, degree=2)


@dataclass(frozen=True, eq=False)
class SumGradSquared(BySampleOrToken):
    """Squares of the entries of ``grad_batch``, summed over samples, ``sum_grad_squared``: ``[*p]``.

    Squares are formed and add up in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
        per: ``"token"`` for the rows of ``grad_batch_token``, summed over samples and tokens,
            ``sum_grad_squared_token``: ``[*p]``.
    """

    savefield = "sum_grad_squared"
    of_samples = Row(GRADIENT, sum_sq, degree=2)
    of_tokens = Row(GRADIENT_BY_TOKEN, token_sum_sq, degree=2)


@dataclass(frozen=True, eq=False)
class Variance(BySampleOrToken):
    """Population variance of the rows of ``grad_batch``, ``variance``: ``[*p]``; never negative.

    No digits are lost to cancellation. Mean and squared deviations come from per-sample gradients, by Welford's
    recurrence (1962) if these come one at a time, or for linear layers in float32 from sums in float64. They
    merge over chunks as in Chan, Golub and LeVeque (1979), in at least float32, and keep this precision. The
    variance of an empty batch is NaN, as a mean over nothing is.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
        per: ``"token"`` for the population variance of the rows of ``grad_batch_token``, ``variance_token``:
            ``[*p]``. The population holds the tokens that count: those whose term is not multiplied by zero, as
            by ``ignore_index``. The variance is zero if no token counts.
    """

    savefield = "variance"
    of_samples = Row(GRADIENT, moments, over_n=MOMENTS, degree=1)
    of_tokens = Row(GRADIENT_BY_TOKEN, token_moments, over_n=MOMENTS, over_v=MOMENTS, degree=1)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        """Divide squared deviations by the number of samples, or of tokens that count."""
        total: Moments = values[0]
        number = total.samples
        return total.deviation / (number.clamp(min=1) if isinstance(number, Tensor) else number)


@dataclass(frozen=True, eq=False)
class BatchDotGrad(Extension):
    """Inner products of the rows of ``grad_batch``, ``batch_dot``: ``[n, n]``.

    Products are formed and add up in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    savefield = "batch_dot"
    rows = (Row(GRADIENT, gram, whole=True, degree=2),)
