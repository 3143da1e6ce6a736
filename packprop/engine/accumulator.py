"""Results of leaves: statistics are taken chunk by chunk over samples, merged, handed over when complete."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.one_by_one import evaluate_together
from packprop.algebra.order import fold_to
from packprop.algebra.partial import ONE, Extent, Partial
from packprop.algebra.statistics import per_sample_grad, summed_grad
from packprop.algebra.structures import Dense, Outer, Quadratic
from packprop.engine.chunks import ChunkSizes, start_after
from packprop.engine.contributions import Build, Contribution, joint_structure, unreached
from packprop.engine.finite import FiniteCheck
from packprop.errors import PackpropWarning
from packprop.functions.entry import Samples
from packprop.graph.graph import Graph, ReachedUse
from packprop.tensors.nesting import tensors_in
from packprop.types import GRADIENT, INPUTS, Extension, Row, Seed

Done = Callable[[Tensor, dict[Extension, list[Any]]], None]
"""Called with a leaf when all of its results are there."""


Log = Callable[[Tensor, Sequence[ReachedUse], Quadratic, int], None]
"""Called with what is taken of a leaf: the leaf, its uses, the structure, samples in a chunk."""


Begin = Callable[[], dict[tuple[Extension, int], Tensor]]
"""Called before the first value is kept; returns what results may be written over, by extension and leaf."""


@dataclass(frozen=True)
class Task:
    """One row of one extension."""

    extension: Extension
    index: int
    row: Row


class _Summed(Extension):
    """The gradient itself, from per-sample ones."""

    rows = (Row(GRADIENT, summed_grad),)


_SUMMED = _Summed()


SUMMED = Task(_SUMMED, 0, _SUMMED.rows[0])
"""Asked of leaves whose gradient autograd shall not compute; not handed over, but kept for ``gradients``."""


class Accumulator:
    """What is there of the results of one pass.

    Args:
        graph: What the pass goes through, with its samples located.
        extensions: What was asked for.
        create_graph: Whether results shall be differentiable.
        chunks: How much is taken at once.
        done: Called with each leaf that is finished.
        log: Called with each chunk.
        begin: Called before the first value is kept.
    """

    def __init__(
        self,
        graph: Graph,
        extensions: Sequence[Extension],
        create_graph: bool,
        chunk_sizes: ChunkSizes,
        done: Done,
        log: Log | None,
        begin: Begin,
    ) -> None:
        self.finite_check = FiniteCheck()
        self._graph, self._extensions, self._create_graph = graph, extensions, create_graph
        self._chunk_sizes, self._done, self._log, self._begin = chunk_sizes, done, log, begin
        self._spare: dict[tuple[Extension, int], Tensor] | None = None
        self._partial: dict[tuple[int, int, int], Partial] = {}
        self._first: dict[tuple[int, int], list[Any]] = {}
        self._most: dict[int, int] = {}
        self._gradients: dict[int, Tensor] = {}

    def take(
        self,
        leaf: Tensor,
        parts: list[Contribution],
        tasks: Sequence[Task],
        columns: Extent,
        build: Build = joint_structure,
    ) -> None:
        """Take the statistics of one leaf, and merge them into its partial results.

        ``build`` makes what they are taken of, by default the structure of all uses together.
        """
        first = [task for task in tasks if task.row.after is None]
        second = [task for task in tasks if task.row.after is not None]
        for chosen, group in [*by_subsampling(first), *by_subsampling(second)]:
            if group[0].row.after is not None:
                self._begin_second(leaf, group)
            self._chunk_by_chunk(leaf, parts, group, chosen, columns, build)

    def _chunk_by_chunk(
        self,
        leaf: Tensor,
        parts: list[Contribution],
        group: list[Task],
        chosen: list[int] | None,
        columns: Extent,
        build: Build,
    ) -> None:
        samples = self._graph.samples
        count = samples if chosen is None else len(chosen)
        whole = any(task.row.whole for task in group)
        step = count
        if not whole:
            asked = [task.row.statistic for task in group]
            step = self._chunk_sizes.samples_at_once(
                leaf, parts, asked, build is joint_structure, samples, self._create_graph
            )
            step = min(step, self._most.get(id(leaf), count))
        start = 0
        while start < count:
            stop = min(count, start + step)
            extent = Extent(start, stop, count)
            chunk: Samples
            if chosen is None:
                chunk = slice(None) if step >= count else slice(start, stop)
            else:
                chunk = torch.tensor(chosen[start:stop]) % samples
            structure: Quadratic | None = None
            try:
                structure = build(parts, chunk, self._chunk_sizes.held)
                if isinstance(structure, Outer):
                    structure = self._in_place(leaf, structure, group, columns, extent)
                values = self._values(leaf, structure, group)
            except torch.OutOfMemoryError:
                if whole or stop - start == 1:
                    raise
                step = self._most[id(leaf)] = (stop - start) // 2
                self._warn_of_halving(leaf, step)
                continue
            for task, value in zip(group, values, strict=True):
                self._partial_of(leaf, task).put(value, columns, extent)
            if self._log is not None:
                self._log(leaf, [f for f, _, _ in parts], structure, step)
            del structure, values
            start = start_after(start, step, count)

    def _begin_second(self, leaf: Tensor, tasks: list[Task]) -> None:
        """What is made of the first pass, once; no smaller chunk of samples would take less memory for it."""
        for task in tasks:
            after, key = task.row.after, (id(task.extension), id(leaf))
            if after is not None and key not in self._first:
                self._first[key] = after(self._taken_out(leaf, task.extension, range(task.index)))

    def _taken_out(self, leaf: Tensor, extension: Extension, rows: Sequence[int]) -> list[Any]:
        """Results of some rows, which are not kept any longer; ``None`` for those that nothing was taken of."""
        found = [self._partial.pop((id(extension), index, id(leaf)), None) for index in rows]
        return [None if partial is None else partial.result() for partial in found]

    def _values(self, leaf: Tensor, structure: Quadratic, tasks: list[Task]) -> list[Any]:
        """What is asked of a chunk; rows of a second pass are given what was made of the first."""
        if tasks[0].row.after is None:
            return evaluate_together(structure, [task.row.statistic for task in tasks])
        return [task.row.statistic(structure, self._first[id(task.extension), id(leaf)]) for task in tasks]

    def _in_place(
        self, leaf: Tensor, structure: Outer, tasks: list[Task], columns: Extent, samples: Extent
    ) -> Outer:
        """The same, with per-sample gradients written to where they are kept, if they are asked for."""
        kept = [task for task in tasks if task.row.statistic is per_sample_grad]
        cotangent = structure.cotangent
        if not kept or cotangent is None or structure.fold is not fold_to(leaf.shape):
            return structure
        if columns.stop - columns.start != 1 or leaf.dtype != cotangent.dtype:
            return structure
        room = self._partial_of(leaf, kept[0]).out(cotangent.new_empty(()), leaf.shape, columns, samples)
        return structure if room is None else replace(structure, out=room)

    def _warn_of_halving(self, leaf: Tensor, step: int) -> None:
        warnings.warn(
            f"The device ran out of memory at parameter {self._graph.name(leaf)!r}; what is finished is kept, "
            f"and the work goes on with {step} samples at a time.",
            PackpropWarning,
            stacklevel=2,
        )

    def merge(self, leaf: Tensor, task: Task, value: Any) -> None:
        """Merge a value of all samples into what is there."""
        self._partial_of(leaf, task).put(value, ONE, ONE)

    def _partial_of(self, leaf: Tensor, task: Task) -> Partial:
        if self._spare is None:
            self._spare = self._begin()
        key = (id(task.extension), task.index, id(leaf))
        if key not in self._partial:
            spare = self._spare.pop((task.extension, id(leaf)), None)
            self._partial[key] = Partial(task.row.over_v, task.row.over_n, spare)
        return self._partial[key]

    def add_zeros(self, leaf: Tensor, columns: Extent, tasks: Sequence[Task]) -> None:
        """A leaf that a sweep has not reached: its gradients are zero."""
        adding = [task for task in tasks if not task.row.over_v.grows]
        missing = [t for t in adding if (id(t.extension), t.index, id(leaf)) not in self._partial]
        if missing:  # a factor's shape is that of the structure, so zeros must meet the uses
            sites = [(found, site) for found in self._graph.uses for site in found.sites if site.leaf is leaf]
            self.take(leaf, [unreached(found, site, leaf) for found, site in sites], missing, columns)
        for task in tasks:
            if not task.row.over_v.grows:
                continue
            chosen = task.extension.subsampling
            count = self._graph.samples if chosen is None else len(chosen)
            zeros = Dense(leaf.new_zeros(columns.stop - columns.start, count, *leaf.shape))
            self._partial_of(leaf, task).put(task.row.statistic(zeros), columns, Extent(0, count, count))

    def finish(self, leaf: Tensor) -> None:
        """Hand over the results of a leaf, which are complete."""
        results: dict[Extension, list[Any]] = {}
        for extension in (*self._extensions, SUMMED.extension):
            first = self._first.pop((id(extension), id(leaf)), [])
            rest = range(len(first), len(extension.rows))
            if any((id(extension), index, id(leaf)) in self._partial for index in rest):
                results[extension] = first + self._taken_out(leaf, extension, rest)
        if SUMMED.extension in results:
            self._gradients[id(leaf)] = results.pop(SUMMED.extension)[0].to(leaf.dtype)
        # NaN in a cotangent is NaN in the sums that it enters; without sums the cotangents were noted
        smallest: dict[Seed, Tensor] = {}
        for extension, values in results.items():
            for row, value in zip(extension.rows, values, strict=True):
                if not row.sums or row.seed == INPUTS:
                    continue
                for tensor in tensors_in(value):
                    if tensor.numel() <= smallest.get(row.seed, tensor).numel():
                        smallest[row.seed] = tensor
        if id(leaf) in self._gradients:
            smallest.setdefault(GRADIENT, self._gradients[id(leaf)])
        self.finite_check.note(leaf, smallest.values())
        self._done(leaf, results)

    def gradients(self, leaves: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Leaves with their summed gradients, where ``SUMMED`` has made one; it is not kept any longer."""
        return [(leaf, self._gradients.pop(id(leaf))) for leaf in leaves if id(leaf) in self._gradients]

    def tensors(self) -> Iterator[Tensor]:
        """Tensors of results that are not handed over yet."""
        for partial in self._partial.values():
            yield from partial.tensors()
        yield from tensors_in([*self._first.values()])
        yield from self._gradients.values()


def by_subsampling(tasks: Sequence[Task]) -> list[tuple[list[int] | None, list[Task]]]:
    """Tasks by the samples that they are about; ``None`` for all of them."""
    groups: dict[tuple[int, ...] | None, list[Task]] = {}
    for task in tasks:
        chosen = task.extension.subsampling
        groups.setdefault(None if chosen is None else tuple(chosen), []).append(task)
    return [(None if key is None else list(key), group) for key, group in groups.items()]
