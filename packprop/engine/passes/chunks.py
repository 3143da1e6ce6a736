"""Sizes of the chunks of samples and columns that a pass takes at once, and the starts of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from packprop.engine.graph.graph import ReachedUse
from packprop.engine.passes.sample_memory import SampleMemory, column_count
from packprop.engine.tensors.device import free_bytes
from packprop.engine.tensors.dry import is_dry_run, stands_for_all
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.traced import is_traced

SCRATCH = 8 * 2**20
"""Bytes of temporary memory for a chunk of samples on a CPU: about the size of its caches."""


COTANGENTS = 32 * 2**20
"""Bytes of cotangents that a vectorised sweep may hold on a CPU."""


LARGER = 32
"""The factor by which cotangents on an accelerator may be larger than on a CPU."""


ROOM = 2**30
"""Bytes of temporary memory for a chunk of samples on an accelerator, if it has plenty."""


SHARE = 8
"""Weighted columns get one part in ``SHARE`` of the memory: there are many, and more does not speed them up."""


class ChunkSizes(NamedTuple):
    """Limits on the work that a pass takes at once.

    Args:
        scratch: Bytes of temporary memory for a chunk of samples; a chunk is never less than one sample.
        cotangents: Bytes of cotangents that a vectorised sweep may hold. If two columns take more, packprop
            sweeps columns one at a time.
        held: Bytes that an algorithm may hold for one sample. If the fastest algorithm of a use would hold
            more, packprop takes one that holds less. ``None`` for the fastest algorithm in any case.
        parameters: Number of parameters whose results are formed at once, if results have to wait for several
            sweeps; packprop sweeps all columns again for each group of them. ``None`` for all parameters.
    """

    scratch: int
    cotangents: int
    held: int | None = None
    parameters: int | None = None

    def columns_at_once(self, count: int, uses: Sequence[ReachedUse], weighted: bool) -> int:
        """Return how many columns fit, in chunks of about equal size.

        Many columns at once are faster because, for small cotangents, the number of calls determines the time.
        """
        entries = sum([shape.numel() for use in uses for shape in use.shapes])
        room = self.cotangents
        if weighted:
            room = min(room, max(room, COTANGENTS) // SHARE)
        fitting = max(1, room // (8 * max(entries, 1)))
        return -(-count // -(-count // fitting))

    def samples_at_once(self, memory: SampleMemory, samples: int) -> int:
        """Return how many of all ``samples`` fit into the scratch memory."""
        room, size = self.scratch, accumulation_dtype(memory.leaf.dtype).itemsize
        for _, site, cotangents in memory.contributions:
            if not column_count(cotangents):  # each chunk is added to a matrix, which takes this memory anyway
                fan_in = site.entry.fans.fan_in if site.entry.fans else 0
                room = max(room, fan_in**2 * size)
        entries = memory.entries(samples, self.held)
        if not entries or entries * samples <= memory.matrix_entries():
            return samples  # a second chunk would need another matrix as large, and one for the sum
        fitting = max(1, min(samples, room // (entries * size)))
        if samples > 2 * fitting:  # rows of all samples would not stay in the caches until they are summed
            return fitting
        at_once = memory.entries(samples, self.held, whole=True) * samples * size
        return samples if at_once <= room else fitting


def default_chunk_sizes(device: torch.device | None = None) -> ChunkSizes:
    """Return the sizes for a pass without a budget.

    On a CPU, chunks are as large as its caches. Small chunks slow an accelerator down, so chunks are larger
    there, but they take no more than a small share of its free memory.
    """
    if device is None or device.type in ("cpu", "meta"):
        # each sweep of a traced pass adds its operations to the traced graph once more
        return ChunkSizes(SCRATCH, SHARE * COTANGENTS if is_traced() else COTANGENTS)
    free = free_bytes(device)
    if free is None:
        return ChunkSizes(LARGER * SCRATCH, LARGER * COTANGENTS)
    plenty = 1 << max(0, free.bit_length() - 1)  # a power of two, so that it is the same in each pass
    return ChunkSizes(min(ROOM, plenty // 32), min(LARGER * COTANGENTS, plenty // 8))


def start_after(start: int, step: int, count: int) -> int:
    """Return the start of the next chunk, as in ``chunk_starts``, for chunks that may become smaller."""
    following = start + step
    if following < count and is_dry_run() and not stands_for_all(following, step, count):
        return max(following, (count - 1) // step * step)
    return following
