"""Kronecker factors: second moments of cotangents and of inputs, and squares in the basis of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from packprop.engine.algebra.kernels import outer_products, second_moment, sum_of_squares
from packprop.engine.algebra.statistics import (
    BY_FACTORS,
    LINEAR,
    OF_ROWS,
    Statistic,
    flat_rows,
    moments,
    sum_sq,
)
from packprop.engine.algebra.structures import Dense, Lookup, Outer, Structure, entry_order_of, rows
from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.precision import accumulation_dtype, widened, wider_dtype
from packprop.errors import OfParameter

Approximation = Literal["mixed", "expand", "reduce"]
"""The way in which positions that share a weight enter its factors; see NOTE [Kronecker factors]."""

Otherwise = Literal["error", "diagonal", "skip"]
"""The replacement for a factor that would be too large."""

LARGEST_FACTOR = 2**14
"""Rows of the largest matrix that packprop builds for one parameter: 1 GiB in single precision."""


def cotangent_gram(
    structure: Structure, approximation: Approximation = "mixed", otherwise: Otherwise = "error"
) -> Tensor:
    """Return the second moment of cotangents, summed over columns and samples.

    It is ``[g*o, g*o]`` for an affine use, ``[o, o]`` for a table. Cotangents are summed over positions first,
    or for ``"expand"`` taken at every position. Other structures give ``[p, p]`` of per-sample gradients: the
    exact block. A matrix that would be too large becomes its diagonal ``[p]``, an empty tensor, or an error, as
    ``otherwise`` says.
    """
    if isinstance(structure, Dense):
        flat = _matrix_of(rows(structure), 2)
    else:
        cotangent = structure.given_cotangent
        if approximation == "expand" or cotangent.shape[2] == 1:
            flat = _matrix_of(cotangent, 3)
        else:
            flat = _matrix_of(cotangent.sum(2, dtype=accumulation_dtype(cotangent.dtype)), 2)
    if flat.shape[1] <= LARGEST_FACTOR:
        return second_moment(flat)
    if otherwise == "diagonal":
        return sum_of_squares(widened(flat))
    return _too_large(flat, flat.shape[1], otherwise)


def _matrix_of(values: Tensor, leading: int) -> Tensor:
    """Join the leading axes to one of rows, and all others to one of columns."""
    return values.reshape(values.shape[:leading].numel(), values.shape[leading:].numel())


def input_gram(
    structure: Structure, approximation: Approximation = "mixed", otherwise: Otherwise = "error"
) -> Tensor | None:
    """Return the second moment of the inputs of an affine use, summed over samples, ``[i, i]``.

    It sums positions (``"mixed"``), averages them (``"expand"``), or averages the inputs over positions first
    (``"reduce"``); it averages groups. It returns ``None`` for parameters that no input multiplies. The moment
    of a large table is its diagonal ``[i]``: unless averages are taken, it has no other entries. For another
    matrix that would be too large, ``otherwise`` is as in ``cotangent_gram``.
    """
    if isinstance(structure, Dense):
        return None
    large = (structure.entries if isinstance(structure, Lookup) else structure.shape[-1]) > LARGEST_FACTOR
    if isinstance(structure, Lookup):
        if large and (approximation != "reduce" or otherwise == "diagonal"):
            return _lookup_input_diagonal(structure, approximation)
        if large:
            return _too_large(structure.index, structure.entries, otherwise, structure.dtype)
        return _lookup_input_gram(structure, approximation)
    if large and otherwise != "diagonal":
        return _too_large(structure.x, structure.shape[-1], otherwise)
    if structure.real is not None and approximation != "mixed":
        raise OfParameter(
            f"Kronecker factors with approximation={approximation!r} were asked for.",
            "parameter {parameter}",
            "samples apply it at different numbers of positions, as they apply an expert of a mixture: there "
            "is no common number to average over",
            'ask for approximation="mixed", which sums over positions',
        )
    positions, groups = structure.shape[1:3]
    if structure.moment is not None and approximation != "reduce" and not large:
        total = structure.moment()
    else:
        x = structure.x.mean(1, keepdim=True) if approximation == "reduce" else structure.given_inputs
        x = x.reshape(-1, x.shape[-1])
        total = sum_of_squares(widened(x)) if large else second_moment(x)
    divisor = groups * positions if approximation == "expand" else groups
    return total if divisor == 1 else total / divisor


def input_sum(structure: Structure, otherwise: Otherwise = "error") -> Tensor | None:
    """Return an affine use's inputs, summed over samples, positions and groups ``[i]``, or ``None``.

    If the matrix that ``mean_product`` makes would be too large, ``otherwise`` is as in ``cotangent_gram``.
    """
    if not isinstance(structure, Outer):
        return None
    if structure.shape[-1] > LARGEST_FACTOR and otherwise != "diagonal":
        return _too_large(structure.x, structure.shape[-1], otherwise)
    return structure.x.sum((0, 1, 2))


def homogeneous_sum(structure: Structure, approximation: Approximation = "mixed") -> Tensor | None:
    """Return an affine use's inputs, each with a 1 at its end, summed as ``input_gram`` does ``[i + 1]``."""
    if not isinstance(structure, Outer):
        return None
    x = structure.x.mean(1, keepdim=True) if approximation == "reduce" else structure.x
    real = x.new_tensor([x.shape[:3].numel()]) if structure.real is None else structure.real.to(x)[None]
    total = torch.cat([x.sum((0, 1, 2)), real])
    positions, groups = structure.shape[1:3]
    return total / (groups * positions if approximation == "expand" else groups)


