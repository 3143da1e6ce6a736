"""How much is taken at once, of samples and of columns, and where one chunk ends and the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from packprop.algebra.choices import convolved_by_groups
from packprop.algebra.formation import OF_ROWS, forms_no_rows
from packprop.algebra.one_by_one import goes_one_by_one
from packprop.algebra.statistics import Statistic, per_sample_grad
from packprop.engine.contributions import Contribution, extents_of
from packprop.graph.graph import ReachedUse
from packprop.tensors.device import free_bytes
from packprop.tensors.dry import is_dry_run

SCRATCH = 8 * 2**20


COTANGENTS = 32 * 2**20


LARGER = 32
"""How much more an accelerator takes at once."""


SHARE = 8
"""Columns with weights, of which there are many, gain nothing by more than this part of ``COTANGENTS``."""


class ChunkSizes(NamedTuple):
    """How much may be taken at once.

    Args:
        scratch: Bytes of temporary memory for a chunk of samples; a chunk is never less than one sample.
        cotangents: Bytes of cotangents that a vectorised sweep may hold. If two columns take more, columns are
            swept one at a time.
        held: Bytes of one sample that an algorithm may hold where another holds less; with more than that
            the latter is taken, use by use. ``None``: the fastest, whatever they hold.
        parameters: Of how many parameters results that wait for several columns are formed at once, at the
            price of sweeping all columns for each of these groups; ``None`` for all.
    """

    scratch: int
    cotangents: int
    held: int | None = None
    parameters: int | None = None

    def columns_at_once(self, count: int, found: Sequence[ReachedUse], weighted: bool) -> int:
        """As many as fit, in chunks of about one size: for small cotangents the calls take the time."""
        entries = sum(shape.numel() for f in found for shape in f.recorded.shapes)
        room = self.cotangents
        if weighted:
            room = min(room, max(room, COTANGENTS) // SHARE)
        fitting = max(1, room // (8 * max(entries, 1)))
        return -(-count // -(-count // fitting))

    def samples_at_once(
        self,
        leaf: Tensor,
        parts: Sequence[Contribution],
        statistics: Sequence[Statistic],
        plain: bool,
        samples: int,
        create_graph: bool,
    ) -> int:
        """How many of all ``samples`` fit into the scratch memory.

        ``plain`` where statistics are taken of what the uses are joined to, and of nothing else.
        """
        groups = max((site.entry.fans.groups if site.entry.fans else 1) for _, site, _ in parts)
        thin = all(forms_no_rows(statistic, groups, leaf) for statistic in statistics)
        formed = plain and all(statistic in OF_ROWS for statistic in statistics)
        entries, room = 0, self.scratch
        for found, site, cotangents in parts:
            columns = next((cotangent.shape[0] for cotangent in cotangents if cotangent is not None), 0)
            own = sum(shape.numel() for shape in found.recorded.shapes) // samples
            fans = site.entry.fans
            extents = extents_of(found, site, samples, self.held)
            if extents is not None and own % (extents.groups * extents.fan_out):
                extents = None
            scratch = site.entry.scratch.per_column
            if formed and columns == 1 and fans is not None and extents is not None:
                if len(parts) == 1 and not create_graph and goes_one_by_one(statistics, extents):
                    entries += extents._replace(unfolds=fans.unfolds).unfolded  # of all images of a sample
                    entries += leaf.numel() if per_sample_grad in statistics else 0
                    continue
                if convolved_by_groups(extents):
                    scratch = site.entry.scratch.without_unfolding
            each = max(scratch, leaf.numel(), own)
            if not columns:  # what comes of inputs alone is a matrix that each chunk is added to
                entries += site.entry.scratch.inputs_only or each
                room = max(room, (fans.fan_in if fans else 0) ** 2 * leaf.element_size())
            elif thin and extents is not None and extents.positions == 1:
                entries += extents.groups * (extents.fan_in + 2 * extents.fan_out * columns)
            else:
                entries += each * columns
        if not entries:
            return samples
        return max(1, min(samples, room // (entries * leaf.element_size())))


def default_chunk_sizes(device: torch.device | None = None) -> ChunkSizes:
    """What is taken at once where there is no budget.

    On a processor what stays in caches; on an accelerator, which is slowed down by small pieces, more, but
    no more than a small share of what is free there.
    """
    if device is None or device.type in ("cpu", "meta"):
        return ChunkSizes(SCRATCH, COTANGENTS)
    free = free_bytes(device)
    if free is None:
        return ChunkSizes(LARGER * SCRATCH, LARGER * COTANGENTS)
    return ChunkSizes(min(LARGER * SCRATCH, free // 32), min(LARGER * COTANGENTS, free // 8))


def starts(count: int, step: int) -> list[int]:
    """Where chunks begin; without data, those that the others are like: two, and the last."""
    found = [*range(0, count, step)]
    return [*found[:2], found[-1]] if is_dry_run() and len(found) > 3 else found


def start_after(start: int, step: int, count: int) -> int:
    """Where the next chunk begins, as in ``starts``: for chunks that may become smaller on the way."""
    following = start + step
    if is_dry_run() and start > 0 and following < count:
        return max(following, (count - 1) // step * step)
    return following
