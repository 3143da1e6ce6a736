"""Convolution geometry in one, two and three dimensions: the inputs that each output position sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Inputs of an already padded convolution, one row for each output position.

    A strided view of ``x`` that is copied once, on reshaping; ``[b, g*c, *space] -> [b, s, g, i]``
    with ``i = c * prod(kernel)``, the order of a convolution weight's trailing axes.
    """
    dims = len(kernel)
    batch, channels, *space = x.shape
    outputs = [
        (size - d * (k - 1) - 1) // st + 1
        for size, k, st, d in zip(space, kernel, stride, dilation, strict=True)
    ]
    strides = x.stride()[2:]
    windows = x.as_strided(
        [batch, channels, *outputs, *kernel],
        [
            *x.stride()[:2],
            *(st * step for st, step in zip(stride, strides, strict=True)),
            *(d * step for d, step in zip(dilation, strides, strict=True)),
        ],
        x.storage_offset(),
    )
    # b, c, *outputs, *kernel -> b, c, *kernel, *outputs: rows of one output position stay a matrix column
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    columns = windows.permute(order).reshape(batch, groups, -1, _product(outputs))
    return columns.permute(0, 3, 1, 2)


def transposed_patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Inputs that each output position of a transposed convolution sees, ``[b, s, g, i]``.

    A transposed convolution is a convolution of unit stride over the input with ``stride - 1`` zeros
    between its entries, with the kernel read backwards (Dumoulin and Visin 2016, section 4).
    """
    stuffed = x.new_zeros(
        [
            *x.shape[:2],
            *((size - 1) * st + 1 for size, st in zip(x.shape[2:], stride, strict=True)),
        ]
    )
    steps: list[slice] = [slice(None), slice(None), *(slice(None, None, st) for st in stride)]
    stuffed[tuple(steps)] = x
    widths: list[int] = []
    for k, p, extra, d in zip(kernel, padding, output_padding, dilation, strict=True):
        widths = [d * (k - 1) - p, d * (k - 1) - p + extra, *widths]
    rows = patches(F.pad(stuffed, widths), kernel, (1,) * len(kernel), dilation, groups)
    # the kernel is read backwards: flip its axes inside i = c * prod(kernel)
    unfolded: Tensor = rows.unflatten(-1, (-1, *kernel))
    return unfolded.flip([*range(-len(kernel), 0)]).flatten(-len(kernel) - 1)


def as_tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """An option of a convolution, once for each spatial axis."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
