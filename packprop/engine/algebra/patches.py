"""Patches of a convolution in one, two or three dimensions: the inputs that each output position sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.algebra.kernels import outer_products, second_moment


def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Return the inputs that each output position of a convolution sees: one row each, from padded inputs.

    This is a strided view of ``x``, copied once when it is reshaped; ``[b, g*c, *space] -> [b, s, g, i]``
    with ``i = c * prod(kernel)``, the order of a convolution weight's trailing axes.
    """
    dims = len(kernel)
    windows = _windows(x, kernel, stride, dilation)
    outputs = windows.shape[2 : 2 + dims]
    # b, c, *outputs, *kernel -> b, c, *kernel, *outputs: the inputs of one output position are a matrix column
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    columns = windows.permute(order).reshape(len(x), groups, -1, outputs.numel())
    return columns.permute(0, 3, 1, 2)


def patch_moment(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Sum products of the rows of ``patches`` over images, positions and groups, ``[i, i]``.

    It copies the inputs once, in the order in which the product reads them: each entry of a patch for all
    positions of all images.
    """
    dims = len(kernel)
    windows = _windows(x, kernel, stride, dilation).unflatten(1, (groups, -1))
    order = [2, *range(3 + dims, 3 + 2 * dims), 0, 1, *range(3, 3 + dims)]  # c, *kernel, b, g, *outputs
    return second_moment(windows.permute(order).flatten(0, dims).flatten(1).mT)


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Return a strided view, ``[b, c, *space] -> [b, c, *outputs, *kernel]``."""
    batch, channels, *space = x.shape
    outputs = [
        (size - d * (k - 1) - 1) // st + 1
        for size, k, st, d in zip(space, kernel, stride, dilation, strict=True)
    ]
    strides = x.stride()[2:]
    return x.as_strided(
        [batch, channels, *outputs, *kernel],
        [
            *x.stride()[:2],
            *(st * step for st, step in zip(stride, strides, strict=True)),
            *(d * step for d, step in zip(dilation, strides, strict=True)),
        ],
        x.storage_offset(),
    )


def shift_moment(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], sides: Sequence[tuple[int, int]], groups: int
) -> Tensor:
    """Compute ``patch_moment`` without unfolding anything; for unit stride.

    # NOTE [Moments of patches]
    Kernel offsets k and k' multiply pixels that lie ``d = k' - k`` apart, and so do all other pairs with the
    same d. They differ only in which pixels at the borders take part. So one sum over all pixels serves all
    pairs with the same d. It contains a few pairs of pixels that no output position sees together. These lie in
    boxes at the borders, and inclusion and exclusion over the axes subtracts them.

    Args:
        x: Input without padding ``[b, g*c, *space]``.
        kernel: Extent of the kernel along each spatial axis.
        dilation: Step of the kernel along each spatial axis.
        sides: Zeros of padding before and after each spatial axis.
        groups: Groups of channels.
    """
    space = x.shape[2:]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    # Spatial axes lead and channels come last, so that a shift is an offset into flat rows. Zeros behind every
    # axis keep pixels that are shifted past the end of one line from meeting the next line, and leave room for
    # all shifts behind the last one.
    x = x.unflatten(1, (groups, -1)).movedim((0, 1, 2), (-3, -2, -1)).flatten(-3, -2)
    behind = [reach[0] + 1, *reach[1:]]
    x = F.pad(x, [0, 0, 0, 0, *(width for r in reversed(behind) for width in (0, r))])
    steps = [math.prod(x.shape[axis + 1 : -1]) for axis in range(len(kernel))]
    flat = x.flatten(0, -2)
    columns = flat[: space[0] * steps[0]].T.contiguous()  # once: products would copy any other order

    def everywhere(shift: tuple[int, ...]) -> Tensor:
        offset = sum(d * step for d, step in zip(shift, steps, strict=True))
        return outer_products(columns[None], flat[None, offset : offset + columns.shape[1]].mT)[0]

    def inside(shift: tuple[int, ...], box: tuple[range, ...]) -> Tensor:
        here = [slice(r.start, r.stop) for r in box]
        there = [slice(r.start + d, r.stop + d) for r, d in zip(box, shift, strict=True)]
        return x[tuple(here)].flatten(0, -2).T @ x[tuple(there)].flatten(0, -2)

    sums: dict[tuple[Any, ...], Tensor] = {}

    def product(first: tuple[int, ...], second: tuple[int, ...]) -> Tensor:
        shift = tuple(b - a for a, b in zip(first, second, strict=True))
        valid = [range(max(0, -d), min(size, size - d)) for size, d in zip(space, shift, strict=True)]
        if not all(valid):
            return x.new_zeros(x.shape[-1], x.shape[-1])
        if (shift,) not in sums:
            sums[shift,] = everywhere(shift)
        total = sums[shift,]
        borders = []
        for axis, pixels in enumerate(valid):
            low = first[axis] - sides[axis][0]
            high = low + space[axis] + sum(sides[axis]) - reach[axis]
            border = (range(pixels.start, min(low, pixels.stop)), range(max(high, pixels.start), pixels.stop))
            borders.append([part for part in border if part])
        choices = [
            [(1, pixels), *((-1, part) for part in parts)] for pixels, parts in zip(valid, borders, strict=True)
        ]
        for boxes in list(itertools.product(*choices))[1:]:
            key = (shift, tuple(box for _, box in boxes))
            if key not in sums:
                sums[key] = inside(*key)
            total = torch.add(total, sums[key], alpha=math.prod(sign for sign, _ in boxes))
        return total

    offsets = list(itertools.product(*(range(0, r + 1, d) for r, d in zip(reach, dilation, strict=True))))
    blocks = {
        (a, b): product(offsets[a], offsets[b]) for a in range(len(offsets)) for b in range(a, len(offsets))
    }
    table = torch.stack(
        [blocks[a, b] if a <= b else blocks[b, a].T for a in range(len(offsets)) for b in range(len(offsets))]
    )
    size = x.shape[-1] * len(offsets)
    pairs: Tensor = table.unflatten(0, (len(offsets), -1))
    return pairs.permute(2, 0, 3, 1).reshape(size, size)


def transposed_patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the inputs that each output position of a transposed convolution sees, ``[b, s, g, i]``.

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
    # The kernel is read backwards: its axes inside i = c * prod(kernel) are flipped.
    unfolded: Tensor = rows.unflatten(-1, (-1, *kernel))
    return unfolded.flip([*range(-len(kernel), 0)]).flatten(-len(kernel) - 1)
