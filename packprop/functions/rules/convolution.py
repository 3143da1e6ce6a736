"""Convolutions, and transposed ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.algebra.algorithms import choose_algorithm
from packprop.algebra.kernels import grouped_gradients
from packprop.algebra.order import fold_swapped, fold_to
from packprop.algebra.patches import as_tuple, patch_moment, patches, transposed_patches
from packprop.algebra.structures import LazyTensor, Outer, Structure
from packprop.functions.building import rowwise, scaled
from packprop.functions.entry import Call, Entry, Fans, name_of
from packprop.functions.registry import register_use

MANY_CHANNELS = 16
"""From which on moments of patches are had by shifts of the input: with fewer, calls are what takes time."""


def _convolution(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    fold: Callable[[torch.Size], Callable[[Tensor], Tensor]],
    unfold: Callable[[Tensor], Tensor],
    gradients: Callable[[Tensor, Tensor], Tensor],
    moment: Callable[[Tensor], Tensor] | None = None,
) -> list[Entry] | None:
    """Entries of a convolution, given how its input unfolds to ``[b, s, g, i]``, and products of that.

    ``gradients`` makes those of single samples ``[1, n, *p]`` from images and cotangents, without unfolding.
    """
    if call.consumes(x):
        return None
    space = weight.dim() - 2
    channels = call.shape[-space - 1]
    positions = call.shape[-space:].numel()
    rearrange = fold(weight.shape)

    fan_in = weight.numel() // channels
    fans = Fans(groups, fan_in, channels // groups, unfolds=True)
    many = x.shape[-space - 1] // groups >= MANY_CHANNELS

    def build(cotangent: Tensor | None, x: Tensor) -> Structure:
        images = x.reshape(-1, *x.shape[-space - 1 :])
        shape = (x.shape[0], len(images) // len(x) * positions, groups, fan_in)
        direct = None
        if cotangent is not None:
            if len(cotangent) == 1 and len(images) == len(x) and images.dtype == cotangent.dtype:
                arrived = cotangent.reshape(len(x), *cotangent.shape[-space - 1 :])
                direct = functools.partial(gradients, images, arrived)
            cotangent = cotangent.flatten(-space).transpose(-1, -2)
            cotangent = cotangent.reshape(*cotangent.shape[:2], shape[1], groups, channels // groups)
        rows = LazyTensor(shape, lambda: unfold(images).reshape(shape))
        by_shifts = choose_algorithm("factors", "shifts" if many else "patches", {}, None) == "shifts"
        made = functools.partial(moment, images) if moment is not None and by_shifts else None
        return Outer(rows, cotangent, rearrange, made, direct=direct)

    scratch = weight.numel() + positions * (groups * fan_in + channels)
    single = weight.numel() + positions * channels + x.shape[-space - 1 :].numel()
    alone = groups * positions * fan_in if moment is None or not many else 3 * x.shape[-space - 1 :].numel()
    structure_of = rowwise(build, name_of(call.function), x)
    found = [
        Entry(
            weight,
            "Outer",
            structure_of,
            scratch,
            single=single,
            admits=lambda axis: axis == 0,
            alone=alone,
            fans=fans,
            linear=True,
        )
    ]
    if bias is None:
        return found
    form = (*(1,) * (len(call.shape) - space - 1), channels, *(1,) * space)
    return [*found, scaled(call, bias, aligned=form)]


@register_use(F.conv1d, F.conv2d, F.conv3d)
def _conv(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> list[Entry] | None:
    kernel = tuple(weight.shape[2:])
    dims = len(kernel)
    steps, gaps = as_tuple(stride, dims), as_tuple(dilation, dims)
    if padding == "same":
        total = [gap * (k - 1) for gap, k in zip(gaps, kernel, strict=True)]
        sides = [(width // 2, width - width // 2) for width in total]
    else:
        sides = [(p, p) for p in as_tuple(0 if padding == "valid" else padding, dims)]
    widths = [width for pair in reversed(sides) for width in pair]

    def unfold(x: Tensor) -> Tensor:
        return patches(F.pad(x, widths) if any(widths) else x, kernel, steps, gaps, groups)

    def moment(x: Tensor) -> Tensor:
        return patch_moment(x, kernel, gaps, sides, groups)

    def gradients(x: Tensor, cotangent: Tensor) -> Tensor:
        even = all(before == after for before, after in sides)
        insets = [before if even else 0 for before, _ in sides]
        x = x if even else F.pad(x, widths)
        return grouped_gradients(x, cotangent, weight.shape, steps, insets, gaps, groups)

    fewer = math.prod(kernel) > 1 and set(steps) == {1}
    return _convolution(
        call, input, weight, bias, groups, fold_to, unfold, gradients, moment if fewer else None
    )


@register_use(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> list[Entry] | None:
    kernel = tuple(weight.shape[2:])
    steps, inset, outset, gaps = (
        as_tuple(option, len(kernel)) for option in (stride, padding, output_padding, dilation)
    )

    def unfold(x: Tensor) -> Tensor:
        return transposed_patches(x, kernel, steps, inset, outset, gaps, groups)

    def gradients(
        x: Tensor, cotangent: Tensor
    ) -> Tensor:  # a convolution takes the cotangents back to the inputs
        beyond = [out // step for out, step in zip(outset, steps, strict=True)]
        if any(beyond):  # where the outputs are longer than the inputs account for, it has outputs of its own
            x = F.pad(x, [width for extra in reversed(beyond) for width in (0, extra)])
        return grouped_gradients(cotangent, x, weight.shape, steps, inset, gaps, groups)

    return _convolution(call, input, weight, bias, groups, fold_swapped, unfold, gradients)
