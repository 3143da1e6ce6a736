"""Convolutions, and transposed ones."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.algebra.algorithms import choose_algorithm
from packprop.algebra.kernels import grouped_gradients, second_moment
from packprop.algebra.order import Fold, fold_swapped, fold_to
from packprop.algebra.patches import as_tuple, patch_moment, patches, shift_moment, transposed_patches
from packprop.algebra.structures import LazyTensor, Outer, Structure
from packprop.functions.building import rowwise, scaled
from packprop.functions.entry import Call, Entry, Fans, Scratch, name_of
from packprop.functions.registry import made_later, register_use

MANY_CHANNELS = 16
"""Channels of a group from which on moments of patches are computed from shifts of the input.

With fewer channels the calls take more time than the products.
"""


@dataclass(frozen=True)
class Geometry(ABC):
    """Which inputs of a convolution each output position sees, and products of these inputs.

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
        """The map from ``[..., g, o, i]`` to the shape of the weight."""

    @abstractmethod
    def unfold(self, images: Tensor) -> Tensor:
        """What each output position sees, ``[b, g*c, *space] -> [b, s, g, i]``."""

    @abstractmethod
    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """Per-sample gradients ``[1, n, *p]`` from one image for each sample, without unfolding."""

    @abstractmethod
    def outputs(self, images: Tensor, weight: Tensor) -> Tensor:
        """What a weight makes of images, ``[b, g*c, *space] -> [b, g*o, *space]``."""

    def inner_products(self, images: Tensor, cotangent: Tensor, direction: Tensor) -> Tensor:
        """Inner products of per-sample gradients with a direction ``[*p]``, without unfolding, ``[n]``."""
        return (self.outputs(images, direction) * cotangent).flatten(1).sum(1)

    @property
    def has_shifts(self) -> bool:
        """Whether products of inputs can be computed from shifts of the images, and with gain."""
        return False

    def moment(self, images: Tensor, by_shifts: bool) -> Tensor:
        """Products of what output positions see, summed over images, positions and groups ``[i, i]``."""
        return second_moment(self.unfold(images).flatten(0, 2))


@dataclass(frozen=True)
class PlainGeometry(Geometry):
    """The geometry of ``conv1d``, ``conv2d`` and ``conv3d``.

    ``padding``: zeros before and after each spatial axis.
    """

    padding: tuple[tuple[int, int], ...]

    def fold(self) -> Fold:
        """The weight is ``[g*o, c, *kernel]``."""
        return fold_to(self.weight_shape)

    def unfold(self, images: Tensor) -> Tensor:
        """Windows of the padded images."""
        return patches(self._pad(images), self.kernel, self.stride, self.dilation, self.groups)

    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """By one grouped convolution, which pads alike on both sides: other images are padded before."""
        symmetric = all(before == after for before, after in self.padding)
        padding = [before if symmetric else 0 for before, _ in self.padding]
        images = images if symmetric else self._pad(images)
        return grouped_gradients(
            images, cotangent, self.weight_shape, self.stride, padding, self.dilation, self.groups
        )

    def outputs(self, images: Tensor, weight: Tensor) -> Tensor:
        """By PyTorch's function, on padded images."""
        convolution: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        outputs: Tensor = convolution(
            self._pad(images), weight, None, self.stride, 0, self.dilation, self.groups
        )
        return outputs

    @property
    def has_shifts(self) -> bool:
        """For kernels of more than one entry and unit stride."""
        return math.prod(self.kernel) > 1 and set(self.stride) == {1}

    def moment(self, images: Tensor, by_shifts: bool) -> Tensor:
        """From shifts of the images, or from patches of the padded ones."""
        if by_shifts:
            return shift_moment(images, self.kernel, self.dilation, self.padding, self.groups)
        return patch_moment(self._pad(images), self.kernel, self.stride, self.dilation, self.groups)

    def _pad(self, images: Tensor) -> Tensor:
        widths = [width for sides in reversed(self.padding) for width in sides]
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
        """The weight is ``[g*c, o, *kernel]``."""
        return fold_swapped(self.weight_shape)

    def unfold(self, images: Tensor) -> Tensor:
        """Windows of the images with zeros between their entries."""
        return transposed_patches(
            images, self.kernel, self.stride, self.padding, self.output_padding, self.dilation, self.groups
        )

    def gradients(self, images: Tensor, cotangent: Tensor) -> Tensor:
        """By the convolution that takes cotangents back to the inputs: the two change places."""
        beyond = [extra // step for extra, step in zip(self.output_padding, self.stride, strict=True)]
        if any(beyond):  # that convolution has more outputs than there are inputs: pad these with zeros
            images = F.pad(images, [width for extra in reversed(beyond) for width in (0, extra)])
        return grouped_gradients(
            cotangent, images, self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        )

    def outputs(self, images: Tensor, weight: Tensor) -> Tensor:
        """By PyTorch's function."""
        transposed: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.kernel) - 1]
        options = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        outputs: Tensor = transposed(images, weight, None, *options)
        return outputs


def _convolution(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> list[Entry] | None:
    """Entries of a convolution with a given geometry."""
    if call.consumes(x):
        return None
    space = weight.dim() - 2
    entry = weight_of_convolution(call, x, x.shape[-space - 1 :], weight, geometry)
    if bias is None:
        return [entry]
    channels = call.shape[-space - 1]
    aligned = (*(1,) * (len(call.shape) - space - 1), channels, *(1,) * space)
    return [entry, scaled(call, bias, aligned=aligned)]


def weight_of_convolution(
    call: Call, x: Tensor | Callable[[], Tensor], image: torch.Size, weight: Any, geometry: Geometry
) -> Entry:
    """The entry of a weight; ``image`` is the shape of one image that it is applied to."""
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
        rowwise(build, name_of(call.function), x),
        admits=lambda axis: axis == 0,
        scratch=scratch,
        fans=Fans(groups, fan_in, fan_out, image_channels),
        linear=True,
    )


@register_use(F.conv1d, F.conv2d, F.conv3d)
@made_later((1, "weight"))
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
    strides, dilations = as_tuple(stride, dims), as_tuple(dilation, dims)
    if padding == "same":
        totals = [step * (extent - 1) for step, extent in zip(dilations, kernel, strict=True)]
        sides = tuple((total // 2, total - total // 2) for total in totals)
    else:
        sides = tuple((width, width) for width in as_tuple(0 if padding == "valid" else padding, dims))
    geometry = PlainGeometry(weight.shape, strides, dilations, groups, sides)
    return _convolution(call, input, weight, bias, geometry)


@register_use(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
@made_later((1, "weight"))
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
    strides, dilations, paddings, output_paddings = (
        as_tuple(option, weight.dim() - 2) for option in (stride, dilation, padding, output_padding)
    )
    geometry = TransposedGeometry(weight.shape, strides, dilations, groups, paddings, output_paddings)
    return _convolution(call, input, weight, bias, geometry)
