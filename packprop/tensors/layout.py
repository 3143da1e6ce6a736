"""Where the samples of a tensor are."""

from __future__ import annotations

import functools
from collections import Counter
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
        rows: The sample of each entry of the axis, where these follow no rule, as in packed sequences. Samples
            have as many parts as the one that has most; what others lack is zero.
    """

    axis: int | None
    samples: int
    parts: int = 1
    major: bool = True
    rows: tuple[int, ...] | None = None

    @classmethod
    def scattered(cls, axis: int, samples: int, rows: tuple[int, ...]) -> Layout:
        """The layout of an axis whose entries belong to these samples."""
        return cls(axis, samples, max(Counter(rows).values(), default=1), True, rows)

    def to_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Move samples to axis ``skip``: ``[*skipped, n, (parts), *rest]`` without copying if possible."""
        if self.axis is None:
            return tensor.unsqueeze(skip)
        axis = self.axis + skip
        if self.rows is not None:
            tensor = _gathered(tensor, axis, _places(self.rows, self.samples, self.parts))
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
            whole = tensor if axis == skip else tensor.movedim(skip, axis)
        else:
            whole = tensor.movedim(skip, axis if self.major else axis + 1).flatten(axis, axis + 1)
        if self.rows is None:
            return whole
        places = _places(self.rows, self.samples, self.parts)
        back = sorted((row, place) for place, row in enumerate(places) if row >= 0)
        return whole.index_select(axis, torch.tensor([place for _, place in back], device=whole.device))

    def sample_of(self, device: torch.device) -> Tensor:
        """The sample index of each entry along ``axis``."""
        if self.rows is not None:
            return torch.tensor(self.rows, device=device)
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
        if self.rows is not None:
            return f"axis {self.axis}: rows of {self.samples} samples"
        parts = "" if self.parts == 1 else f" x {self.parts} parts{'' if self.major else ' (minor)'}"
        return f"axis {self.axis}: {self.samples} samples{parts}"


@functools.lru_cache(maxsize=256)
def _places(rows: tuple[int, ...], samples: int, parts: int) -> tuple[int, ...]:
    """The entry of the axis that is each part of each sample, in order; -1 for parts that a sample lacks."""
    own: list[list[int]] = [[] for _ in range(samples)]
    for row, sample in enumerate(rows):
        own[sample].append(row)
    return tuple(row for places in own for row in [*places, *[-1] * (parts - len(places))])


def _gathered(tensor: Tensor, axis: int, places: tuple[int, ...]) -> Tensor:
    """Entries of an axis in the order of ``places``, zeros for -1."""
    index = torch.tensor(places, device=tensor.device)
    gathered = tensor.index_select(axis, index.clamp(min=0))
    if min(places) >= 0:
        return gathered
    lacking = (index < 0).view([-1 if place == axis else 1 for place in range(tensor.dim())])
    return gathered.masked_fill(lacking, 0)


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
