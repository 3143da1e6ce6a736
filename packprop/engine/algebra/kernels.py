"""Products of matrices, sums of squares, gradients of convolutions: each by PyTorch's fastest kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from packprop.engine.algebra.choices import forced_algorithm
from packprop.engine.tensors.device import device_kind, multiplies_wide
from packprop.engine.tensors.precision import NARROW, accumulation_dtype, widened
from packprop.engine.tensors.traced import is_traced

WORTH_A_CALL = 12 * 2**20
"""Multiplications for each thread that make a product faster in its own call than in a batch.

The threads share the products of a batch at no cost; in a call for one small product they wait.
"""

LONG_ROW = 4096
"""The number of entries at which packprop begins to compute norms in pieces."""

WORTH_BLOCKS = 2**28
"""The multiplications at which packprop begins to compute symmetric products in blocks, up to the diagonal."""

BLOCKS = 4
"""Blocks of rows; these leave out three eighths of the multiplications. More would be too small to be fast."""

LONG = 256
"""Sums of fewer terms take less time than copying their results does."""

LARGE_IMAGE, LARGE_KERNEL, LARGE_WEIGHT = 150, 16, 2**15
"""Gradients of depthwise filters are faster sample by sample from these numbers of pixels and of entries of the
kernel on, if the weight has fewer entries than the third number."""

FULL = 16
"""MKL is fastest at rows whose length in single precision is a multiple of this."""

SMALL_ROW = 2**14
"""Entries of a row below which all rows are squared at once: calls would cost more than reading the rows."""

SHORT = 32
"""Sums of fewer terms wait for memory, not for multiplications: no kernel is faster than another."""


def wide_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply matrices, or batches of them, in the precision of sums; the result is in ``out`` if given."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    if left.dtype not in NARROW and right.dtype not in NARROW:
        return multiply(left, right, out=out)
    if left.dtype == right.dtype and multiplies_wide(left):
        wide = accumulation_dtype(left.dtype)
        return multiply(left, right, wide) if out is None else multiply(left, right, wide, out=out)
    return multiply(widened(left), widened(right), out=out)


def outer_products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply ``[b, o, s]`` by ``[b, i, s]``, summed over s: ``[b, o, i]``, written to ``out`` if given."""
    products = products_one_by_one(left, right)
    if products is None and out is None and _is_faster_swapped(left, right):
        return torch.bmm(right, left.mT).mT
    if products is None:
        return wide_product(left, right.mT, out)
    if out is None:
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[1])
    for row, product in zip(out, products, strict=True):
        row.copy_(product)
    return out


def products_one_by_one(left: Tensor, right: Tensor, by_rows: bool = True) -> Iterator[Tensor] | None:
    """Yield the products of ``outer_products`` one after the other; return ``None`` if a batch is faster.

    Args:
        left: Matrices ``[b, o, s]``.
        right: Matrices ``[b, i, s]``.
        by_rows: Keeps each product in memory by rows, as the place that it will be copied to.
    """
    kernel = _kernel_for(left, right, by_rows)
    return None if kernel is None else map(kernel, _plain(left), _plain(right))


def squared_products(left: Tensor, right: Tensor) -> Tensor:
    """Sum squares of the entries of ``outer_products`` over b: ``[o, i]``.

    If it forms products one by one, it drops each of them. This is for several columns at once; for a single
    column ``one_by_one`` gives each product to all statistics.
    """
    products = products_one_by_one(left, right)
    if products is None and _is_faster_swapped(left, right):
        return sum_of_squares(torch.bmm(right, left.mT)).mT  # sums over rows without gaps
    if products is None:
        return sum_of_squares(wide_product(left, right.mT))
    total = left.new_zeros(left.shape[1], right.shape[1])
    for product in products:
        total.addcmul_(product, product)
    return total


