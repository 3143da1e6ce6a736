"""Statistics that form per-sample gradients: they decide how much memory a chunk of samples takes."""

from __future__ import annotations

from torch import Tensor

from packprop.engine.algebra.choices import Extents, norms_by_products
from packprop.engine.algebra.factors import (
    cotangent_gram,
    homogeneous_sum,
    input_gram,
    input_sum,
    rotated_sum_sq,
)
from packprop.engine.algebra.statistics import (
    Statistic,
    along,
    along_each,
    batch_sq,
    gram,
    moments,
    per_sample_grad,
    sq_norm,
    sum_sq,
    summed_grad,
    token_along,
    token_batch_sq,
    token_grads,
    token_moments,
    token_sq_norm,
    token_sum_sq,
    total_grad,
)
from packprop.engine.algebra.structures import entry_order_of
from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.precision import accumulation_dtype, wider_dtype

OF_TOKENS = (token_grads, token_sum_sq, token_batch_sq, token_sq_norm, token_moments, token_along)
"""Statistics that are functions of the gradients of single tokens."""

OF_ROWS = frozenset(
    {
        per_sample_grad,
        summed_grad,
        total_grad,
        along,
        along_each,
        sum_sq,
        batch_sq,
        sq_norm,
        gram,
        moments,
        *OF_TOKENS,
    }
)
"""Statistics that are functions of per-sample gradients, whatever structure these come from."""

FACTORED = (
    total_grad,
    along,
    along_each,
    sum_sq,
    batch_sq,
    sq_norm,
    moments,
    cotangent_gram,
    input_gram,
    input_sum,
    homogeneous_sum,
    rotated_sum_sq,
    entry_order_of,
)
"""Statistics that form no per-sample gradients of an affine use without shared positions."""

MATRICES = (cotangent_gram, input_gram)
"""Statistics that are one matrix of all samples, as large for one of them as for many."""

LINEAR = (per_sample_grad, token_grads, summed_grad, total_grad, entry_order_of)
"""Statistics that multiply no two gradients, so they also exist for complex parameters."""


def forms_rows(statistic: Statistic, extents: Extents) -> bool:
    """Tell whether a statistic of an affine use with shared positions forms per-sample gradients."""
    if extents.positions == 1:
        return False
    if statistic is sq_norm:
        return not norms_by_products(extents)
    return statistic in (per_sample_grad, sum_sq, batch_sq, moments, gram)


def is_for_real_numbers(statistic: Statistic) -> bool:
    """Tell whether a statistic of this library multiplies gradients with each other, as real numbers."""
    plain = getattr(statistic, "func", statistic)
    return plain in (*OF_ROWS, *FACTORED) and plain not in LINEAR


def forms_no_rows(statistic: Statistic, groups: int, like: Tensor) -> bool:
    """Tell whether a statistic of an affine use without shared positions forms no per-sample gradients.

    Two of those in ``FACTORED`` depend on more: a basis of all output channels mixes the groups of a
    convolution, and moments need a precision wider than that of sums for a parameter ``like`` this one.
    """
    plain = getattr(statistic, "func", statistic)
    if plain is moments:
        return wider_dtype(accumulation_dtype(like.dtype), device_kind(like)) is not None
    return plain in FACTORED and not (plain is rotated_sum_sq and groups > 1)