def correlations(inputs: Tensor, vectors: Tensor, total: Tensor | None) -> Tensor | None:
    """Return the correlations ``[i]`` of inputs, along eigenvectors of their moment, with the constant 1.

    That is ``sum x / sqrt(sum x^2 sum 1)``, and 0 along eigenvectors of zero: a vector of length at most 1.

    Args:
        inputs: The moment of the inputs, ``[i, i]``.
        vectors: Its eigenvectors as columns.
        total: What ``homogeneous_sum`` returns; ``None`` for uses that are not affine.

    Returns:
        ``None`` if there is no sum, or only the diagonal of the moment is known.
    """
    if total is None or vectors.dim() == 1:
        return None
    squares = ((inputs.detach() @ vectors) * vectors).sum(0)
    total = total.detach()
    known = squares > 10 * len(squares) * torch.finfo(squares.dtype).eps * squares.amax()
    return torch.where(known, (total[:-1] @ vectors) * (squares * total[-1]).rsqrt(), 0.0)


def mean_product(total: Tensor, samples: int) -> Tensor:
    """Return the mean over samples times itself, ``[i] -> [i, i]``; the diagonal ``[i]`` of a large matrix."""
    mean = total / samples
    return torch.outer(mean, mean) if len(mean) <= LARGEST_FACTOR else mean.square()


def rotated_sum_sq(structure: Structure, first: Sequence[Any]) -> Tensor:
    """Return squares of per-sample gradients in an orthonormal basis, summed over columns and samples.

    Args:
        structure: Structure of a parameter.
        first: The results of the first pass. The first two are the basis, as matrices of columns:
            ``[g*o, g*o]`` and ``[i, i]``, or ``[p, p]`` and ``None``; a vector stands for unit vectors, and an
            empty one for a factor that was skipped. The rest are ignored.

    Returns:
        ``[g*o, i]``, or ``[p]``; empty if a factor was skipped.
    """
    left, right = first[:2]
    if is_skipped(left) or is_skipped(right):
        return torch.empty_like(left if is_skipped(left) else right)
    if isinstance(structure, Dense):
        return sum_of_squares(_rotated(flat_rows(structure), left).flatten(0, 1))
    cotangent = structure.wide_cotangent
    if isinstance(structure, Lookup):
        rotated = _rotated(cotangent, left)
        if right.dim() == 1:
            return sum_sq(replace(structure, cotangent=rotated)).mT
        inputs = right[structure.index].unsqueeze(2)  # one-hot inputs choose rows
        return sum_sq(Outer(inputs, rotated.unsqueeze(3), _matrix))
    columns, _, positions, groups, fan_out = cotangent.shape
    fan_in = structure.shape[3]
    factors_first = positions * (fan_in**2 + columns * fan_out**2)
    if groups == 1 and (positions == 1 or factors_first <= columns * fan_out * fan_in * (fan_out + fan_in)):
        return sum_sq(Outer(_rotated(structure.x, right), _rotated(cotangent, left), _matrix))
    products = outer_products(*structure.matrices).reshape(-1, groups, columns, fan_out, fan_in)
    products = products.transpose(1, 2).reshape(-1, groups * fan_out, fan_in)
    return sum_of_squares(_rotated(products if left.dim() == 1 else left.mT @ products, right))


