"""Eigenvalues and inverses of matrices: in float64 if float32 fails, and an error in four parts if both do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.nesting import map_tensors
from packprop.engine.tensors.precision import wider_dtype
from packprop.errors import OfParameter

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, but not exported for checkers
_EIGENVALUES = "The eigenvalues of a matrix were asked for."
_INVERSE = "The inverse of a matrix was asked for."
_OTHER_UNITS = "scale it, or the loss, to entries near 1; or leave the parameter out by requires_grad=False"
_DAMPING = "give more damping, as in kronecker.inverse(factors, damping=1e-3)"


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order and eigenvectors of symmetric matrices ``[..., p, p]``.

    On an accelerator it computes them in float64. In single precision PyTorch may return vectors there that are
    not orthonormal, without an error (on an H200, for a factor of a small transformer: off by 0.25).

    Raises:
        OfParameter: If float64 fails as well, or a matrix is not finite.
    """
    values, vectors = _tried(_EIGENVALUES, torch.linalg.eigh, matrix)
    return values, vectors


def eigvalsh(matrix: Tensor) -> Tensor:
    """Return eigenvalues of symmetric matrices ``[..., p, p]`` in ascending order.

    Raises:
        OfParameter: As for ``eigh``.
    """
    values: Tensor = _tried(_EIGENVALUES, torch.linalg.eigvalsh, matrix)
    return values


def inverted(matrix: Tensor) -> Tensor:
    """Return the inverse of a matrix ``[p, p]``.

    Raises:
        OfParameter: If it is singular even in float64, or not finite.
    """
    inverse: Tensor = _tried(_INVERSE, torch.linalg.inv, matrix, _DAMPING)
    return inverse


def singular(values: Tensor) -> OfParameter:
    """Return the error for the inverse of a matrix with eigenvalues of zero."""
    count, most = int((values == 0).sum()), float(values.abs().max())
    return OfParameter(
        _INVERSE,
        f"a matrix with {values.numel()} eigenvalues",
        f"{count} of them are zero up to rounding; the largest magnitude is {most:.3g}",
        _DAMPING,
    )


def require_finite(asked: str, matrix: Tensor) -> None:
    """Refuse a matrix, or a diagonal, with an entry that is not finite.

    Raises:
        OfParameter: For such a matrix.
    """
    if has_fault(~matrix.isfinite().all()):
        raise OfParameter(
            asked,
            _said(matrix),
            "some of its entries are not finite",
            "look for inputs, losses and parameters that are NaN or infinite, and compute it without them",
        )


def _tried(asked: str, function: Callable[[Tensor], Any], matrix: Tensor, instead: str = _OTHER_UNITS) -> Any:
    """Apply a function to a matrix, in float64 if it fails in float32; see also ``eigh``."""
    wide = wider_dtype(matrix.dtype, device_kind(matrix))
    at_first = matrix.dtype
    if function is torch.linalg.eigh and device_kind(matrix) != "cpu":
        at_first = wide or matrix.dtype
    for dtype in dict.fromkeys((at_first, wide or at_first)):
        try:
            return map_tensors(lambda found: found.to(matrix.dtype), function(matrix.to(dtype)))
        except LinAlgError as error:
            require_finite(asked, matrix)
            failed = error
    raise OfParameter(asked, _said(matrix), f"PyTorch cannot compute it: {failed}", instead) from failed


def _said(matrix: Tensor) -> str:
    return f"a matrix {list(matrix.shape)} of {matrix.dtype}"
