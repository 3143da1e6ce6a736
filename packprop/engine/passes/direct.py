"""Statistics that are each taken at their use, and saved as soon as a parameter has all of them.

# NOTE [Direct passes]
Where a kept walk serves a pass, each parameter has one use, and an earlier pass took its statistics of all
samples and all columns in one chunk, there is nothing to collect, to split or to merge: the value of the one
chunk is the result. So such a pass goes without the collector and the accumulator, which take a large part of
the time of a pass through a small model.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import ONE, Extent, Partial, whole
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.algebra.statistics import per_sample_grad, summed_grad
from packprop.engine.algebra.structures import Dense, Outer, Statistical
from packprop.engine.curvature.columns import Columns
from packprop.engine.functions.entry import ArrivedCotangents
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.site import Site
from packprop.engine.graph.sweep import SweepOptions, Watch, sweep
from packprop.engine.passes.accumulator import Accumulator, for_grad, written_in_place
from packprop.engine.passes.autocast import AutocastRegions
from packprop.engine.passes.backward_pass import made_columns, share_exact_columns
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.contributions import unreached
from packprop.engine.passes.finite import FiniteCheck
from packprop.engine.passes.gradient import Backward, hand_over, summed_leaves
from packprop.engine.passes.request import Request, Task, require_possible, tasks_by_seed
from packprop.engine.passes.saving import ResultSaver
from packprop.engine.tensors.nesting import tensors_in
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.errors import OfParameter
from packprop.types import GRADIENT, INPUTS, Extension, Row, Seed

ALL = slice(None)

SWEPT = ("gradient", "ggn", "empirical", "none")
"""Kinds of seeds whose statistics a direct pass takes."""


@dataclass
class Notes:
    """The notes of a pass for later ones with equal statistics, which are kept if it succeeds.

    Args:
        asked: Its rows, and its sizes of chunks.
        samples: The number of samples.
        is_direct: Whether later passes can be direct.
        summed: Leaves whose gradient packprop sums itself; see NOTE [One product for two].
        others: All other leaves.
    """

    asked: tuple[list[Row], ChunkSizes]
    samples: int
    is_direct: bool
    summed: list[Tensor]
    others: list[Tensor]

    def log(self, leaf: Tensor, uses: Sequence[ReachedUse], structure: Statistical, step: int) -> None:
        """Note the size of a chunk of samples."""
        self.is_direct &= step >= self.samples


class _Work(NamedTuple):
    """The statistics that one sweep takes of each leaf.

    Args:
        tasks: The tasks that they belong to.
        statistics: The statistics of these.
        kept: The task that keeps per-sample gradients of one column, if there is one.
        condensed: The places of tasks in whose results NaN in a cotangent shows, because they are smaller.
    """

    tasks: list[Task]
    statistics: list[Any]
    kept: Task | None
    condensed: list[int]

    @classmethod
    def of(cls, tasks: list[Task]) -> _Work:
        """Make the record for some tasks."""
        kept = next((task for task in tasks if task.row.statistic is per_sample_grad), None)
        condensed = [
            place
            for place, task in enumerate(tasks)
            if (task.row.sums or task.row.condenses) and task.row.seed != INPUTS
        ]
        return cls(tasks, [task.row.statistic for task in tasks], kept, condensed)


class DirectPass:
    """A pass that takes statistics directly; see NOTE [Direct passes].

    Args:
        request: The request of the pass, through a graph that a kept walk has found.
        saver: Saves the values.
        reuses: Whether values may take the memory of those that they replace.
    """

    def __init__(self, request: Request, saver: ResultSaver, reuses: bool) -> None:
        self._request, self._saver, self._reuses = request, saver, reuses
        self._tasks = tasks_by_seed(request.extensions)
        rows = [task.row for tasks in self._tasks.values() for task in tasks]
        self._asked = rows, request.chunk_sizes
        self._notes = next((notes for notes in request.graph.notes if notes.asked == self._asked), None)
        self._is_simple = all(
            row.seed.kind in SWEPT and row.after is None and not row.of_parameter for row in rows
        ) and not any(extension.subsampling for extension in request.extensions)
        if INPUTS in self._tasks:  # they are taken along with columns
            self._is_simple &= not self._tasks.keys() <= {INPUTS, GRADIENT}
        self._has_rows = any(row.statistic is per_sample_grad for row in rows)
        self._finite = FiniteCheck()
        self._gradients: dict[int, Tensor] = {}
        self._values: dict[int, dict[Extension, dict[int, Any]]] = {}
        self._spare: dict[tuple[Extension, int], Tensor] | None = None

    @property
    def is_possible(self) -> bool:
        """Tell whether this pass can be direct, as far as an earlier one of this structure has shown."""
        return self._notes is not None and self._notes.is_direct and self._is_simple

    @property
    def is_of_gradients(self) -> bool:
        """Tell whether all values are statistics of the gradient, so that the user's pass is the only sweep."""
        return list(self._tasks) == [GRADIENT]

    def notes(self) -> Notes | None:
        """Return the notes of an ordinary pass; ``None`` if it need not take any."""
        if self._notes is not None or not self._is_simple:
            return None
        graph = self._request.graph
        is_direct = not any(use.waits or len(use.nodes) > 1 for use in graph.uses)
        statistics = [task.row.statistic for task in self._tasks.get(GRADIENT, ())]
        leaves = summed_leaves(self._request, statistics) if statistics else ([], [])
        return Notes(self._asked, graph.samples, is_direct, *leaves)

    def run(self, backward: Backward) -> bool:
        """Sweep the columns, run the user's own pass, and take the statistics along with both.

        Return ``False``, before any work but that of making columns, which the request takes over, if the
        columns of a seed do not fit into one sweep.
        """
        graph, notes = self._request.graph, self._notes
        assert notes is not None
        tasks = {seed: list(own) for seed, own in self._tasks.items()}
        share_exact_columns(tasks)
        inputs, gradient = tasks.pop(INPUTS, []), tasks.pop(GRADIENT, [])
        autocast = AutocastRegions.now({leaf.device.type for leaf in graph.leaves()})
        if tasks:
            with torch.no_grad(), autocast.switched(False), graph.hooks.quiet():
                if not self._sweep_columns(tasks, inputs, bool(gradient)):
                    notes.is_direct = False
                    return False
        if gradient:
            self._watch(gradient, autocast, backward)
        else:
            backward(None)
        self._finite.warn(graph)
        return True

    def _sweep_columns(self, tasks: dict[Seed, list[Task]], inputs: list[Task], waits: bool) -> bool:
        """Sweep all columns; ``waits``: the values of leaves are not complete afterwards."""
        request = self._request
        graph = request.graph
        require_possible(request, self._tasks)
        roots = made_columns(request, tasks)
        sizes = request.chunk_sizes
        for groups in roots.values():
            (group, *more) = groups
            if more or sizes.columns_at_once(group.count, graph.uses, group.weights is not None) < group.count:
                request.drawn.update(roots)
                return False
        if inputs:
            for use in graph.uses:
                self._visit(use, ArrivedCotangents([None] * len(use.shapes)), _Work.of(inputs), ONE, False)
        for number, (seed, (group,)) in enumerate(roots.items(), 1):
            self._sweep(group, _Work.of(tasks[seed]), ends=number == len(roots) and not waits)
        return True

    def _sweep(self, group: Columns, work: _Work, ends: bool) -> None:
        """Sweep the columns of one group to all uses."""
        graph, extent = self._request.graph, Extent(0, group.count, group.count)
        left = {id(site.leaf): (use, site) for use in graph.uses for site in use.sites}

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            for site in use.sites:
                del left[id(site.leaf)]
            self._visit(use, cotangents, work, extent, ends)

        seeds = group.chunk(0, group.count)
        batched = group.count > 1
        given = seeds if batched else [seed[0] for seed in seeds]
        sweep(group.edges, given, graph.uses, visit, SweepOptions(batched=batched))
        for use, site in list(left.values()):
            if id(site.leaf) in left:
                visit(use, unreached(use, site, site.leaf, group.count)[2])

    def _watch(self, tasks: list[Task], autocast: AutocastRegions, backward: Backward) -> None:
        """Run the user's own pass, and take statistics of the gradient along with it."""
        graph, notes = self._request.graph, self._notes
        assert notes is not None
        summed, work = set(map(id, notes.summed)), _Work.of(tasks)
        left = {id(site.leaf): (use, site) for use in graph.uses for site in use.sites}

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            for site in use.sites:
                del left[id(site.leaf)]
            with autocast.switched(False):
                self._visit(use, cotangents, work, ONE, True, summed)

        watch = Watch(graph.uses, visit, graph.hooks)
        complete = False
        try:
            backward(notes.others if notes.summed else None)
            complete = True
        finally:
            watch.close(complete)
        for _, site in left.values():
            self._save_zeros(site.leaf, work)
        gradients = [
            (leaf, self._gradients.pop(id(leaf))) for leaf in notes.summed if id(leaf) in self._gradients
        ]
        hand_over(gradients)

    def _visit(
        self,
        use: ReachedUse,
        cotangents: list[Tensor | None],
        work: _Work,
        columns: Extent,
        ends: bool,
        summed: Container[int] = (),
    ) -> None:
        """Take the statistics of the leaves of a use; save them if the values of these leaves end with them."""
        if self._spare is None:
            self._spare = self._saver.take_off(self._request.extensions, self._reuses and self._has_rows)
        if not work.condensed:
            self._finite.note([site.leaf for site in use.sites], cotangents)
        for site in use.sites:
            self._take(use, site, cotangents, work, columns, id(site.leaf) in summed)
            if ends:
                self._save(site.leaf)

    def _take(
        self,
        use: ReachedUse,
        site: Site,
        cotangents: list[Tensor | None],
        work: _Work,
        columns: Extent,
        is_summed: bool,
    ) -> None:
        """Take the results of some tasks for one leaf."""
        try:
            values = self._statistics(use, site, cotangents, work, columns, is_summed)
        except torch.OutOfMemoryError:
            values = self._in_chunks(use, site, cotangents, work.tasks, columns, is_summed)
        except OfParameter as error:
            raise error.named(self._request.graph.name(site.leaf)) from None
        if work.condensed:
            self._finite.note([site.leaf], [_smallest(values, work.condensed)])
        self._keep(site.leaf, work, values)

    def _keep(self, leaf: Tensor, work: _Work, values: list[Any]) -> None:
        """Keep results of a leaf, by the numbers of their rows, until it has all of them."""
        known = self._values.setdefault(id(leaf), {})
        for task, value in zip(work.tasks, values, strict=True):
            known.setdefault(task.extension, {})[task.index] = value

    def _save(self, leaf: Tensor) -> None:
        """Save the values of a leaf, which are complete."""
        known = self._values.pop(id(leaf))
        results = {each: [own[index] for index in range(len(own))] for each, own in known.items()}
        known.clear()
        self._saver.save(leaf, results)

    def _statistics(
        self,
        use: ReachedUse,
        site: Site,
        cotangents: list[Tensor | None],
        work: _Work,
        columns: Extent,
        is_summed: bool,
    ) -> list[Any]:
        """Return the results of some tasks for one leaf; keep its gradient if packprop sums it."""
        leaf = site.leaf
        structure = site.structure_of(cotangents, use.layouts, ALL, self._request.chunk_sizes.held)
        if work.kept is not None and isinstance(structure, Outer):
            task, of_all = work.kept, Extent(0, self._request.graph.samples, self._request.graph.samples)
            structure = written_in_place(structure, leaf, lambda: self._result_of(task, leaf), columns, of_all)
        self._drop_spares(leaf, work)
        if is_summed:
            total, *values = evaluate_together(structure, [summed_grad, *work.statistics])
            self._gradients[id(leaf)] = for_grad(leaf, total, values)
        else:
            values = evaluate_together(structure, work.statistics)
        rows = [task.row for task in work.tasks]
        return [whole(value, row.over_v, row.over_n) for value, row in zip(values, rows, strict=True)]

    def _save_zeros(self, leaf: Tensor, work: _Work) -> None:
        """Save the values of a leaf that the user's pass, which has freed its use, has not reached."""
        shape = 1, self._request.graph.samples, *leaf.shape
        zeros = Dense(leaf.new_zeros(shape, dtype=accumulation_dtype(leaf.dtype)))
        with torch.no_grad():
            values = [whole(task.row.statistic(zeros), task.row.over_v, task.row.over_n) for task in work.tasks]
            self._keep(leaf, work, values)
            self._save(leaf)

    def _result_of(self, task: Task, leaf: Tensor) -> Partial:
        """Return the result that per-sample gradients of a leaf are written to."""
        spare = None if self._spare is None else self._spare.pop((task.extension, id(leaf)), None)
        return Partial(task.row.over_v, task.row.over_n, spare)

    def _drop_spares(self, leaf: Tensor, work: _Work) -> None:
        """Free results of an earlier pass that no value takes the place of, before the values are made."""
        if self._spare:
            for task in work.tasks:
                self._spare.pop((task.extension, id(leaf)), None)

    def _in_chunks(
        self,
        use: ReachedUse,
        site: Site,
        cotangents: list[Tensor | None],
        tasks: list[Task],
        columns: Extent,
        is_summed: bool,
    ) -> list[Any]:
        """Return the results of some tasks for one leaf in chunks: those of all samples exceeded the memory."""
        found: dict[Extension, list[Any]] = {}
        results = Accumulator(self._request, lambda _, values: found.update(values), None, dict)
        taken = [self._request.summed, *tasks] if is_summed else tasks
        results.add_contributions(site.leaf, [(use, site, cotangents)], taken, columns)
        results.finish(site.leaf)
        self._gradients |= {id(leaf): total for leaf, total in results.take_gradients([site.leaf])}
        return [found[task.extension][task.index] for task in tasks]


def _smallest(values: list[Any], places: Sequence[int]) -> Tensor | None:
    """Return the smallest tensor that has entries among some of the values."""
    found = [tensor for place in places for tensor in tensors_in(values[place]) if tensor.numel()]
    return min(found, key=Tensor.numel, default=None)
