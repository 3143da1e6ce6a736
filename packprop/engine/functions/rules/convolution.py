"""Convolutions and transposed convolutions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.algebra.choices import choose_algorithm
from packprop.engine.algebra.kernels import grouped_gradients, second_moment
from packprop.engine.algebra.order import Fold, fold_swapped, fold_to
from packprop.engine.algebra.patches import patch_moment, patches, shift_moment, transposed_patches
from packprop.engine.algebra.structures import LazyTensor, Outer, Structure
from packprop.engine.functions.building import rowwise, scaled
from packprop.engine.functions.entry import Entry, Fans, Scratch
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.nodes import CONVOLUTIONS
from packprop.engine.functions.registry import rule_of

MANY_CHANNELS = 16
"""The fewest channels in a group for which packprop computes moments of patches from shifts of the input.

With fewer channels the calls take more time than the products.
"""


@dataclass(frozen=True)
class Geometry:
    """The inputs in the window of each output position of a convolution, and products of these inputs.

    Args:
        weight_shape: Shape of the weight, ``[g*o, c, *kernel]``; transposed ``[g*c, o, *kernel]``.
        stride: One number for each spatial axis.
        padding: Zeros on both sides of each spatial axis; transposed, output positions cut off there.
        dilation: Step of the kernel, for each spatial axis.
        transposed: Whether it is one of ``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d``.
        output_padding: Output positions that a transposed convolution adds at the end of each spatial axis.
        groups: Groups of channels.
    """

    weight_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        """Extent of the kernel along each spatial axis."""
        return tuple(self.weight_shape[2:])

    def fold(self) -> Fold:
        """Return the map from ``[..., g, o, i]`` to the shape of the weight."""
        return (fold_swapped if self.transposed else fold_to)(self.weight_shape)

    def unfold(self, images: Tensor) -> Tensor:
        """Return the window of each output position, ``[b, g*c, *space] -> [b, s, g, i]``."""
        if not self.transposed:
            return patches(self._pad(images), self.kernel, self.stride, self.dilation, self.groups)
        return transposed_patches(
            images, self.kernel, self.stride, self.padding, self.output_padding, self.dilation, self.groups
        )

    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """Return per-sample gradients ``[1, n, *p]`` from one image for each sample, without unfolding."""
        given, arriving = images, cotangent
        if self.transposed:  # it is the convolution from cotangents to inputs
            given, arriving = cotangent, images
            beyond = [extra // step for extra, step in zip(self.output_padding, self.stride, strict=True)]
            if any(beyond):  # that convolution has more outputs than the layer has inputs: pad the inputs
                arriving = F.pad(images, [width for extra in reversed(beyond) for width in (0, extra)])
        return grouped_gradients(
            given, arriving, self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        )

    def inner_products(self, images: Tensor, cotangent: Tensor, direction: Tensor) -> Tensor:
        """Return inner products ``[n]`` of per-sample gradients with a direction ``[*p]``; unfold nothing."""
        options = self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        return (torch.convolution(images, direction, None, *options) * cotangent).flatten(1).sum(1)

    @property
    def has_shifts(self) -> bool:
        """Tell whether shifts of the images give products of inputs, faster than windows do."""
        return not self.transposed and math.prod(self.kernel) > 1 and set(self.stride) == {1}

    def moment(self, images: Tensor, by_shifts: bool) -> Tensor:
        """Return products of windows, summed over images, positions and groups ``[i, i]``."""
        if self.transposed:
            return second_moment(self.unfold(images).flatten(0, 2))
        if by_shifts:
            sides = [(width, width) for width in self.padding]
            return shift_moment(images, self.kernel, self.dilation, sides, self.groups)
        return patch_moment(self._pad(images), self.kernel, self.stride, self.dilation, self.groups)

    def smallest_image(self, outputs: torch.Size) -> torch.Size:
        """Return the smallest shape of an image with these outputs, for an image without an edge."""
        space, channels = [], self.weight_shape[0] if self.transposed else self.weight_shape[1] * self.groups
        for axis, extent in enumerate(outputs):
            window = (self.kernel[axis] - 1) * self.dilation[axis] + 1 - 2 * self.padding[axis]
            if self.transposed:
                space.append((extent - window - self.output_padding[axis]) // self.stride[axis] + 1)
            else:
                space.append((extent - 1) * self.stride[axis] + window)
        return torch.Size([channels, *space])

    def _pad(self, images: Tensor) -> Tensor:
        widths = [width for extent in reversed(self.padding) for width in (extent, extent)]
        return F.pad(images, widths) if any(widths) else images


@rule_of(*CONVOLUTIONS, form="shape")
def _convolution(call: NodeCall) -> Entry | None:
    space = len(call.shape) - 2
    if call.place == 2:
        return scaled(call, aligned=(1, call.shape[1], *(1,) * space))
    if call.place != 1:
        return None
    stride, padding, dilation = (_one_each(call, each, space) for each in ("stride", "padding", "dilation"))
    transposed = call.has_option("transposed") and call.option("transposed")
    extra = _one_each(call, "output_padding", space) if transposed else (0,) * space
    geometry = Geometry(call.operand.shape, stride, padding, dilation, transposed, extra, call.option("groups"))
    known = call.shape_at(0)
    image = geometry.smallest_image(call.shape[2:]) if known is None else known[1:]
    return _weight(call, image, geometry)


def _one_each(call: NodeCall, name: str, count: int) -> tuple[int, ...]:
    """Return an option with one number for each spatial axis."""
    value = call.option(name)
    return tuple(value) if len(value) == count else tuple(value) * count


def _weight(call: NodeCall, image: torch.Size, geometry: Geometry) -> Entry:
    """Return the entry of a weight; ``image`` is the shape of one image."""
    weight = call.operand.tensor
    space = weight.dim() - 2
    channels = call.shape[-space - 1]
    positions = call.shape[-space:].numel()
    groups = geometry.groups
    fan_in, fan_out = weight.numel() // channels, channels // groups
    image_entries = image.numel()
    image_channels = image[0] // groups
    fastest = "shifts" if image_channels >= MANY_CHANNELS and geometry.has_shifts else "patches"
    fold = geometry.fold()

    def build(cotangent: Tensor | None, x: Tensor) -> Structure:
        images = x.reshape(-1, *x.shape[-space - 1 :])
        shape = (x.shape[0], len(images) // len(x) * positions, groups, fan_in)
        direct = inner = None
        if cotangent is not None:
            if len(cotangent) == 1 and len(images) == len(x) and images.dtype == cotangent.dtype:
                column = cotangent.reshape(len(x), *cotangent.shape[-space - 1 :])
                direct = functools.partial(geometry.gradients, images, column)
                inner = functools.partial(geometry.inner_products, images, column)
            cotangent = cotangent.flatten(-space).transpose(-1, -2)
            cotangent = cotangent.reshape(*cotangent.shape[:2], shape[1], groups, fan_out)
        unfolded = LazyTensor(shape, lambda: geometry.unfold(images).reshape(shape))
        by_shifts = geometry.has_shifts and choose_algorithm("factors", fastest, dict, None) == "shifts"
        moment = functools.partial(geometry.moment, images, by_shifts)
        return Outer(unfolded, cotangent, fold, moment, direct=direct, inner=inner, channels=image_channels)

    scratch = Scratch(
        per_column=weight.numel() + positions * (groups * fan_in + channels),
        without_unfolding=weight.numel() + positions * channels + image_entries,
        inputs_only=3 * image_entries if fastest == "shifts" else groups * positions * fan_in + image_entries,
    )
    return Entry(
        weight,
        "Outer",
        rowwise(build, call.saved("input")),
        admits=lambda axis: axis == 0,
        features=1,
        scratch=scratch,
        fans=Fans(groups, fan_in, fan_out, image_channels, in_order=fold is fold_to(geometry.weight_shape)),
        linear=True,
    )
