"""Where the samples of a tensor are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where the samples of a tensor are.

    Args:
        axis: The axis of extent ``samples * parts``; ``None`` where the whole tensor is one sample.
        samples: Number of samples.
        parts: Number of shared positions folded into the same axis.
        major: Whether the sample index varies slower than the part index.
    """

    axis: int | None
    samples: int
    parts: int = 1
    major: bool = True

    def to_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Move samples to axis ``skip``: ``[*skipped, n, (parts), *rest]`` without copying if possible."""
        if self.axis is None:
            return tensor.unsqueeze(skip)
        axis = self.axis + skip
        if self.parts == 1:
            return tensor if axis == skip else tensor.movedim(axis, skip)
        split = (self.samples, self.parts) if self.major else (self.parts, self.samples)
        tensor = tensor.unflatten(axis, split)
        return tensor.movedim(axis if self.major else axis + 1, skip)

    def front_shape(self, shape: torch.Size) -> torch.Size:
        """The shape of what ``to_front`` returns for a tensor of ``shape``."""
        if self.axis is None:
            return torch.Size([1, *shape])
        parts = [] if self.parts == 1 else [self.parts]
        return torch.Size([self.samples, *shape[: self.axis], *parts, *shape[self.axis + 1 :]])

    def from_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """The inverse of ``to_front``."""
        if self.axis is None:
            return tensor.squeeze(skip)
        axis = self.axis + skip
        if self.parts == 1:
            return tensor if axis == skip else tensor.movedim(skip, axis)
        return tensor.movedim(skip, axis if self.major else axis + 1).flatten(axis, axis + 1)

    def sample_of(self, device: torch.device) -> Tensor:
        """The sample index of each entry along ``axis``."""
        index = torch.arange(self.samples, device=device)
        if self.parts == 1:
            return index
        return index.repeat_interleave(self.parts) if self.major else index.repeat(self.parts)

    def transposed(self, dims: int) -> Layout:
        """The layout of the same tensor of ``dims`` axes with its last two axes exchanged."""
        if self.axis is None or self.axis < dims - 2:
            return self
        return self._replace(axis=2 * dims - 3 - self.axis)

    def __str__(self) -> str:
        if self.axis is None:
            return "one sample"
        parts = "" if self.parts == 1 else f" x {self.parts} parts{'' if self.major else ' (minor)'}"
        return f"axis {self.axis}: {self.samples} samples{parts}"


def possible_layouts(shape: torch.Size, samples: int) -> list[Layout]:
    """Every way in which a tensor of ``shape`` can hold ``samples`` samples, the usual ones first."""
    if samples == 1:
        return [Layout(None, 1)]
    exact = [Layout(axis, samples) for axis, size in enumerate(shape) if size == samples]
    folded = [
        Layout(axis, samples, size // samples, major)
        for major in (True, False)
        for axis, size in enumerate(shape)
        if size > samples and size % samples == 0
    ]
    layouts = exact + folded
    if shape and shape[0] % samples == 0:  # the leading axis first, folded or not
        layouts.sort(key=lambda layout: layout.axis != 0)
    return layouts
