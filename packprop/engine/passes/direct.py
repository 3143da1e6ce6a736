"""Statistics that are each taken at their use, and saved as soon as a parameter has all of them.

# NOTE [Direct passes]
A pass has nothing to collect, split or merge if a kept walk serves it, each parameter has one use, and an
earlier pass took its statistics of all samples and all columns in one chunk: the value of the one chunk is the
result. So such a pass skips the collector and the accumulator, which take a large part of the time of a pass
through a small model. A clipped pass keeps the collector: its sums wait for all norms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import ONE, Extent, Partial, whole
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.algebra.statistics import per_sample_grad, summed_grad
from packprop.engine.algebra.structures import Dense, Outer, Statistical
from packprop.engine.functions.entry import ArrivedCotangents
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.sweep import Watch
from packprop.engine.passes.accumulator import Accumulator, for_grad, written_in_place
from packprop.engine.passes.backward_pass import made_columns, share_exact_columns
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.column_sweeps import are_one_sweep, sweep_chunk
from packprop.engine.passes.contributions import Contribution, unreached
from packprop.engine.passes.finite import FiniteCheck
from packprop.engine.passes.gradient import Backward, hand_over, summed_leaves
from packprop.engine.passes.request import Request, Task, tasks_by_seed
from packprop.engine.passes.saving import ResultSaver
from packprop.engine.tensors.autocast import AutocastRegions
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.errors import OfParameter
from packprop.types import GRADIENT, INPUTS, Extension, Row, Seed

ALL = slice(None)

SWEPT = ("gradient", "ggn", "empirical", "none")
"""Kinds of seeds whose statistics a direct pass takes."""


class Facts(NamedTuple):
    """Facts about the results of one sweep, which follow from its rows.

    Args:
        shows: The numbers of the rows whose results are smaller than cotangents, and show NaN in these.
        keeps_one: Whether each row has a value that equals its partial result, if there is only one.
    """

    shows: list[int]
    keeps_one: bool

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Facts:
        """Return the facts for the rows of some tasks."""
        rows = [task.row for task in tasks]
        return cls(
            [n for n, task in enumerate(tasks) if task.shows_cotangents and task.row.seed != INPUTS],
            all(row.over_v.keeps_one and row.over_n.keeps_one for row in rows),
        )


@dataclass
class Notes:
    """Notes of a pass for later passes with equal statistics; packprop keeps them if the pass succeeds.

    Args:
        asked: The rows and chunk sizes of the pass.
        samples: The number of samples.
        is_direct: Whether later passes can be direct.
        facts: The facts about its results, by the seed of their sweep.
        devices: The types of the devices that its leaves are on.
        summed: Leaves whose gradient packprop sums itself; see NOTE [One product for two].
        others: All other leaves.
    """

    asked: tuple[list[Row], ChunkSizes]
    samples: int
    is_direct: bool
    facts: dict[Seed, Facts]
    devices: set[str]
    summed: list[Tensor]
    others: list[Tensor]

    def log(self, leaf: Tensor, uses: Sequence[ReachedUse], structure: Statistical, step: int) -> None:
        """Note the size of a chunk of samples."""
        self.is_direct &= step >= self.samples


class _Work:
    """The work of one sweep.

    Args:
        tasks: The tasks at each leaf.
        facts: The facts about their results.
        uses: The uses that the sweep goes to.
        ends: Whether the values of leaves are complete after the sweep.
        columns: The columns of the sweep.
        summed: The leaves whose gradient packprop sums, by identity.
    """

    def __init__(
        self,
        tasks: list[Task],
        facts: Facts,
        uses: Sequence[ReachedUse],
        ends: bool,
        columns: Extent = ONE,
        summed: Container[int] = (),
    ) -> None:
        self.tasks, self.facts, self.ends, self.columns, self.summed = tasks, facts, ends, columns, summed
        self.rows: list[Row] = []
        self.statistics: list[Callable[..., Any]] = []
        self.kept: Task | None = None
        """The first task that keeps per-sample gradients of one column, if there is one."""
        for task in tasks:
            self.rows.append(task.row)
            self.statistics.append(task.row.statistic)
            if self.kept is None and task.row.statistic is per_sample_grad:
                self.kept = task
        self.left = {id(site.leaf): (use, site) for use in uses for site in use.sites}
        """The use and the site of each leaf that the sweep has not reached, by the identity of the leaf."""

    def whole(self, values: list[Any]) -> list[Any]:
        """Return the results, made from values of the statistics of all samples and columns."""
        if self.facts.keeps_one:
            return values
        return [whole(value, row.over_v, row.over_n) for value, row in zip(values, self.rows, strict=True)]


class DirectPass:
    """A pass that takes statistics directly; see NOTE [Direct passes].

    Args:
        request: The request of the pass, through a graph that a kept walk has found.
        saver: Saves the values.
        reuses: Whether values may overwrite the values of an earlier pass in memory.
    """

    def __init__(self, request: Request, saver: ResultSaver, reuses: bool) -> None:
        self._request, self._saver, self._reuses = request, saver, reuses
        self.tasks = tasks_by_seed(request.extensions)
        """The rows of all extensions, by seed."""
        rows: list[Row] = []
        self._numbers: dict[Extension, int] = {}  # how many rows each extension has
        self._is_simple, self._has_rows = True, False
        for seed, tasks in self.tasks.items():
            self._is_simple &= seed.kind in SWEPT
            for task in tasks:
                extension, row = task.extension, task.row
                rows.append(row)
                self._numbers[extension] = self._numbers.get(extension, 0) + 1
                if row.after is not None or row.of_parameter or extension.subsampling is not None:
                    self._is_simple = False
                self._has_rows |= row.statistic is per_sample_grad
        self.is_of_gradients = list(self.tasks) == [GRADIENT]
        """True if all values are statistics of the gradient, so that the user's pass is the only sweep."""
        if not self.is_of_gradients and INPUTS in self.tasks:  # a pass takes them along with columns
            self._is_simple &= not self.tasks.keys() <= {INPUTS, GRADIENT}
        self._asked, self._notes = (rows, request.chunk_sizes), None
        for notes in request.graph.notes:
            if notes.asked == self._asked:
                self._notes = notes
                break
        self.is_possible = self._notes is not None and self._notes.is_direct and self._is_simple
        """True if this pass can be direct, as far as an earlier one of this structure has shown."""
        self._finite = FiniteCheck()
        self._gradients: dict[int, Tensor] = {}
        self._values: dict[int, dict[Extension, list[Any]]] = {}
        self._spare: dict[tuple[Extension, int], Tensor] | None = None

    def notes(self) -> Notes | None:
        """Return notes for an ordinary pass to complete; ``None`` if later passes need none."""
        if self._notes is not None or not self._is_simple:
            return None
        graph = self._request.graph
        is_direct = not any(use.waits or len(use.nodes) > 1 for use in graph.uses)
        statistics = [task.row.statistic for task in self.tasks.get(GRADIENT, ())]
        leaves = summed_leaves(self._request, statistics) if statistics else ([], [])
        tasks = self.tasks.copy()
        share_exact_columns(tasks)
        facts = {seed: Facts.of(own) for seed, own in tasks.items()}
        devices = {leaf.device.type for leaf in graph.leaves()}
        return Notes(self._asked, graph.samples, is_direct, facts, devices, *leaves)

    def run(self, backward: Backward) -> bool:
        """Sweep the columns, run the user's own pass, and take the statistics along with both.

        Return ``False`` if the columns of a seed do not fit into one sweep. packprop has then done nothing but
        make columns, and leaves them in the request.
        """
        graph, notes = self._request.graph, self._notes
        assert notes is not None
        autocast = AutocastRegions.now(notes.devices)
        if self.is_of_gradients:
            tasks, inputs, (gradient,) = {}, [], self.tasks.values()
        else:
            tasks = self.tasks.copy()
            share_exact_columns(tasks)
            inputs, gradient = tasks.pop(INPUTS, []), tasks.pop(GRADIENT, [])
        if tasks:
            with torch.no_grad(), autocast.switched(False), graph.hooks.quiet():
                if not self._sweep_columns(tasks, inputs, notes, bool(gradient)):
                    notes.is_direct = False
                    return False
        if gradient:
            self._watch(gradient, autocast, backward)
        else:
            backward(None)
        self._finite.warn(graph)
        return True

    def _sweep_columns(
        self, tasks: dict[Seed, list[Task]], inputs: list[Task], notes: Notes, waits: bool
    ) -> bool:
        """Sweep all columns; ``waits``: the values of leaves are not complete afterwards."""
        request, uses = self._request, self._request.graph.uses  # an earlier pass checked the request
        roots = made_columns(request, tasks)
        if not all(are_one_sweep(request, groups) for groups in roots.values()):
            request.drawn.update(roots)
            return False
        if inputs:
            work = _Work(inputs, notes.facts[INPUTS], uses, ends=False)
            for use in uses:
                self._visit(work, use, ArrivedCotangents([None] * len(use.shapes)))
        for number, (seed, (group,)) in enumerate(roots.items(), 1):
            ends = number == len(roots) and not waits
            columns = Extent(0, group.count, group.count)
            work = _Work(tasks[seed], notes.facts[seed], uses, ends, columns)
            sweep_chunk(group, range(group.count), uses, functools.partial(self._visit, work))
            for use, site in list(work.left.values()):
                if id(site.leaf) in work.left:
                    self._visit(work, use, unreached(use, site, site.leaf, group.count)[2])
        return True

    def _watch(self, tasks: list[Task], autocast: AutocastRegions, backward: Backward) -> None:
        """Run the user's own pass, and take statistics of the gradient along with it."""
        graph, notes = self._request.graph, self._notes
        assert notes is not None
        restricts = bool(notes.summed) and not graph.hooks.are_any
        summed = notes.summed if restricts else []
        facts = notes.facts[GRADIENT]
        work = _Work(tasks, facts, graph.uses, ends=True, summed=set(map(id, summed)))
        watch = Watch(graph.uses, autocast.outside(functools.partial(self._visit, work)), graph.hooks)
        complete = False
        try:
            backward(notes.others if restricts else None)
            complete = True
        finally:
            watch.close(complete)
        for _, site in work.left.values():
            self._save_zeros(site.leaf, work)
        if summed:
            reached = [leaf for leaf in summed if id(leaf) in self._gradients]
            hand_over([(leaf, self._gradients.pop(id(leaf))) for leaf in reached])

    def _visit(self, work: _Work, use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        """Take the statistics of the leaves of a use; save the values of these leaves if they are complete."""
        if self._spare is None:
            self._spare = self._saver.take_off(self._request.extensions, self._reuses and self._has_rows)
        if not work.facts.shows:
            self._finite.note([site.leaf for site in use.sites], cotangents)
        for site in use.sites:
            del work.left[id(site.leaf)]
            self._take(work, (use, site, cotangents))
            if work.ends:
                self._saver.save(site.leaf, self._values.pop(id(site.leaf)))

    def _take(self, work: _Work, contribution: Contribution) -> None:
        """Take the results of some tasks for one leaf."""
        leaf = contribution[1].leaf
        try:
            values = self._statistics(work, contribution)
        except torch.OutOfMemoryError:
            values = self._in_chunks(work, contribution)
        except OfParameter as error:
            raise error.named(self._request.graph.name(leaf)) from None
        if work.facts.shows:
            self._finite.note_smallest(leaf, [values[number] for number in work.facts.shows])
        self._keep(leaf, work, values)

    def _keep(self, leaf: Tensor, work: _Work, values: list[Any]) -> None:
        """Keep results of a leaf, at the numbers of their rows, until it has all of them."""
        known = self._values.setdefault(id(leaf), {})
        for task, value in zip(work.tasks, values, strict=True):
            known.setdefault(task.extension, [None] * self._numbers[task.extension])[task.index] = value

    def _statistics(self, work: _Work, contribution: Contribution) -> list[Any]:
        """Return the results of some tasks for one leaf; keep its gradient if packprop sums it."""
        use, site, cotangents = contribution
        leaf, request = site.leaf, self._request
        structure = site.structure_of(cotangents, use.layouts, ALL, request.chunk_sizes.held)
        if work.kept is not None and isinstance(structure, Outer):
            task, of_all = work.kept, Extent(0, request.graph.samples, request.graph.samples)
            result = functools.partial(self._result_of, task, leaf)
            structure = written_in_place(structure, leaf, result, work.columns, of_all)
        if self._spare:
            self._drop_spares(self._spare, leaf, work)
        if id(leaf) in work.summed:
            total, *values = evaluate_together(structure, [summed_grad, *work.statistics])
            self._gradients[id(leaf)] = for_grad(leaf, total, values)
        else:
            values = evaluate_together(structure, work.statistics)
        return work.whole(values)

    def _save_zeros(self, leaf: Tensor, work: _Work) -> None:
        """Save the values of a leaf that the user's pass did not reach: the gradient is zero, the use freed."""
        shape = 1, self._request.graph.samples, *leaf.shape
        zeros = Dense(leaf.new_zeros(shape, dtype=accumulation_dtype(leaf.dtype)))
        with torch.no_grad():
            self._keep(leaf, work, work.whole([statistic(zeros) for statistic in work.statistics]))
            self._saver.save(leaf, self._values.pop(id(leaf)))

    def _result_of(self, task: Task, leaf: Tensor) -> Partial:
        """Return the result that per-sample gradients of a leaf are written to."""
        spare = None if self._spare is None else self._spare.pop((task.extension, id(leaf)), None)
        return Partial(task.row.over_v, task.row.over_n, spare)

    @staticmethod
    def _drop_spares(spare: dict[tuple[Extension, int], Tensor], leaf: Tensor, work: _Work) -> None:
        """Free the results of an earlier pass that no new value overwrites, before the new values are made."""
        for task in work.tasks:
            spare.pop((task.extension, id(leaf)), None)

    def _in_chunks(self, work: _Work, contribution: Contribution) -> list[Any]:
        """Return the results of some tasks for one leaf, in chunks: all samples at once exceeded the memory."""
        leaf, found = contribution[1].leaf, dict[Extension, list[Any]]()
        results = Accumulator(self._request, lambda _, values: found.update(values), None, dict)
        tasks = [self._request.summed, *work.tasks] if id(leaf) in work.summed else work.tasks
        results.add_contributions(leaf, [contribution], tasks, work.columns)
        results.finish(leaf)
        self._gradients |= {id(each): total for each, total in results.take_gradients([leaf])}
        return [found[task.extension][task.index] for task in work.tasks]
