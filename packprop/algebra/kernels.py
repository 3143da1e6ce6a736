"""Batches of matrix products, and of gradients of convolutions, by the fastest kernel that PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from packprop.algebra.algorithms import choose_algorithm, forced_algorithm
from packprop.tensors.device import device_kind

WORTH_A_CALL = 3 * 2**20
"""Multiplications for each thread from which on one product is worth a call of its own.

A batch is shared out among threads product by product, which costs nothing; in one small product they wait.
"""


WORTH_BLOCKS = 2**28
"""Multiplications from which on a symmetric product is made of blocks up to its diagonal."""


BLOCKS = 4
"""Of rows, which leave out three parts in eight of the multiplications; more are too small to be fast."""


LONG = 256
"""Sums of fewer terms take less time than copying their results does."""


SHORT = 32
"""Sums of fewer terms wait for memory, not for multiplications: no kernel is faster than another."""


class Extents(NamedTuple):
    """What the algorithms of an affine use are chosen by.

    Args:
        positions: That the parameter is shared over, in one sample.
        groups: Of the map.
        fan_in: Entries of a group that go in at a position.
        fan_out: Entries that come out.
        unfolds: Whether inputs are unfolded to positions, and gradients can be had without that.
        dtype: Of inputs and cotangents.
        device: The type of the device.
        held: Bytes of one sample that an algorithm may hold if another holds less; ``None`` for any number.
    """

    positions: int
    groups: int
    fan_in: int
    fan_out: int
    unfolds: bool
    dtype: torch.dtype
    device: str
    held: int | None

    @property
    def unfolded(self) -> int:
        """Entries of one sample's inputs by position, where they are made for the purpose; else 0."""
        return self.positions * self.groups * self.fan_in if self.unfolds else 0


