"""The place of the samples in a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows:
    """The sample of each row, if samples have different numbers of rows in any order.

    Args:
        sample_of: The sample of each row ``[k]``, on the CPU.
        samples: Number of samples.
    """

    def __init__(self, sample_of: Tensor, samples: int) -> None:
        self.sample_of = sample_of
        self.counts = counts = torch.bincount(sample_of, minlength=samples)
        """The number of rows of each sample ``[n]``, on the CPU."""
        order = torch.argsort(sample_of, stable=True)
        before = counts.cumsum(0) - counts
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device="cpu") - before[sample_of[order]]
        self.most = max(1, int(counts.max()))
        """The largest number of rows of a sample, at least one."""
        self.places = sample_of * self.most + slots
        """The place ``[k]`` of each row, with every sample filled up to ``most`` rows."""
        self.sources = torch.full((samples * self.most,), len(sample_of), device="cpu")
        """The row at each place ``[n * most]``; the number of rows where there is none."""
        self.sources[self.places] = torch.arange(len(sample_of), device="cpu")


class Layout(NamedTuple):
    """The place of the samples in a tensor.

    Args:
        axis: The axis of extent ``samples * parts``; ``None`` if the whole tensor is one sample.
        samples: Number of samples.
        parts: Number of shared positions folded into the same axis.
        major: Whether the sample index varies more slowly than the part index.
        rows: The sample of each row along the axis, if rows are in no order. ``parts`` is then the largest
            number of rows of a sample; zeros fill up samples with fewer rows.
        joined: The extents of the axes from ``axis`` on that the rows run along, one after the other, if there
            are several.
    """

    axis: int | None
    samples: int
    parts: int = 1
    major: bool = True
    rows: Rows | None = None
    joined: tuple[int, ...] = ()

    @property
    def axes(self) -> range:
        """The axes of the samples."""
        return range(0) if self.axis is None else range(self.axis, self.behind)

    @property
    def behind(self) -> int:
        """The first axis after the axes of the samples."""
        return 0 if self.axis is None else self.axis + (len(self.joined) or 1)

    @property
    def folded(self) -> bool:
        """Tell whether positions share the samples' axis, so that they have their own axis in front form."""
        return self.parts > 1 or self.rows is not None

    def to_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Move samples to axis ``skip``: ``[*skipped, n, (parts), *rest]`` without copying if possible."""
        if self.axis is None:
            return tensor.unsqueeze(skip)
        axis = self.axis + skip
        if self.rows is not None:
            tensor = tensor.flatten(axis, self.behind + skip - 1)
            none = tensor.new_zeros(*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :])
            filled = torch.cat([tensor, none], axis)
            filled = filled.index_select(axis, self.rows.sources.to(tensor.device))
            front: Tensor = filled.unflatten(axis, (self.samples, self.parts)).movedim(axis, skip)
            return front
        if self.parts == 1:
            return tensor if axis == skip else tensor.movedim(axis, skip)
        split = (self.samples, self.parts) if self.major else (self.parts, self.samples)
        tensor = torch.unflatten(tensor, axis, split)  # faster than the method, which is written in Python
        axis = axis if self.major else axis + 1
        return tensor if axis == skip else tensor.movedim(axis, skip)

    def front_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape that ``to_front`` gives a tensor of ``shape``."""
        if self.axis is None:
            return torch.Size([1, *shape])
        parts = [self.parts] if self.folded else []
        return torch.Size([self.samples, *shape[: self.axis], *parts, *shape[self.behind :]])

    def entries_of_sample(self, shape: torch.Size) -> int:
        """Count the entries of each sample in a tensor of ``shape``, in front form."""
        return shape.numel() // self.samples if self.rows is None else self.front_shape(shape)[1:].numel()

    def from_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Undo ``to_front``."""
        if self.axis is None:
            return tensor.squeeze(skip)
        axis = self.axis + skip
        if self.rows is not None:
            filled = tensor.movedim(skip, axis).flatten(axis, axis + 1)
            rows = filled.index_select(axis, self.rows.places.to(tensor.device))
            return rows.unflatten(axis, self.joined) if self.joined else rows
        if self.parts == 1:
            return tensor if axis == skip else tensor.movedim(skip, axis)
        return tensor.movedim(skip, axis if self.major else axis + 1).flatten(axis, axis + 1)

    def broadcast(self, values: Tensor, dims: int) -> Tensor:
        """Return values for each sample ``[n]``, shaped to broadcast against a tensor of ``dims`` axes."""
        rows = values[self.sample_of(values.device)]
        if self.axis is None:
            return rows.reshape([1] * dims)
        return rows.reshape(*[1] * self.axis, *(self.joined or (-1,)), *[1] * (dims - self.behind))

    def sample_of(self, device: torch.device) -> Tensor:
        """Return the sample index of each entry along ``axis``."""
        if self.rows is not None:
            return self.rows.sample_of.to(device)
        index = torch.arange(self.samples, device=device)
        if self.parts == 1:
            return index
        return index.repeat_interleave(self.parts) if self.major else index.repeat(self.parts)

    def __str__(self) -> str:
        if self.axis is None:
            return "one sample"
        if self.rows is not None:
            axes = f"axes {self.axis} to {self.behind - 1}" if self.joined else f"axis {self.axis}"
            return f"{axes}: rows of {self.samples} samples"
        parts = "" if self.parts == 1 else f" x {self.parts} parts{'' if self.major else ' (minor)'}"
        return f"axis {self.axis}: {self.samples} samples{parts}"


def as_matrix(rows: Tensor) -> Tensor:
    """Return a view ``[n, p]`` of rows ``[n, *p]``, which may have no axes, or no entries."""
    return rows.unsqueeze(-1).flatten(1)


def layout_of_rows(axis: int, sample_of: Tensor, samples: int, joined: tuple[int, ...] = ()) -> Layout:
    """Return the layout of rows of known samples ``[k]``, along an axis or along ``joined`` axes from it on."""
    rows = Rows(sample_of, samples)
    return Layout(axis, samples, rows.most, rows=rows, joined=joined)


def possible_layouts(shape: torch.Size, samples: int) -> list[Layout]:
    """Return every layout in which a tensor of ``shape`` can hold ``samples`` samples, the usual ones first."""
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
