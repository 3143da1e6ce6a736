"""Convolutions, and transposed ones."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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
"""Number of channels in a group from which on packprop computes moments of patches from shifts of the input.

With fewer channels the calls take more time than the products.
"""


@dataclass(frozen=True)
class Geometry(ABC):
    """The inputs in the window of each output position of a convolution, and products of these inputs.

    Args:
        weight_shape: Shape of the weight.
        stride: One number for each spatial axis.
        dilation: Step of the kernel, for each spatial axis.
        groups: Groups of channels.
    """

    weight_shape: torch.Size
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        """Extent of the kernel along each spatial axis."""
        return tuple(self.weight_shape[2:])

    @abstractmethod
    def fold(self) -> Fold:
        """Return the map from ``[..., g, o, i]`` to the shape of the weight."""

    @abstractmethod
    def unfold(self, images: Tensor) -> Tensor:
        """Return the window of each output position, ``[b, g*c, *space] -> [b, s, g, i]``."""

    @abstractmethod
    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """Return per-sample gradients ``[1, n, *p]`` from one image for each sample, without unfolding."""

    @abstractmethod
    def outputs(self, images: Tensor, weight: Tensor) -> Tensor:
        """Convolve images with a weight, ``[b, g*c, *space] -> [b, g*o, *space]``."""

    def inner_products(self, images: Tensor, cotangent: Tensor, direction: Tensor) -> Tensor:
        """Return inner products ``[n]`` of per-sample gradients with a direction ``[*p]``; do not unfold."""
        return (self.outputs(images, direction) * cotangent).flatten(1).sum(1)

    @property
    def has_shifts(self) -> bool:
        """Tell whether products of inputs can be computed from shifts of the images, and faster."""
        return False

    def moment(self, images: Tensor, by_shifts: bool) -> Tensor:
        """Return products of windows, summed over images, positions and groups ``[i, i]``."""
        return second_moment(self.unfold(images).flatten(0, 2))


@dataclass(frozen=True)
class PlainGeometry(Geometry):
    """The geometry of ``conv1d``, ``conv2d`` and ``conv3d``.

    ``padding``: zeros on both sides of each spatial axis.
    """

    padding: tuple[int, ...]

    def fold(self) -> Fold:
        """Return the map to a weight ``[g*o, c, *kernel]``."""
        return fold_to(self.weight_shape)

    def unfold(self, images: Tensor) -> Tensor:
        """Return windows of the padded images."""
        return patches(self._pad(images), self.kernel, self.stride, self.dilation, self.groups)

    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """Compute the gradients by one grouped convolution."""
        return grouped_gradients(
            images, cotangent, self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        )

    def outputs(self, images: Tensor, weight: Tensor) -> Tensor:
        """Call PyTorch's function."""
        convolution: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        options = self.stride, self.padding, self.dilation, self.groups
        outputs: Tensor = convolution(images, weight, None, *options)
        return outputs

    @property
    def has_shifts(self) -> bool:
        """True for kernels of more than one entry with unit stride."""
        return math.prod(self.kernel) > 1 and set(self.stride) == {1}

    def moment(self, images: Tensor, by_shifts: bool) -> Tensor:
        """Compute the moment from shifts of the images, or from patches of the padded images."""
        if by_shifts:
            sides = [(width, width) for width in self.padding]
            return shift_moment(images, self.kernel, self.dilation, sides, self.groups)
        return patch_moment(self._pad(images), self.kernel, self.stride, self.dilation, self.groups)

    def _pad(self, images: Tensor) -> Tensor:
        widths = [width for extent in reversed(self.padding) for width in (extent, extent)]
        return F.pad(images, widths) if any(widths) else images


@dataclass(frozen=True)
class TransposedGeometry(Geometry):
    """The geometry of ``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d``.

    Args:
        padding: Output positions cut off on both sides of each spatial axis.
        output_padding: Output positions added at the end of each spatial axis.
    """

    padding: tuple[int, ...]
    output_padding: tuple[int, ...]

    def fold(self) -> Fold:
        """Return the map to a weight ``[g*c, o, *kernel]``."""
        return fold_swapped(self.weight_shape)

    def unfold(self, images: Tensor) -> Tensor:
        """Return windows of the images with zeros between their entries."""
        return transposed_patches(
            images, self.kernel, self.stride, self.padding, self.output_padding, self.dilation, self.groups
        )

    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """Compute the gradients by the convolution from cotangents to inputs, which swaps the two."""
        beyond = [extra // step for extra, step in zip(self.output_padding, self.stride, strict=True)]
        if any(beyond):  # that convolution has more outputs than there are inputs: pad the inputs
            images = F.pad(images, [width for extra in reversed(beyond) for width in (0, extra)])
        return grouped_gradients(
            cotangent, images, self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        )

    def outputs(self, images: Tensor, weight: Tensor) -> Tensor:
        """Call PyTorch's function."""
        transposed: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.kernel) - 1]
        options = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        outputs: Tensor = transposed(images, weight, None, *options)
        return outputs


@rule_of(*CONVOLUTIONS, form="shape")
def _convolution(call: NodeCall) -> Entry | None:
    space = len(call.shape) - 2
    if call.place == 2:
        return scaled(call, aligned=(1, call.shape[1], *(1,) * space))
    if call.place != 1:
        return None
    geometry = _geometry(call, space)
    known = call.shape_at(0)
    return _weight(call, _image(call, geometry) if known is None else known[1:], geometry)


def _geometry(call: NodeCall, space: int) -> PlainGeometry | TransposedGeometry:
    stride, padding, dilation = (_one_each(call, each, space) for each in ("stride", "padding", "dilation"))
    groups, shape = call.option("groups"), call.operand.shape
    if not (call.has_option("transposed") and call.option("transposed")):
        return PlainGeometry(shape, stride, dilation, groups, padding)
    extra = _one_each(call, "output_padding", space)
    return TransposedGeometry(shape, stride, dilation, groups, padding, extra)


def _one_each(call: NodeCall, name: str, count: int) -> tuple[int, ...]:
    """Return an option with one number for each spatial axis."""
    value = call.option(name)
    return tuple(value) if len(value) == count else tuple(value) * count


def _image(call: NodeCall, geometry: PlainGeometry | TransposedGeometry) -> torch.Size:
    """Return the smallest shape of an image with these outputs, for an image without an edge on the graph."""
    numbers = zip(
        call.shape[2:], geometry.kernel, geometry.stride, geometry.dilation, geometry.padding, strict=True
    )
    if isinstance(geometry, PlainGeometry):
        space = [(extent - 1) * s + (k - 1) * d + 1 - 2 * p for extent, k, s, d, p in numbers]
        return torch.Size([geometry.weight_shape[1] * geometry.groups, *space])
    space = [
        (extent - 1 - (k - 1) * d + 2 * p - extra) // s + 1
        for (extent, k, s, d, p), extra in zip(numbers, geometry.output_padding, strict=True)
    ]
    return torch.Size([geometry.weight_shape[0], *space])


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
        by_shifts = geometry.has_shifts and choose_algorithm("factors", fastest, {}, None) == "shifts"
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
        scratch=scratch,
        fans=Fans(groups, fan_in, fan_out, image_channels, in_order=fold is fold_to(geometry.weight_shape)),
        linear=True,
    )