def is_skipped(factor: Tensor | None) -> bool:
    """Tell whether a factor is the empty tensor that stands for one that would have been too large."""
    return factor is not None and factor.dim() == 1 and not factor.numel()


def _rotated(tensor: Tensor, basis: Tensor) -> Tensor:
    """Express the last axis in a basis of columns; a vector stands for unit vectors."""
    return tensor if basis.dim() == 1 else tensor @ basis


def _lookup_input_gram(structure: Lookup, approximation: Approximation) -> Tensor:
    """Compute ``input_gram`` of a look-up, an affine map of one-hot inputs: two of them never meet."""
    if approximation != "reduce":
        return torch.diag(_lookup_input_diagonal(structure, approximation))
    index = structure.index
    one_hot = torch.zeros(*index.shape, structure.entries, device=index.device, dtype=structure.dtype)
    mean = one_hot.scatter_(2, index[..., None], 1.0).mean(1)
    return torch.einsum("ni,nj->ij", mean, mean)


def _lookup_input_diagonal(structure: Lookup, approximation: Approximation) -> Tensor:
    """Return the diagonal of ``_lookup_input_gram``, without one-hot inputs."""
    index, positions = structure.index, structure.index.shape[1]
    counts = torch.zeros(structure.entries, dtype=structure.dtype, device=index.device)
    if approximation != "reduce":
        ones = torch.ones(index.numel(), dtype=structure.dtype, device=index.device)
        counts = counts.scatter_add(0, index.flatten(), ones)
        return counts / positions if approximation == "expand" else counts
    # a row that was looked up k times has the mean input k / s: each of the k look-ups adds k / s^2
    often = (index[:, :, None] == index[:, None, :]).sum(2).to(structure.dtype) / positions**2
    return counts.scatter_add(0, index.flatten(), often.flatten())


def _matrix(gradient: Tensor) -> Tensor:
    """``[..., 1, o, i] -> [..., o, i]``."""
    return gradient.squeeze(-3)


def _too_large(like: Tensor, size: int, otherwise: Otherwise, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor in place of a factor that would be too large, or raise an error."""
    if otherwise == "skip":
        return like.new_empty(0, dtype=dtype)
    raise OfParameter(
        "Kronecker factors were asked for.",
        f"the block of parameter {{parameter}}, which would need a factor of {size} rows",
        f"that would take {4 * size**2 / 2**30:.1f} GiB in single precision",
        "give the extension otherwise='diagonal', which keeps the diagonal of such a factor, or "
        "otherwise='skip'; else set requires_grad=False on that parameter, or ask for a diagonal (DiagGGNMC)",
    )


FACTORED = (*BY_FACTORS, cotangent_gram, input_gram, input_sum, homogeneous_sum, rotated_sum_sq, entry_order_of)
"""Statistics that form no per-sample gradients of an affine use without shared positions."""

MATRICES = (cotangent_gram, input_gram)
"""Statistics that are one matrix of all samples, as large for one sample as for many."""


def is_for_real_numbers(statistic: Statistic) -> bool:
    """Tell whether a statistic of this library multiplies gradients with each other, as real numbers."""
    plain = getattr(statistic, "func", statistic)
    return plain in (*OF_ROWS, *FACTORED) and plain not in LINEAR


def forms_no_rows(statistic: Statistic, groups: int, like: Tensor) -> bool:
    """Tell whether a statistic of an affine use without shared positions forms no per-sample gradients.

    Two statistics in ``FACTORED`` depend on more: a basis of all output channels mixes the groups of a
    convolution, and moments need a precision wider than that of sums for a parameter ``like`` this one.
    """
    plain = getattr(statistic, "func", statistic)
    if plain is moments:
        return wider_dtype(accumulation_dtype(like.dtype), device_kind(like)) is not None
    return plain in FACTORED and not (plain is rotated_sum_sq and groups > 1)
