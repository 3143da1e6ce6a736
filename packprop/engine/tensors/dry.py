"""Tensors without data, dry runs on them, and checks of data, which find no fault in a dry run."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from packprop.engine.tensors.setting import setting
from packprop.engine.tensors.state import storage_of
from packprop.engine.tensors.traced import is_traced, note_fault
from packprop.errors import PackpropError


class _DryRun(NamedTuple):
    """The arguments of ``dry_run``."""

    device: str
    of_batch: Set[int]


_DRY_RUN: ContextVar[_DryRun | None] = ContextVar("packprop_dry_run", default=None)


class TensorSpec(NamedTuple):
    """A tensor without its data."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the description of a tensor.

        Raises:
            PackpropError: For a sparse tensor in compressed form.
        """
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            raise PackpropError(
                "A plan was asked for.",
                f"a tensor of shape {list(tensor.shape)} and layout {tensor.layout}",
                "packprop cannot make such a tensor without its data",
                "give the tensor in COO form (it counts as a dense one), or leave the budget out",
            )
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self, device: torch.device) -> Tensor:
        """Return a tensor that fits the description; its data mean nothing."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)


def dry_run(device: str, of_batch: Set[int] = frozenset()) -> AbstractContextManager[object]:
    """Make a dry run inside: tensors have no data, and count as if on ``device``. Checks of data find no fault.

    Args:
        device: The type of device that the run stands in for.
        of_batch: Storages whose data the batch would determine, by ``storage_key``, while they are alive.
    """
    return setting(_DRY_RUN, _DryRun(device, of_batch))


def dry_run_device() -> str | None:
    """Return the type of device that the dry run stands in for; ``None`` outside of a dry run."""
    run = _DRY_RUN.get()
    return None if run is None else run.device


def storage_key(tensor: Tensor) -> int:
    """Return a number that tells storages apart while they are alive."""
    return id(tensor.untyped_storage())  # the wrapper of a storage lives as long as the storage


def places_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return numbers that tell the memory of some tensors apart: addresses, except in a dry run."""
    return [*map(storage_key if is_dry_run() else storage_of, tensors)]


def is_of_batch(tensor: Tensor) -> bool:
    """Tell whether the batch of a dry run would determine the data of a tensor."""
    run = _DRY_RUN.get()
    return run is not None and storage_key(tensor) in run.of_batch


def is_dry_run() -> bool:
    """Tell whether this is a dry run, in which tensors have no data."""
    return _DRY_RUN.get() is not None


def has_fault(condition: Tensor) -> bool:
    """Tell whether a condition of one entry, which is true for faulty data, holds; never in a dry run.

    It is false in a traced pass as well: the pass notes the condition, and checks it after each replay.
    """
    return not is_dry_run() and not note_fault(condition) and bool(condition)


def chunk_starts(count: int, step: int) -> list[int]:
    """Return the starts of chunks; in a dry run only of the few that stand for all, see ``stands_for_all``."""
    starts = [*range(0, count, step)]
    return [start for start in starts if not is_dry_run() or stands_for_all(start, step, count)]


def stands_for_all(start: int, step: int, count: int) -> bool:
    """Tell whether a dry run runs the chunk that begins here: the first, the last, and one between the two.

    The first chunk differs because there are no results yet. The last one may be smaller than the second.
    """
    last = (count - 1) // step * step
    return start in (0, last) or (start == step and count % step != 0)


def extremes(tensor: Tensor) -> list[Tensor]:
    """Return the smallest and largest entry of a tensor, which show NaN and infinity; if traced, its sum."""
    if not tensor.numel():
        return []
    values = tensor.detach() if tensor.requires_grad else tensor
    if is_traced() and values.dtype in (torch.float32, torch.float64):  # one operation in place of three
        return [values.sum()]
    return [*(torch.view_as_real(values) if values.is_complex() else values).aminmax()]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all entries of some tensors on one axis."""
    if any(tensor.dim() for tensor in tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.stack([*tensors])


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all of some real tensors are finite; waits for each device once.

    It is true in a dry run, and in a traced pass, which notes a condition to check after each replay.
    """
    if is_dry_run():
        return True
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    if is_traced():
        for same in by_device.values():
            entries = joined(same)
            note_fault((entries - entries).any())  # the difference is NaN, which counts as true
        return True
    found: list[float] = []
    for same in by_device.values():
        entries = joined(same)
        found += (entries if entries.numel() <= 64 else torch.stack(entries.aminmax())).tolist()
    return all(map(math.isfinite, found))


def are_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether all entries of some tensors are finite; waits for each device once."""
    return all_finite([each for tensor in tensors if tensor is not None for each in extremes(tensor)])
