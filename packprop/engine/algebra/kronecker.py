"""Linear algebra with Kronecker factors: products, inverses, trace, log-determinant, the dense matrix.

Every function takes a block as the extensions save it. A list of factors ``[B, A]`` stands for ``B kron A``
over entries ``[o, i]``, ``[B]`` for ``B`` itself; a factor that is a vector stands for the diagonal matrix.
Some weights keep fan-in first (transposed convolutions, tables): transpose their vectors to ``[o, i]`` first.
Functions refuse vectors whose shape shows the other order; a square shape does not show it. ``Eigen``, which
EKFAC saves, knows the order of its parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from packprop.engine.algebra.decompositions import eigh, eigvalsh, inverted, require_finite, singular
from packprop.engine.algebra.order import EntryOrder
from packprop.engine.tensors.autocast import outside_autocast
from packprop.engine.tensors.dry import has_fault, is_dry_run
from packprop.engine.tensors.precision import accumulation_dtype, at_least, result_dtype
from packprop.engine.tensors.traced import is_traced
from packprop.errors import BadInput

Factors = Sequence[Tensor]


class Eigen(NamedTuple):
    """A symmetric matrix, given by its eigenvalues and by eigenvectors that are Kronecker products.

    Args:
        values: Eigenvalues ``[o, i]``, or ``[p]`` for one factor.
        vectors: Orthonormal columns ``[U_B, U_A]``, ``[o, o]`` and ``[i, i]``, or ``[U_B]``, ``[p, p]``; a
            vector of ones for a factor that is diagonal itself.
        order: The order in which the parameter keeps entries ``[o, i]``; ``None`` for this order itself.
        correlations: Correlations ``[i]`` of inputs along ``U_A`` with the constant 1, the input of a bias;
            ``None`` if unknown. Functions of one block ignore them; see NOTE [Weight and bias].
    """

    values: Tensor
    vectors: list[Tensor]
    order: EntryOrder | None = None
    correlations: Tensor | None = None


Block = Factors | Eigen


def eigen(block: Block) -> Eigen:
    """Return the eigendecomposition of ``B kron A``, from the eigendecompositions of the factors.

    Eigenvalues of a matrix that may be rounding are zero, as for ``solve`` without damping.

    Example:
        >>> eigen([torch.eye(2), 3 * torch.eye(1)]).values.tolist()
        [[3.0], [3.0]]
    """
    if isinstance(block, Eigen):
        return block
    return _eigen("eigen", block, functools.partial(_without_rounding, damping=0.0))


def _eigen(asked: str, factors: Factors, settled: Callable[[Tensor], Tensor]) -> Eigen:
    """Return the eigendecomposition; apply ``settled`` to the eigenvalues of each matrix first."""
    _require_factors(asked, factors)
    pairs = [_decomposed(_widened(factor), settled) for factor in factors]
    values = functools.reduce(torch.outer, [values for values, _ in pairs])
    return Eigen(values, [vectors for _, vectors in pairs])


def eigenvectors(factor: Tensor) -> Tensor:
    """Return orthonormal eigenvectors of a symmetric matrix as columns ``[p, p]``, cut from the graph.

    If the matrix is singular, rounding would decide between the bases of its null space. This function takes
    the basis that is also orthogonal under fixed weights of the coordinates. The largest entry of each column
    is positive. If the matrix is not finite, the eigenvectors are NaN, which shows in everything they rotate.
    The eigenvectors of a diagonal matrix, given as a vector, are unit vectors: a vector of ones.
    """
    factor = factor.detach()
    if factor.dim() == 1 or not factor.numel():
        return torch.ones_like(factor)
    if has_fault(~factor.isfinite().all()):
        return torch.full_like(factor, math.nan)
    vectors: Tensor
    values, vectors = eigh(factor)
    size = len(values)
    null = values <= 10 * size * torch.finfo(values.dtype).eps * values[-1:].clamp(min=0)
    if is_traced():
        vectors = _settled(vectors, null)
    elif (count := size if is_dry_run() else int(null.sum())) > 1:  # eigenvalues ascend
        zero = vectors[:, :count]
        weights = torch.linspace(1, 2, size, dtype=zero.dtype, device=zero.device)
        zero.copy_(zero @ eigh((zero.mT * weights) @ zero)[1])
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors *= torch.where(largest < 0, -1.0, 1.0)
    return vectors


def _settled(vectors: Tensor, null: Tensor) -> Tensor:
    """Return eigenvectors with this basis of the null space, without reading its dimension.

    All other eigenvectors get eigenvalues of 3, beyond the weights, and do not change.
    """
    weights = torch.linspace(1, 2, len(null), dtype=vectors.dtype, device=vectors.device)
    within = null[:, None] & null
    matrix = torch.where(within, (vectors.mT * weights) @ vectors, 0.0) + torch.where(null, 0.0, 3.0).diag()
    return torch.where(null, vectors @ eigh(matrix)[1], vectors)


def dense(block: Block) -> Tensor:
    """Return the whole matrix ``[p, p]``; for small blocks.

    Example:
        >>> dense([torch.eye(2), 3 * torch.eye(1)]).tolist()
        [[3.0, 0.0], [0.0, 3.0]]
    """
    if isinstance(block, Eigen):
        unit = torch.eye(block.values.numel(), dtype=block.values.dtype, device=block.values.device)
        shape = block.values.shape if block.order is None else block.order.parameter
        return multiply(block, unit.reshape(-1, *shape)).reshape(unit.shape)
    _require_factors("dense", block)
    whole = [factor.diag() if factor.dim() == 1 else factor.contiguous() for factor in block]
    return whole[0] if len(whole) == 1 else torch.kron(whole[0], whole[1])


def multiply(block: Block, vectors: Tensor) -> Tensor:
    """Multiply the matrix by one or many vectors, without forming it.

    Args:
        block: ``[B, A]``, ``[B]`` or ``Eigen``.
        vectors: ``[*p]`` or ``[v, *p]``.

    Returns:
        Products of the shape and precision of ``vectors``.

    Raises:
        BadInput: If the vectors do not fit the block.
    """
    if isinstance(block, Eigen):
        return _scaled("multiply", block, vectors, block.values)
    flat = _as_matrices("multiply", block, vectors)
    precision = functools.reduce(torch.promote_types, (factor.dtype for factor in block), flat.dtype)
    product = _applied([factor.to(precision) for factor in block], flat.to(precision))
    return product.reshape(vectors.shape).to(result_dtype(vectors, product))


@overload
def inverse(block: Eigen, damping: float) -> Eigen: ...


@overload
def inverse(block: list[Tensor] | tuple[Tensor, ...], damping: float) -> list[Tensor]: ...


def inverse(block: Block, damping: float) -> list[Tensor] | Eigen:
    """Return the damped inverse in the form of the block: exact for ``Eigen``, approximate for two factors.

    Two factors share the damping (Martens and Grosse 2015, 6.3):
    ``(B + sqrt(d) / pi)^-1 kron (A + pi sqrt(d))^-1``, with ``pi^2`` the mean eigenvalue of A over that of B.
    For ``[B]`` it is the exact ``(B + d)^-1``. ``solve`` inverts ``B kron A + d`` exactly.

    Raises:
        BadInput: If damping is no number of at least 0.
        OfParameter: If the block is singular and is not damped.
    """
    _require_damping("inverse", damping)
    if isinstance(block, Eigen):
        return block._replace(values=_reciprocals(_without_squared_rounding(block, damping), damping))
    _require_factors("inverse", block)
    if not damping:
        return [_inverted_undamped(factor) for factor in block]
    if len(block) == 1:
        return [_inverted(_shifted(_widened(block[0]), damping)).to(block[0].dtype)]
    B, A = map(_widened, block)
    tiny = torch.finfo(B.dtype).tiny
    means = [at_least(_diagonal(factor).mean(), tiny) for factor in (B, A)]
    pi = (means[1] / means[0]).sqrt()
    return [
        _inverted(_shifted(B, math.sqrt(damping) / pi)).to(block[0].dtype),
        _inverted(_shifted(A, math.sqrt(damping) * pi)).to(block[1].dtype),
    ]


def solve(block: Block, vectors: Tensor, damping: float) -> Tensor:
    """Multiply ``(block + damping I)^-1`` by one or many vectors ``[*p]`` or ``[v, *p]``, exactly.

    It uses the eigenvectors of the factors: their products are the eigenvectors of the block. Eigenvalues of a
    matrix that are negative by rounding count as zero. Without damping, so do positive ones that may be
    rounding: the inverse of rounding would be the largest part of the result. A diagonal counts as it is.

    Raises:
        BadInput: If damping is no number of at least 0, or the vectors do not fit the block.
        OfParameter: If the block is singular and is not damped.
    """
    _require_damping("solve", damping)
    if isinstance(block, Eigen):
        values = _without_squared_rounding(block, damping)
    else:
        block = _eigen("solve", block, functools.partial(_without_rounding, damping=damping))
        values = block.values
    return _scaled("solve", block, vectors, _reciprocals(values, damping))


def trace(block: Block) -> Tensor:
    """Return the trace: the sum of the eigenvalues, or the product of the traces of the factors."""
    if isinstance(block, Eigen):
        return block.values.sum()
    _require_factors("trace", block)
    return torch.stack([_diagonal(factor).sum() for factor in block]).prod()


def logdet(block: Block, damping: float = 0.0) -> Tensor:
    """Return the logarithm of the determinant of ``block + damping I``; ``-inf`` if that is singular.

    Eigenvalues count as zero as in ``solve``.

    Raises:
        BadInput: If damping is no number of at least 0.
    """
    _require_damping("logdet", damping)
    if isinstance(block, Eigen):
        values = at_least(_without_squared_rounding(block, damping), 0.0)
    else:
        _require_factors("logdet", block)
        values = functools.reduce(torch.outer, [_eigenvalues(factor, damping) for factor in block])
    logarithms: Tensor = (values + damping).log()
    return logarithms.sum()


def _scaled(asked: str, block: Eigen, vectors: Tensor, values: Tensor) -> Tensor:
    """Multiply the coordinates of vectors in the eigenbasis by ``values``."""
    rotated = coordinates(asked, block, vectors)
    return combined(block, rotated * values.reshape(rotated.shape[1:]), vectors)


def coordinates(asked: str, block: Eigen, vectors: Tensor) -> Tensor:
    """Return vectors ``[*p]`` or ``[v, *p]`` in the eigenbasis ``[v, o, i]``; i = 1 for a single factor."""
    flat = _as_matrices(asked, block, vectors).to(block.values.dtype)
    return _applied([_transposed(basis) for basis in block.vectors], flat)


def combined(block: Eigen, rotated: Tensor, like: Tensor) -> Tensor:
    """Return the vectors with coordinates ``rotated``, in the shape and precision of ``like``."""
    product = _applied(block.vectors, rotated)
    product = product if block.order is None else block.order.to_parameter(product)
    return product.reshape(like.shape).to(result_dtype(like, product))


def _widened(factor: Tensor) -> Tensor:
    """Return the factor in a precision in which PyTorch decomposes it."""
    require_finite("A Kronecker factor was to be decomposed.", factor)
    return factor.to(accumulation_dtype(factor.dtype))


def _decomposed(factor: Tensor, settled: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``settled`` eigenvalues, and eigenvectors; of a diagonal its entries, and unit vectors."""
    if factor.dim() == 1:
        return factor, torch.ones_like(factor)
    values, vectors = eigh(factor)
    return settled(values), vectors