def second_moment(rows: Tensor) -> Tensor:
    """Return ``sum_m r r^T`` of the rows of ``[m, p]``: ``[p, p]``.

    It computes only the blocks of a large moment up to the diagonal, and copies them above it: no public
    product makes use of symmetry.
    """
    transposed = rows.mT
    kernel = _kernel_for(transposed, transposed)
    if kernel is None:
        return wide_product(transposed, rows)
    transposed = transposed.contiguous()
    terms, size = rows.shape
    if terms < LONG or terms * size**2 < WORTH_BLOCKS:
        return kernel(transposed, transposed)
    moment = rows.new_empty(size, size)
    step = -(-size // BLOCKS)
    for start in range(0, size, step):
        stop = min(size, start + step)
        below = kernel(transposed[start:stop], transposed[:stop])
        moment[start:stop, :stop] = below
        moment[:start, start:stop] = below[:, :start].mT
    return moment


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``[n, g, o]`` by ``[n, 1, g, i]``, summed over samples: ``[g, o, i]``."""
    samples, _, groups, fan_in = right.shape
    by_groups = right.view(1, samples, fan_in) if groups == 1 else right.squeeze(1).transpose(0, 1)
    return torch.bmm(left.permute(1, 2, 0), by_groups)


def sum_of_squares(rows: Tensor, centre: Tensor | None = None, axes: int = 1) -> Tensor:
    """Sum squares of entries, or of their deviations from ``centre``, over leading axes."""
    differentiated, leading = torch.is_grad_enabled() and rows.requires_grad, tuple(range(axes))
    if rows.is_complex() or differentiated or is_traced():
        return (rows if centre is None else rows - centre).square().sum(leading)
    if device_kind(rows) != "cpu":  # one kernel, and no squares in memory
        norms: Tensor = torch.linalg.vector_norm(rows if centre is None else rows - centre, dim=leading)
        return norms.square_()
    if not 0 < rows.shape[:axes].numel() <= 64 or rows.shape[axes:].numel() < SMALL_ROW:
        return (rows.square() if centre is None else (rows - centre).square_()).sum(leading)
    rows = rows.flatten(0, axes - 1)
    total = torch.zeros_like(rows[0])
    for row in rows:  # reads each row once, and writes nothing as large as all rows
        deviation = row if centre is None else row - centre
        total.addcmul_(deviation, deviation)
    return total


def square_norms(rows: Tensor) -> Tensor:
    """Sum squares of entries over the last axis."""
    if rows.is_complex() or (torch.is_grad_enabled() and rows.requires_grad):
        return rows.square().sum(-1)
    return norms_of(rows).square_()


def norms_of(rows: Tensor) -> Tensor:
    """Return Euclidean norms over the last axis.

    On a CPU, PyTorch adds up the squares of a row one after the other, in a few running sums: from a million
    entries on, single precision keeps three or four digits. So packprop splits long rows into pieces.
    """
    length = rows.shape[-1]
    if length > LONG_ROW and device_kind(rows) == "cpu":
        whole = length // LONG_ROW * LONG_ROW
        pieces = norms_of(torch.unflatten(rows[..., :whole] if whole < length else rows, -1, (-1, LONG_ROW)))
        if whole < length:
            rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True)
            pieces = torch.cat([pieces, rest], -1)
        return norms_of(pieces)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def worth_a_call(terms: int, entries: int, dtype: torch.dtype, device: str) -> bool:
    """Tell whether a product with ``entries``, each a sum of ``terms``, is faster alone than in a batch."""
    if not _is_long(terms, entries) or is_traced():
        return False  # a graph gains nothing from many calls, and a compiler cannot lower this one
    return dtype == torch.float32 and device == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_long(terms: int, entries: int) -> bool:
    """Tell whether the size of a product, or a forced algorithm, asks for a separate call."""
    forced = forced_algorithm("products")
    if forced is not None:
        return forced == "single"
    return terms >= SHORT and terms * entries >= WORTH_A_CALL * torch.get_num_threads()


def grouped_gradients(
    images: Tensor,
    cotangent: Tensor,
    shape: torch.Size,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return gradients of a convolution's weight ``[*p]`` for each image, by one call: ``[1, n, *p]``.

    The samples become groups of a convolution of one image, unless a depthwise one is faster image by image.

    Args:
        images: Inputs ``[n, g*c, *space]``.
        cotangent: Cotangent at the outputs ``[n, g*o, *space]``.
        shape: Shape of the weight.
        stride: Stride along each spatial axis.
        padding: Padding along each spatial axis, the same on both sides.
        dilation: Dilation along each spatial axis.
        groups: Groups of the convolution itself.
    """
    gradient = (conv1d_weight, conv2d_weight, conv3d_weight)[len(shape) - 3]
    samples, options = len(images), ([*stride], [*padding], [*dilation])
    if _is_faster_by_channels_last(cotangent, shape, groups):
        images, cotangent = (each.contiguous(memory_format=torch.channels_last) for each in (images, cotangent))
        rows = [
            gradient(image, shape, own, *options, groups)  # type: ignore[no-untyped-call]  # torch's own
            for image, own in zip(images.split(1), cotangent.split(1), strict=True)
        ]
        return torch.stack(rows)[None]
    merged: Tensor = gradient(  # type: ignore[no-untyped-call]  # torch's own
        images.reshape(1, -1, *images.shape[2:]),
        (samples * shape[0], *shape[1:]),
        cotangent.reshape(1, -1, *cotangent.shape[2:]),
        *options,
        samples * groups,
    )
    return merged.view(1, samples, *shape)


def _is_faster_by_channels_last(cotangent: Tensor, shape: torch.Size, groups: int) -> bool:
    """Tell whether oneDNN's gradient of a depthwise convolution is faster sample by sample.

    It has a kernel for filters of any width if channels lie side by side, but for samples merged into groups
    only one for 3 x 3 filters.
    """
    is_depthwise = len(shape) == 4 and shape[0] == groups and shape[1] == 1
    is_large = cotangent[0, 0].numel() >= LARGE_IMAGE and shape[2:].numel() >= LARGE_KERNEL
    fits = device_kind(cotangent) == "cpu" and cotangent.dtype == torch.float32 and not is_traced()
    onednn = torch.backends.mkldnn.is_available()
    return is_depthwise and is_large and shape.numel() < LARGE_WEIGHT and fits and onednn


def _kernel_for(
    left: Tensor, right: Tensor, by_rows: bool = False
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a product of ``[o, s]`` and ``[i, s]`` that is faster than one call for a batch; else ``None``.

    This calls the one private operator: ``torch.ops.mkldnn._linear_pointwise``, which torch itself uses in
    compiled models. Public products go to MKL. On processors not made by Intel, MKL takes a slower path, at
    half the speed of the convolutions that PyTorch gives to oneDNN on the same machine. Without the operator
    everything works by ``torch.bmm``.

    The operator copies its first matrix unless it is in memory by rows. If both are in memory by columns, the
    smaller one goes first; but not for ``by_rows``, because the product is then in memory by columns.
    """
    terms, entries = left.shape[-1], left.shape[-2] * right.shape[-2]
    if not _is_long(terms, entries):  # most products are not, so this comes first
        return None
    fits = (
        device_kind(left) == device_kind(right)
        and left.dtype == right.dtype
        and worth_a_call(terms, entries, left.dtype, device_kind(left))
        and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
    )
    library: Any = torch.ops.mkldnn

    def product(first: Tensor, second: Tensor) -> Tensor:
        value: Tensor = library._linear_pointwise(first, second, None, "none", [], "")
        return value

    if not fits:
        return None
    is_swapped = not by_rows and left.stride(-1) != 1 and right.shape[-2] < left.shape[-2]
    return (lambda a, b: product(b, a).mT) if is_swapped else product


def _is_faster_swapped(left: Tensor, right: Tensor) -> bool:
    """Tell whether MKL forms products ``[b, o, i]`` faster as ``[b, i, o]``, as for three-channel filters."""
    fits = left.shape[1] % FULL == 0 and right.shape[1] % FULL != 0 and left.dtype == torch.float32
    return fits and device_kind(left) == "cpu" and not is_traced()


def _plain(matrices: Tensor) -> Tensor:
    """Return matrices in memory without gaps, by rows or columns: oneDNN loops over the entries of others."""
    _, rows, columns = matrices.shape
    fits = matrices.stride()[1:] in ((columns, 1), (1, rows))
    return matrices if fits else matrices.contiguous()