def outer_products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``[b, o, s]`` times ``[b, i, s]``, summed over s: ``[b, o, i]``, into ``out`` if it is given."""
    products = products_one_by_one(left, right)
    if products is None:
        return torch.bmm(left, right.mT) if out is None else torch.bmm(left, right.mT, out=out)
    if out is None:
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[1])
    for place, product in zip(out, products, strict=True):
        place.copy_(product)
    return out


def products_one_by_one(left: Tensor, right: Tensor) -> Iterator[Tensor] | None:
    """The products of ``outer_products`` one after the other; ``None`` where all at once are faster."""
    kernel = _kernel_for(left, right)
    return None if kernel is None else map(kernel, _plain(left), _plain(right))


def squared_products(left: Tensor, right: Tensor) -> Tensor:
    """Squares of the entries of ``outer_products``, summed over b: ``[o, i]``; none outlives its turn.

    For several columns at once; those of one are given to all statistics together.
    """
    products = products_one_by_one(left, right)
    if products is None:
        return sum_of_squares(torch.bmm(left, right.mT))
    total = left.new_zeros(left.shape[1], right.shape[1])
    for product in products:
        total.addcmul_(product, product)
    return total


def second_moment(rows: Tensor) -> Tensor:
    """``sum_m r r^T`` of the rows of ``[m, p]``: ``[p, p]``.

    What is above the diagonal of a large one is copied from below: no public product knows of symmetry.
    """
    turned = rows.mT
    kernel = _kernel_for(turned[None], turned[None])
    if kernel is None:
        return turned @ rows
    turned = turned.contiguous()
    terms, size = rows.shape
    if terms < LONG or terms * size**2 < WORTH_BLOCKS:
        return kernel(turned, turned)
    moment = rows.new_empty(size, size)
    step = -(-size // BLOCKS)
    for start in range(0, size, step):
        stop = min(size, start + step)
        below = kernel(turned[start:stop], turned[:stop])
        moment[start:stop, :stop] = below
        moment[:start, start:stop] = below[:, :start].mT
    return moment


def sum_of_squares(rows: Tensor, centre: Tensor | None = None) -> Tensor:
    """Squares of entries, or of what they deviate from ``centre``, summed over the leading axis."""
    if rows.is_complex() or (torch.is_grad_enabled() and rows.requires_grad) or len(rows) > 64:
        return (rows if centre is None else rows - centre).square().sum(0)
    total = torch.zeros_like(rows[0])
    for row in rows:  # each is read once, and nothing as large as all of them is written
        deviation = row if centre is None else row - centre
        total.addcmul_(deviation, deviation)
    return total


def square_norms(rows: Tensor) -> Tensor:
    """Squares of entries, summed over the last axis."""
    if rows.is_complex() or (torch.is_grad_enabled() and rows.requires_grad):
        return rows.square().sum(-1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.square_()


def convolved_by_groups(extents: Extents) -> bool:
    """Whether per-sample gradients of a convolution are best had from ``grouped_gradients``.

    oneDNN's gradient of a weight takes images as they are. Unfolding them is the larger part of the work
    where positions are many; where they are few, oneDNN spends more on rearranging its results.
    """
    if not extents.unfolds or extents.dtype not in (torch.float32, torch.float64):
        return False
    onednn = extents.device == "cpu" and torch.backends.mkldnn.is_available()
    many = onednn and extents.dtype == torch.float32 and extents.positions > extents.fan_out
    holds = {"patches": extents.dtype.itemsize * extents.unfolded, "groups": 0}
    return choose_algorithm("convolutions", "groups" if many else "patches", holds, extents.held) == "groups"


def grouped_gradients(
    images: Tensor,
    cotangent: Tensor,
    shape: torch.Size,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Gradients of a convolution's weight ``[*p]`` for each image, by one call: ``[1, n, *p]``.

    The samples become groups of a convolution of one image, of which that is the weight's gradient.

    Args:
        images: Inputs ``[n, g*c, *space]``.
        cotangent: What arrived at the outputs ``[n, g*o, *space]``.
        shape: Shape of the weight.
        stride: For each spatial axis, as the rest.
        padding: The same on both sides.
        dilation: Of the kernel.
        groups: Of the convolution itself.
    """
    gradient = (conv1d_weight, conv2d_weight, conv3d_weight)[len(shape) - 3]
    samples = len(images)
    merged: Tensor = gradient(  # type: ignore[no-untyped-call]  # torch's own
        images.reshape(1, -1, *images.shape[2:]),
        (samples * shape[0], *shape[1:]),
        cotangent.reshape(1, -1, *cotangent.shape[2:]),
        list(stride),
        list(padding),
        list(dilation),
        samples * groups,
    )
    return merged.view(1, samples, *shape)


def _plain(matrices: Tensor) -> Tensor:
    """Matrices without gaps, by rows or by columns: for others oneDNN falls back to a loop over entries."""
    _, rows, columns = matrices.shape
    fits = matrices.stride()[1:] in ((columns, 1), (1, rows))
    return matrices if fits else matrices.contiguous()


def _kernel_for(left: Tensor, right: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A product of two matrices ``[o, s]`` and ``[i, s]`` that is faster by itself than in a batch.

    The one private operator that is called: ``torch.ops.mkldnn._linear_pointwise``, which torch itself uses
    in compiled models. Public products go to MKL, which takes a slower path on processors that Intel did
    not make, at half the speed of the convolutions that PyTorch hands to oneDNN on the same machine. Without
    the operator everything works by ``torch.bmm``.
    """
    fits = (
        device_kind(left) == device_kind(right)
        and left.dtype == right.dtype
        and worth_a_call(left.shape[2], left.shape[1] * right.shape[1], left.dtype, device_kind(left))
        and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
    )
    library: Any = torch.ops.mkldnn
    return (lambda a, b: library._linear_pointwise(a, b, None, "none", [], "")) if fits else None


def worth_a_call(terms: int, entries: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a product of so many entries, each a sum of ``terms``, is faster by itself than in a batch."""
    large = terms * entries >= WORTH_A_CALL * torch.get_num_threads() and terms >= SHORT
    by_name = forced_algorithm("products")
    fits = dtype == torch.float32 and device == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return fits and (large if by_name is None else by_name == "single")