def _eigenvalues(factor: Tensor, damping: float) -> Tensor:
    """Return eigenvalues, with zero in place of negative ones, and of rounding; see ``solve``."""
    wide = _widened(factor)
    return at_least(wide if wide.dim() == 1 else _without_rounding(eigvalsh(wide), damping), 0.0)


def _without_rounding(values: Tensor, damping: float) -> Tensor:
    """Return eigenvalues of a matrix ``[p]``, with zero in place of rounding; see ``solve``."""
    if not len(values):
        return values
    digit = math.sqrt(len(values)) * torch.finfo(values.dtype).eps * values.abs().amax()
    return torch.where((values.abs() <= digit) & (values < (0.0 if damping else math.inf)), 0.0, values)


def _without_squared_rounding(block: Eigen, damping: float) -> Tensor:
    """Return eigenvalues that are sums of squares, without damping with zero for squares of rounding."""
    values = block.values
    if damping or not values.numel():
        return values
    digit = sum(map(len, block.vectors)) * torch.finfo(values.dtype).eps ** 2 * values.abs().amax()
    return torch.where(values.abs() <= digit, 0.0, values)


def _reciprocals(values: Tensor, damping: float) -> Tensor:
    """Return ``1 / (values + damping)`` for eigenvalues; refuse a division by zero."""
    damped = values + damping
    if has_fault((damped == 0).any()):
        raise singular(values)
    return damped.reciprocal()


