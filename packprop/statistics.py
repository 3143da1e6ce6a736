"""What is made of a structure: one default each through per-sample gradients, and faster cells.

Every statistic takes one structure, of some samples and some columns, and returns its partial result.
Only ``per_sample_grad`` is required; the rest are derived from it. A fast cell is a function registered
for one structure; the law "fast cell equals default" is tested for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from packprop.algorithms import chosen
from packprop.errors import PackpropError
from packprop.kernels import (
    Extents,
    convolved_by_groups,
    outer_products,
    products_in_turn,
    second_moment,
    square_norms,
    squared_products,
    sum_of_squares,
    worth_a_call,
)
from packprop.memory import device_kind, is_dry
from packprop.monoid import Moments
from packprop.structures import Dense, Diagonal, Lookup, Outer, Product, Quadratic, Structure, order_of, rows
from packprop.types import accumulation_dtype

Approximation = Literal["mixed", "expand", "reduce"]
Statistic = Callable[..., Any]
Cell = Callable[..., Any]

LARGEST_FACTOR = 2**14
"""Rows of the largest matrix that is built for one parameter: 1 GiB in single precision."""

IN_CACHE = 2**16
"""Entries of a temporary matrix that is best made and used up before it leaves the cache."""

FAST_CELLS: dict[str, dict[type, Cell]] = {}


def fast_cell(statistic: str, structure: type) -> Callable[[Cell], Cell]:
    """Register a faster way for one structure; it returns ``None`` where it does not apply."""

    def register(cell: Cell) -> Cell:
        FAST_CELLS.setdefault(statistic, {})[structure] = cell
        return cell

    return register


def _fast(statistic: str, structure: Structure) -> Any:
    cell = FAST_CELLS.get(statistic, {}).get(type(structure))
    return None if cell is None else cell(structure)


def flat_rows(structure: Structure) -> Tensor:
    """Per-sample gradients with all entries of the parameter on one axis, ``[v, n, p]``."""
    gradients = rows(structure)
    return gradients.reshape(*gradients.shape[:2], -1)


def per_sample_grad(structure: Structure) -> Tensor:
    """Gradients of single samples, ``[v, n, *p]``."""
    return rows(structure)


def summed_grad(structure: Structure) -> Tensor:
    """The gradient of one column, summed over samples, ``[*p]``."""
    return structure.total if isinstance(structure, Outer) else rows(structure)[0].sum(0)


def sum_sq(structure: Quadratic) -> Tensor:
    """Squares (or products) of per-sample gradients, summed over columns and samples, ``[*p]``."""
    if isinstance(structure, Diagonal):
        return _row_sum(structure.source)
    if isinstance(structure, Product):
        return _product_sum(structure)
    fast = _fast("sum_sq", structure)
    return sum_of_squares(rows(structure).flatten(0, 1)) if fast is None else fast


def batch_sq(structure: Quadratic) -> Tensor:
    """Squares (or products) of per-sample gradients, summed over columns, ``[n, *p]``."""
    if isinstance(structure, Diagonal):
        return rows(structure.source)[0]
    if isinstance(structure, Product):
        return _product_batch_sum(structure)
    fast = _fast("batch_sq", structure)
    return rows(structure).square().sum(0) if fast is None else fast


def sq_norm(structure: Structure) -> Tensor:
    """Squared norms of per-sample gradients, summed over columns, ``[n]``."""
    fast = _fast("sq_norm", structure)
    return square_norms(flat_rows(structure)).sum(0) if fast is None else fast


def gram(structure: Structure) -> Tensor:
    """Inner products of per-sample gradients, summed over columns, ``[n, n]``."""
    fast: Tensor | None = _fast("gram", structure)
    if fast is not None:
        return fast
    flat = flat_rows(structure)
    return torch.einsum("vnp,vmp->nm", flat, flat)


def moments(structure: Structure) -> Moments:
    """Count, mean and summed squared deviation of per-sample gradients of one column, ``[*p]`` each."""
    fast: Moments | None = _fast("moments", structure)
    if fast is not None:
        return fast
    gradients = rows(structure)[0]
    mean = summed_grad(structure) / gradients.shape[0]
    return Moments(gradients.shape[0], mean, sum_of_squares(gradients, mean))


def signal_gram(structure: Structure, approximation: Approximation = "mixed") -> Tensor:
    """Second moment of what multiplies the inputs, summed over columns and samples.

    ``[g*o, g*o]`` for an affine use (of signals summed over positions, or of every position for
    ``"expand"``), ``[o, o]`` for a table, ``[p, p]`` (the exact block) for anything else.
    """
    if isinstance(structure, Dense):
        flat = flat_rows(structure)
    else:
        assert structure.signal is not None
        signal = structure.signal
        if approximation == "expand":
            flat = signal.flatten(3).flatten(1, 2)
        else:
            flat = (signal[:, :, 0] if signal.shape[2] == 1 else signal.sum(2)).flatten(2)
    _require_room(flat.shape[-1])
    return second_moment(flat.reshape(-1, flat.shape[-1]))


def _require_room(size: int) -> None:
    """Raise before a matrix is built that would not fit."""
    if size > LARGEST_FACTOR:
        raise PackpropError(
            "A Kronecker factor was asked for.",
            f"a parameter whose factor has {size} rows and as many columns",
            f"it would take {4 * size**2 / 2**30:.1f} GiB in single precision",
            "set requires_grad=False on that parameter, or ask for a diagonal (DiagGGNMC) instead",
        )


def input_gram(structure: Structure, approximation: Approximation = "mixed") -> Tensor | None:
    """Second moment of the inputs of an affine use, summed over samples, ``[i, i]``.

    Positions are summed (``"mixed"``), averaged (``"expand"``) or the inputs averaged over positions
    first (``"reduce"``); groups are averaged. ``None`` for parameters that no input multiplies.
    """
    if isinstance(structure, Dense):
        return None
    _require_room(structure.entries if isinstance(structure, Lookup) else structure.shape[-1])
    if isinstance(structure, Lookup):
        return _lookup_input_gram(structure, approximation)
    if structure.moment is not None and approximation == "mixed":
        return structure.moment()
    x = structure.x
    positions, groups = x.shape[1:3]
    if approximation == "reduce":
        x = x.mean(1, keepdim=True)
    total = second_moment(x.reshape(-1, x.shape[-1]))
    divisor = groups * positions if approximation == "expand" else groups
    return total if divisor == 1 else total / divisor


def input_sum(structure: Structure) -> Tensor | None:
    """Inputs of an affine use, summed over samples, positions and groups ``[i]``; ``None`` for others."""
    return structure.x.sum((0, 1, 2)) if isinstance(structure, Outer) else None


def rotated_sum_sq(structure: Structure, first: Sequence[Any]) -> Tensor:
    """Squares of per-sample gradients in an orthonormal basis, summed over columns and samples.

    Args:
        structure: Of a parameter.
        first: Matrices whose columns the basis is made of: ``[g*o, g*o]`` and ``[i, i]``, or ``[p, p]`` and
            ``None``; more is not looked at.

    Returns:
        ``[g*o, i]``, or ``[p]``.
    """
    left, right = first[:2]
    if isinstance(structure, Dense):
        return sum_of_squares((flat_rows(structure) @ left).flatten(0, 1))
    signal = structure.signal
    assert signal is not None
    if isinstance(structure, Lookup):
        inputs = right[structure.index].unsqueeze(2)  # one-hot inputs choose rows
        return sum_sq(Outer(inputs, (signal @ left).unsqueeze(3), _matrix))
    columns, _, positions, groups, fan_out = signal.shape
    fan_in = structure.shape[3]
    factors_first = positions * (fan_in**2 + columns * fan_out**2)
    if groups == 1 and (positions == 1 or factors_first <= columns * fan_out * fan_in * (fan_out + fan_in)):
        return sum_sq(Outer(structure.x @ right, signal @ left, _matrix))
    products = outer_products(*structure.matrices).reshape(-1, groups, columns, fan_out, fan_in)
    products = products.transpose(1, 2).reshape(-1, groups * fan_out, fan_in)
    return sum_of_squares(left.mT @ products @ right)


def _matrix(gradient: Tensor) -> Tensor:
    """``[..., 1, o, i] -> [..., o, i]``."""
    return gradient.squeeze(-3)


def _lookup_input_gram(structure: Lookup, approximation: Approximation) -> Tensor:
    """A look-up is affine in one-hot inputs."""
    index = structure.index
    one_hot = torch.zeros(*index.shape, structure.entries, device=index.device, dtype=structure.dtype)
    one_hot.scatter_(2, index[..., None], 1.0)
    if approximation == "reduce":
        one_hot = one_hot.mean(1, keepdim=True)
    total = torch.einsum("nsi,nsj->ij", one_hot, one_hot)
    return total / index.shape[1] if approximation == "expand" else total


def norms_by_products(extents: Extents) -> bool:
    """Whether norms of per-sample gradients of an affine use are best had without forming these.

    Products over pairs of positions take ``s^2 (i + o)`` multiplications, gradients ``s i o``. The latter
    also add up to the summed gradient, which need not be computed again, so they win from half of that on.
    """
    positions, groups, fan_in, fan_out = extents[:4]
    if positions == 1:
        return True
    few = 2 * positions * (fan_in + fan_out) <= fan_in * fan_out
    inputs = 0 if convolved_by_groups(extents) else extents.unfolded
    size = extents.dtype.itemsize
    holds = {
        "gradients": size * (groups * fan_in * fan_out + inputs),
        "products": size * (2 * groups * positions**2 + extents.unfolded),
    }
    return chosen("norms", "products" if few else "gradients", holds, extents.held) == "products"


def forms_rows(statistic: Statistic, extents: Extents) -> bool:
    """Whether a statistic of an affine use shared over positions goes through per-sample gradients."""
    if extents.positions == 1:
        return False
    if statistic is sq_norm:
        return not norms_by_products(extents)
    return statistic in (per_sample_grad, sum_sq, batch_sq, moments, gram)


def _row_sum(structure: Structure) -> Tensor:
    """Rows summed over columns and samples, which an affine use need not form ``[*p]``."""
    if isinstance(structure, Outer) and structure.signal is not None:
        return structure.fold(torch.einsum("vnsgo,nsgi->goi", structure.signal, structure.x))
    return rows(structure).sum((0, 1))


def _product_sum(structure: Product) -> Tensor:
    signals = _signal_products(structure)
    if signals is None:
        return _row_product_sum(structure)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(_summed_products(signals, outer.x.squeeze(1).square()))


def _row_product_sum(structure: Product) -> Tensor:
    left, weights = rows(structure.left), structure.weights
    if weights is None or structure.right is not None:
        return structure.products.sum((0, 1))
    squares = left.square().reshape(weights.numel(), -1)  # one matrix product adds them up
    return (weights.reshape(1, -1) @ squares).reshape(left.shape[2:])


def _product_batch_sum(structure: Product) -> Tensor:
    signals = _signal_products(structure)
    if signals is None:
        return structure.products.sum(0)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(signals[..., None] * outer.x[:, 0, :, None, :].square())


def _signal_products(structure: Product) -> Tensor | None:
    """Products of the signals of an affine use without shared positions, summed over columns ``[n, g, o]``."""
    left, right = structure.left, structure.left if structure.right is None else structure.right
    if not isinstance(left, Outer) or not isinstance(right, Outer):
        return None
    assert left.signal is not None
    assert right.signal is not None
    if left.signal.shape[2] != 1:
        return None
    signals = left.signal[:, :, 0] * right.signal[:, :, 0]
    return (
        signals.sum(0)
        if structure.weights is None
        else torch.einsum("vngo,vn->ngo", signals, structure.weights)
    )


FACTORED = (sum_sq, batch_sq, sq_norm, moments, signal_gram, input_gram, input_sum, rotated_sum_sq, order_of)
"""Statistics that form no per-sample gradients of an affine use without shared positions."""


def forms_no_rows(statistic: Statistic, groups: int, like: Tensor) -> bool:
    """Whether that is so of a statistic of a parameter.

    A basis of all output channels mixes the groups of a convolution, and moments need a wider precision.
    """
    plain = getattr(statistic, "func", statistic)
    if plain is moments:
        return _wider(accumulation_dtype(like.dtype), device_kind(like)) is not None
    return plain in FACTORED and not (plain is rotated_sum_sq and groups > 1)


OF_ROWS = (per_sample_grad, summed_grad, sum_sq, batch_sq, sq_norm, gram, moments)
"""Statistics that are functions of per-sample gradients, whatever structure these come from."""

# Fast cells


@fast_cell("sum_sq", Outer)
def _outer_sum_sq(structure: Outer) -> Tensor | None:
    """Without shared positions the square of a product is the product of squares: one matrix product."""
    assert structure.signal is not None
    columns, _, positions, groups, fan_out = structure.signal.shape
    if positions != 1:
        if structure.formed or structure.by_groups or groups != 1:
            return None
        total = squared_products(*structure.matrices).unflatten(0, (columns, fan_out)).sum(0)
        return _to_parameter(structure, total)
    squares = structure.signal.squeeze(2).square().sum(0)
    return structure.fold(_summed_products(squares, structure.x.squeeze(1).square()))


def _summed_products(left: Tensor, right: Tensor) -> Tensor:
    """``[n, g, o]`` times ``[n, g, i]``, summed over samples: ``[g, o, i]``."""
    return torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1))


@fast_cell("batch_sq", Outer)
def _outer_batch_sq(structure: Outer) -> Tensor | None:
    """As in ``sum_sq``: columns are summed before the products are formed."""
    assert structure.signal is not None
    if structure.signal.shape[2] != 1:
        return None
    squares = structure.signal[:, :, 0].square().sum(0)
    return structure.fold(squares[..., None] * structure.x[:, 0, :, None, :].square())


@fast_cell("sq_norm", Outer)
def _outer_sq_norm(structure: Outer) -> Tensor | None:
    """Inner products over positions, where these are few (Goodfellow 2015)."""
    signal = structure.signal
    assert signal is not None
    positions = signal.shape[2]
    if structure.formed or not norms_by_products(structure.extents):
        return None
    x = structure.x
    if positions == 1:
        return (square_norms(signal.squeeze(2)).sum(0) * square_norms(x.squeeze(1))).sum(1)
    inputs = torch.einsum("nsgi,ntgi->ngst", x, x)
    signals = torch.einsum("vnsgo,vntgo->ngst", signal, signal)
    return torch.einsum("ngst,ngst->n", inputs, signals)


@fast_cell("moments", Outer)
def _outer_moments(structure: Outer) -> Moments | None:
    """Without shared positions: from matrix products in a wider precision, a block of outputs at a time.

    The mean is taken off after squares were summed up, and what cancels then are digits that gradients of
    single samples would not have had: rounding these to ``dtype`` is off by more than the sum in double
    precision.
    """
    signal = structure.signal
    assert signal is not None
    _, samples, positions, groups, fan_out = signal.shape
    wide = _wider(signal.dtype, device_kind(signal))
    if positions != 1 or structure.formed or wide is None or torch.is_grad_enabled():
        return None
    left, right = signal[0, :, 0].permute(1, 2, 0), structure.x[:, 0].transpose(0, 1).to(wide)
    squares = right.square()
    mean = signal.new_empty(groups, fan_out, right.shape[2])
    deviation = torch.empty_like(mean)
    for some in _blocks(fan_out, groups * right.shape[2]):
        part = left[:, some].to(wide)
        sums = part @ right
        mean[:, some] = sums / samples
        deviation[:, some] = (part.square() @ squares).addcmul_(sums, sums, value=-1 / samples).clamp_min_(0)
    return Moments(samples, structure.fold(mean), structure.fold(deviation))


def _wider(dtype: torch.dtype, device: str) -> torch.dtype | None:
    """A precision with twice the digits, where there is one."""
    return torch.float64 if dtype == torch.float32 and device != "mps" else None


def _blocks(count: int, width: int) -> list[slice]:
    """Parts of an axis, such that ``width`` entries for each of a part stay in a processor's cache."""
    step = max(1, IN_CACHE // width)
    blocks = [slice(start, start + step) for start in range(0, count, step)]
    return blocks[:3] if is_dry() else blocks


@fast_cell("gram", Outer)
def _outer_gram(structure: Outer) -> Tensor | None:
    """The Gram matrix of outer products is the product of two Gram matrices."""
    signal, x = structure.signal, structure.x
    assert signal is not None
    if signal.shape[2] != 1:
        return None
    signals = torch.einsum("vngo,vmgo->gnm", signal[:, :, 0], signal[:, :, 0])
    inputs = torch.einsum("ngi,mgi->gnm", x[:, 0], x[:, 0])
    return (signals * inputs).sum(0)


@fast_cell("sq_norm", Lookup)
def _lookup_sq_norm(structure: Lookup) -> Tensor | None:
    """Only positions that looked up the same row meet: no table of size ``rows`` for each sample."""
    signal = structure.signal
    assert signal is not None
    same = structure.index[:, :, None] == structure.index[:, None, :]
    products = torch.einsum("vnso,vnto->nst", signal, signal)
    return (products * same).sum((1, 2))


# NOTE [In turn]
#
# Gradients of single samples of a large weight that is shared over positions cost less to form than to
# write down, read again for a sum, and again for each other statistic: each is formed, given to all that was
# asked for while it is in the cache, and gone.

Add = Callable[[Tensor, int], object]
"""Takes a gradient ``[o, i]``, and how many there were with it."""
Tally = tuple[Add, Callable[[], Any]]
"""Adds up gradients of single samples, and returns their statistic."""

IN_TURN: dict[Statistic, Callable[[Outer], Tally]] = {}


def together(structure: Quadratic, statistics: Sequence[Statistic]) -> list[Any]:
    """Values of several statistics of one structure; see NOTE [In turn]."""
    gradients = _gradients_in_turn(structure, statistics)
    if gradients is None:
        return [statistic(structure) for statistic in statistics]
    assert isinstance(structure, Outer)
    tallies = [IN_TURN[statistic](structure) for statistic in statistics]
    for count, gradient in enumerate(islice(gradients, 3) if is_dry() else gradients, 1):
        for add, _ in tallies:
            add(gradient, count)
    return [value() for _, value in tallies]


def _gradients_in_turn(structure: Quadratic, statistics: Sequence[Statistic]) -> Iterator[Tensor] | None:
    """Gradients of single samples ``[o, i]``, where these are best seen once; else ``None``."""
    if not isinstance(structure, Outer) or structure.signal is None or len(structure.signal) > 1:
        return None
    if structure.room is None and per_sample_grad in statistics:
        return None
    return products_in_turn(*structure.matrices) if goes_in_turn(statistics, structure.extents) else None


def goes_in_turn(statistics: Sequence[Statistic], extents: Extents) -> bool:
    """Whether statistics of one column of an affine use are best had from one gradient after the other."""
    positions, groups, fan_in, fan_out = extents[:4]
    return (
        groups == 1
        and worth_a_call(positions, fan_in * fan_out, extents.dtype, extents.device)
        and all(statistic in IN_TURN for statistic in statistics)
        and any(forms_rows(statistic, extents) for statistic in statistics)
        and not convolved_by_groups(extents)
    )


def _tally_of(statistic: Statistic) -> Callable[[Callable[[Outer], Tally]], Callable[[Outer], Tally]]:
    def register(tally: Callable[[Outer], Tally]) -> Callable[[Outer], Tally]:
        IN_TURN[statistic] = tally
        return tally

    return register


def _zeros(structure: Outer) -> Tensor:
    """``[o, i]``."""
    assert structure.signal is not None
    return structure.signal.new_zeros(structure.signal.shape[4], structure.shape[3])


def _to_parameter(structure: Outer, matrix: Tensor) -> Tensor:
    """``[o, i] -> [*p]``."""
    return structure.fold(matrix.unsqueeze(-3))


@_tally_of(per_sample_grad)
def _rows_in_turn(structure: Outer) -> Tally:
    room = structure.room
    assert room is not None
    places = room.view(room.shape[1], -1, structure.shape[3])
    return lambda gradient, count: places[count - 1].copy_(gradient), lambda: room


@_tally_of(summed_grad)
def _sum_in_turn(structure: Outer) -> Tally:
    total = _zeros(structure)
    return lambda gradient, count: total.add_(gradient), lambda: _to_parameter(structure, total)


@_tally_of(sum_sq)
def _squares_in_turn(structure: Outer) -> Tally:
    total = _zeros(structure)
    return lambda gradient, count: total.addcmul_(gradient, gradient), lambda: _to_parameter(structure, total)


@_tally_of(sq_norm)
def _norms_in_turn(structure: Outer) -> Tally:
    assert structure.signal is not None
    norms = structure.signal.new_empty(structure.shape[0])

    def add(gradient: Tensor, count: int) -> None:
        torch.linalg.vector_norm(gradient, out=norms[count - 1])

    return add, norms.square_


@_tally_of(moments)
def _moments_in_turn(structure: Outer) -> Tally:
    """Mean and squared deviation by Welford (1962)."""
    mean, deviation, samples = _zeros(structure), _zeros(structure), structure.shape[0]

    def add(gradient: Tensor, count: int) -> None:
        shift = gradient - mean
        mean.add_(shift, alpha=1 / count)
        deviation.addcmul_(shift, shift, value=1 - 1 / count)

    return add, lambda: Moments(samples, _to_parameter(structure, mean), _to_parameter(structure, deviation))
