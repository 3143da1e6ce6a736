"""What is done with Kronecker factors: products, inverses, trace, log-determinant, the dense matrix.

Factors are lists as the extensions save them: ``[B, A]`` stands for ``B kron A`` over entries ``[o, i]``,
``[B]`` for ``B`` itself. Weights that keep fan-in first (transposed convolutions) must be brought to ``[o, i]``
before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from packprop.errors import BadInput

Factors = Sequence[Tensor]


def dense(factors: Factors) -> Tensor:
    """The whole matrix ``[p, p]``; for small blocks.

    Example:
        >>> dense([torch.eye(2), 3 * torch.eye(1)]).tolist()
        [[3.0, 0.0], [0.0, 3.0]]
    """
    _require_factors("dense", factors)
    return factors[0] if len(factors) == 1 else torch.kron(factors[0], factors[1])


def multiply(factors: Factors, vectors: Tensor) -> Tensor:
    """The matrix times one or many vectors, without forming it.

    Args:
        factors: ``[B, A]`` or ``[B]``.
        vectors: ``[*p]`` or ``[v, *p]``.

    Returns:
        Products of the shape of ``vectors``.

    Raises:
        BadInput: If the vectors do not fit the factors.
    """
    flat = _as_matrices("multiply", factors, vectors)
    product = factors[0] @ flat
    if len(factors) > 1:
        product = product @ factors[1].mT
    return product.reshape(vectors.shape)


def inverse(factors: Factors, damping: float) -> list[Tensor]:
    """Factors of an approximate inverse: damping is split between the factors (Martens and Grosse 2015, 6.3).

    ``(B + sqrt(d) / pi)^-1 kron (A + pi sqrt(d))^-1``, with ``pi^2`` the mean eigenvalue of A over that of B.
    For ``[B]`` it is the exact ``(B + d)^-1``. ``solve`` inverts ``B kron A + d`` exactly.

    Raises:
        BadInput: If damping is negative.
    """
    _require_factors("inverse", factors)
    _require_damping("inverse", damping)
    if len(factors) == 1:
        return [torch.linalg.inv(_shifted(factors[0], damping))]
    B, A = factors
    tiny = torch.finfo(B.dtype).tiny
    means = [(factor.diagonal().mean()).clamp(min=tiny) for factor in (B, A)]
    pi = (means[1] / means[0]).sqrt()
    return [
        torch.linalg.inv(_shifted(B, math.sqrt(damping) / pi)),
        torch.linalg.inv(_shifted(A, math.sqrt(damping) * pi)),
    ]


def solve(factors: Factors, vectors: Tensor, damping: float) -> Tensor:
    """``(B kron A + damping I)^-1`` times one or many vectors ``[*p]`` or ``[v, *p]``, exactly.

    By the eigenvectors of the factors, which are those of their product.

    Raises:
        BadInput: If damping is negative, or the vectors do not fit the factors.
    """
    _require_damping("solve", damping)
    flat = _as_matrices("solve", factors, vectors)
    solution: Tensor
    values, vectors_b = torch.linalg.eigh(factors[0])
    if len(factors) == 1:
        rotated = vectors_b.mT @ flat
        solution = vectors_b @ (rotated / (values[:, None] + damping))
        return solution.reshape(vectors.shape)
    values_a, vectors_a = torch.linalg.eigh(factors[1])
    rotated = vectors_b.mT @ flat @ vectors_a
    scaled = rotated / (values[:, None] * values_a + damping)
    solution = vectors_b @ scaled @ vectors_a.mT
    return solution.reshape(vectors.shape)


def trace(factors: Factors) -> Tensor:
    """The trace: the product of those of the factors."""
    _require_factors("trace", factors)
    return torch.stack([factor.trace() for factor in factors]).prod()


def logdet(factors: Factors, damping: float = 0.0) -> Tensor:
    """Logarithm of the determinant of ``B kron A + damping I``; ``-inf`` where that is singular.

    Eigenvalues that rounding made negative count as zero.
    """
    _require_factors("logdet", factors)
    _require_damping("logdet", damping)
    values = torch.linalg.eigvalsh(factors[0]).clamp(min=0)
    if len(factors) > 1:
        values = torch.outer(values, torch.linalg.eigvalsh(factors[1]).clamp(min=0)).flatten()
    logarithms: Tensor = (values + damping).log()
    return logarithms.sum()


def _shifted(matrix: Tensor, shift: Tensor | float) -> Tensor:
    return matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _require_factors(asked: str, factors: Factors) -> None:
    if len(factors) not in (1, 2) or any(f.dim() != 2 or f.shape[0] != f.shape[1] for f in factors):
        raise BadInput(
            f"kronecker.{asked}(factors, ...) was called.",
            "factors",
            "they are not one or two square matrices",
            "give the list that KFAC, KFLR or KFRA saved on a parameter",
        )


def _require_damping(asked: str, damping: float) -> None:
    if not damping >= 0:
        raise BadInput(
            f"kronecker.{asked}(..., damping={damping}) was called.",
            "damping",
            "it is negative",
            "give a number of at least 0, in units of the curvature",
        )


def _as_matrices(asked: str, factors: Factors, vectors: Tensor) -> Tensor:
    """``[v, o, i]``, with i = 1 for a single factor."""
    _require_factors(asked, factors)
    rows, columns = len(factors[0]), len(factors[1]) if len(factors) > 1 else 1
    if vectors.numel() % (rows * columns) or not vectors.numel():
        raise BadInput(
            f"kronecker.{asked}(factors, vectors) was called.",
            f"vectors of shape {list(vectors.shape)}",
            f"the block has {rows * columns} rows",
            "give vectors of the parameter's shape, one or many along a leading axis",
        )
    return vectors.reshape(-1, rows, columns)