def _diagonal(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 1 else factor.diagonal()


def _inverted(factor: Tensor) -> Tensor:
    return _reciprocals(factor, 0.0) if factor.dim() == 1 else inverted(factor)


@outside_autocast
def _inverted_undamped(factor: Tensor) -> Tensor:
    """Return the inverse of a factor; refuse it if an eigenvalue may be rounding, see ``solve``."""
    values, vectors = _decomposed(_widened(factor), functools.partial(_without_rounding, damping=0.0))
    inverse = _reciprocals(values, 0.0)
    return (inverse if factor.dim() == 1 else vectors * inverse @ vectors.mT).to(factor.dtype)


@outside_autocast
def _applied(factors: Factors, matrices: Tensor) -> Tensor:
    """Return ``B V A^T`` of factors ``[B, A]`` for matrices V ``[v, o, i]``, or ``B V`` if there is no A."""
    left, *rest = factors
    product = left[:, None] * matrices if left.dim() == 1 else left @ matrices
    for right in rest:
        product = product * right if right.dim() == 1 else product @ right.mT
    return product


def _transposed(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 1 else factor.mT


def _shifted(matrix: Tensor, shift: Tensor | float) -> Tensor:
    if matrix.dim() == 1:
        return matrix + shift
    return matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _require_factors(asked: str, factors: Factors) -> None:
    if len(factors) not in (1, 2) or not all(map(_is_factor, factors)):
        raise BadInput(
            f"kronecker.{asked}(factors, ...) was called.",
            "factors",
            "they are not one or two square matrices, or vectors that stand for diagonal ones",
            "give the list that an extension such as KFAC saved on a parameter, or the value of EKFAC; from a "
            'Result, give the block of one parameter, as in result["kfac"]["0.weight"]',
        )


def _is_factor(factor: object) -> bool:
    return isinstance(factor, Tensor) and factor.dim() in (1, 2) and factor.shape[0] == factor.shape[-1]


def _require_damping(asked: str, damping: float) -> None:
    if not 0 <= damping < math.inf:
        raise BadInput(
            f"kronecker.{asked}(..., damping={damping}) was called.",
            "damping",
            "it is negative, infinite or NaN",
            "give a number of at least 0, in units of the curvature",
        )


def _as_matrices(asked: str, block: Block, vectors: Tensor) -> Tensor:
    """Return vectors as matrices ``[v, o, i]``, with i = 1 for a single factor."""
    order = block.order if isinstance(block, Eigen) else None
    factors = block.vectors if isinstance(block, Eigen) else block
    _require_factors(asked, factors)
    rows, columns = len(factors[0]), len(factors[1]) if len(factors) > 1 else 1
    shapes = vectors.shape, vectors.shape[1:]
    fits = rows * columns > 0 and rows * columns in map(torch.Size.numel, shapes)
    if order is not None:
        fits = fits and order.parameter in shapes
    if not fits:
        raise BadInput(
            f"kronecker.{asked}(factors, vectors) was called.",
            f"vectors of shape {list(vectors.shape)}",
            f"the block has {rows * columns} rows",
            "give vectors of the parameter's shape, one or many along a leading axis",
        )
    if order is not None:
        return order.to_matrices(vectors.reshape(-1, *order.parameter))
    _require_outputs_first(asked, factors, vectors)
    return vectors.reshape(-1, rows, columns)


def _require_outputs_first(asked: str, factors: Factors, vectors: Tensor) -> None:
    """Refuse vectors for two factors whose shape shows another order of entries than ``[o, i]``.

    A list of factors does not know its parameter. A square shape looks the same in both orders.
    """
    if len(factors) == 1:
        return
    rows, columns = map(len, factors)
    for shape in (vectors.shape, vectors.shape[1:]):
        if shape.numel() == rows * columns and (len(shape) == 1 or shape[:1] == (rows,)):
            return
    raise BadInput(
        f"kronecker.{asked}(factors, vectors) was called.",
        f"vectors of shape {list(vectors.shape)}",
        f"two factors of {rows} and {columns} rows belong to entries [{rows}, {columns}], outputs first; "
        "embeddings, transposed convolutions and x @ w keep inputs first",
        "ask for EKFAC, whose value knows the order; or give vector.transpose(0, 1), and transpose the product",
    )
