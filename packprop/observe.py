"""One backward pass -> results: the loop over bites lives here and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packprop.errors import BadInput, PackpropWarning
from packprop.graph import Found, Graph, Site
from packprop.monoid import lift
from packprop.regions import opened
from packprop.seeds import Columns, columns
from packprop.structures import Dense, join
from packprop.sweep import Watch, sweep
from packprop.types import GRADIENT, INPUTS, Extension, Row, Seed

SCRATCH = 8 * 2**20
"""Bytes of temporary memory that one bite of samples may take."""
BATCHED_SIGNALS = 64 * 2**20
"""Bytes of signals that a vectorised sweep may hold."""

Results = dict[Extension, dict[Tensor, list[Any]]]


@dataclass
class _Task:
    """One row of one extension."""

    extension: Extension
    index: int
    row: Row


@dataclass
class Observation:
    """The work of one backward pass.

    Args:
        graph: What the pass goes through, with its samples settled.
        extensions: What was asked for.
        create_graph: Whether results shall be differentiable.
        done: Called with a leaf when all of its partial results are there.
    """

    graph: Graph
    extensions: Sequence[Extension]
    create_graph: bool
    done: Callable[[Tensor, dict[Extension, list[Any]]], None]
    _partial: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    _finite: dict[int, Tensor] = field(default_factory=dict)

    def run(self, backward: Callable[[], None] | None) -> None:
        """Sweep every seed; the gradient along with the user's own ``backward`` pass, if there is one."""
        with torch.set_grad_enabled(self.create_graph):
            self._run(backward)
        self._warn_if_not_finite()

    def _run(self, backward: Callable[[], None] | None) -> None:
        tasks: dict[Seed, list[_Task]] = {}
        for extension in self.extensions:
            for index, row in enumerate(extension.rows):
                tasks.setdefault(row.seed, []).append(_Task(extension, index, row))
        _check_subsampling(self.extensions, self.graph.samples)
        # everything that can be refused is refused before any work
        curved = {seed: columns(self.graph, seed, self.create_graph) for seed in tasks if seed.kind == "ggn"}
        order = [INPUTS, *curved, GRADIENT]
        last = [seed for seed in order if seed in tasks][-1]
        for seed in order:
            work = tasks.get(seed, [])
            if seed == GRADIENT:
                self._gradient(work, backward, last is seed)
            elif seed == INPUTS:
                if work:
                    self._inputs(work)
            else:
                self._columns(curved[seed], work, last == seed)
        if last == INPUTS:
            for leaf in self.graph.leaves():
                self._finish(leaf)

    def _inputs(self, tasks: list[_Task]) -> None:
        parts: dict[int, list[tuple[Found, Site, list[Tensor | None]]]] = {}
        left = _uses_by_leaf(self.graph.found)
        with opened((found.use.source for found in self.graph.found), self.create_graph):
            for found in self.graph.found:
                for site in found.take():
                    nothing: list[Tensor | None] = [None] * len(found.use.shapes)
                    parts.setdefault(id(site.leaf), []).append((found, site, nothing))
                    left[id(site.leaf)] -= 1
                    if left[id(site.leaf)] == 0:
                        self._consume(site.leaf, parts.pop(id(site.leaf)), tasks)

    def _gradient(self, tasks: list[_Task], backward: Callable[[], None] | None, last: bool) -> None:
        collect = _Collector(self, self.graph.found, tasks, last)
        if not tasks:
            self._last_pass(backward)
            return
        if backward is None or self.graph.entangled:
            graph = self.graph
            edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
            seeds = [
                torch.ones_like(root) if given is None else given
                for root, given in zip(graph.roots, graph.gradients, strict=True)
            ]
            sweep(edges, seeds, graph.found, collect.visit, create_graph=self.create_graph)
            self._last_pass(backward)
        else:

            def visit(found: Found, signals: list[Tensor | None]) -> None:
                collect.visit(found, signals)
                if not self.graph.kept:
                    found.release()

            with opened((found.use.source for found in self.graph.found), self.create_graph):
                watch = Watch(self.graph.found, visit, accumulate=True)
                complete = False
                try:
                    backward()
                    complete = True
                finally:
                    watch.close(complete)
        collect.flush()

    def _last_pass(self, backward: Callable[[], None] | None) -> None:
        """The user's own pass, when all that was asked for is there."""
        if backward is None:
            return
        if not self.graph.kept:
            for found in self.graph.found:
                found.release()
        backward()

    def _columns(self, groups: list[Columns], tasks: list[_Task], last: bool) -> None:
        chunks = []
        for group in groups:
            step = self._columns_at_once(group)
            chunks += [(group, start, min(group.count, start + step)) for start in range(0, group.count, step)]
        for place, (group, start, stop) in enumerate(chunks):
            seeds = group.chunk(start, stop)
            batched = stop - start > 1
            collect = _Collector(self, self.graph.found, tasks, last and place == len(chunks) - 1)
            sweep(
                group.edges,
                seeds if batched else [seed[0] for seed in seeds],
                self.graph.found,
                collect.visit,
                batched=batched,
                create_graph=self.create_graph,
            )
            collect.flush(stop - start)

    def _columns_at_once(self, group: Columns) -> int:
        """A vectorised sweep pays where many columns go through a small graph, all of which is there."""
        if not self.graph.holds_inputs:
            return 1
        entries = sum(shape.numel() for found in self.graph.found for shape in found.use.shapes)
        fitting = BATCHED_SIGNALS // (8 * max(entries, 1))
        return min(fitting, group.count) if group.count > 32 and fitting >= 8 else 1

    def _consume(
        self,
        leaf: Tensor,
        parts: list[tuple[Found, Site, list[Tensor | None]]],
        tasks: list[_Task],
    ) -> None:
        """Take the statistics of one leaf, bite by bite, and merge them into its partial results."""
        samples = self.graph.samples
        for chosen, group in _by_subsampling(tasks):
            count = samples if chosen is None else len(chosen)
            pieces: dict[int, Any] = {}
            whole = any(task.row.whole for task in group)
            step = count if whole else self._samples_at_once(leaf, parts)
            for start in range(0, count, step):
                stop = min(count, start + step)
                if chosen is None:
                    bite: slice | Tensor = slice(None) if step >= count else slice(start, stop)
                else:
                    bite = torch.tensor(chosen[start:stop]) % samples
                structure = join([site.meet(signals, found.layouts, bite) for found, site, signals in parts])
                for place, task in enumerate(group):
                    value = lift(task.row.over_n, task.row.statistic(structure))
                    pieces[place] = task.row.over_n.merge(pieces[place], value) if place in pieces else value
            for place, task in enumerate(group):
                self._merge(leaf, task, task.row.over_n.result(pieces[place]))

    def _merge(self, leaf: Tensor, task: _Task, result: Any) -> None:
        """Merge the result of some columns into what is there of others."""
        over_v = task.row.over_v
        value = lift(over_v, result)
        key = (id(task.extension), task.index, id(leaf))
        before = self._partial.get(key)
        self._partial[key] = value if before is None else over_v.merge(before, value)

    def vanish(self, leaf: Tensor, columns: int, tasks: list[_Task]) -> None:
        """A leaf that a sweep has not reached: its gradients are zero."""
        for task in tasks:
            chosen = task.extension.subsampling
            count = self.graph.samples if chosen is None else len(chosen)
            zeros = Dense(leaf.new_zeros(columns, count, *leaf.shape))
            self._merge(leaf, task, task.row.over_n.result(lift(task.row.over_n, task.row.statistic(zeros))))

    def _samples_at_once(self, leaf: Tensor, parts: list[tuple[Found, Site, list[Tensor | None]]]) -> int:
        entries = 0
        for _, site, signals in parts:
            columns = next((signal.shape[0] for signal in signals if signal is not None), 1)
            entries += max(site.entry.scratch, leaf.numel()) * columns
        return max(1, min(self.graph.samples, SCRATCH // (entries * leaf.element_size() or 1)))

    def note(self, leaf: Tensor, signals: list[Tensor | None]) -> None:
        """Remember, without waiting for the device, whether signals are finite."""
        for signal in signals:
            if signal is not None and signal.numel():
                if signal.is_complex():
                    finite = signal.isfinite().all()
                else:
                    low, high = signal.detach().aminmax()
                    finite = low.isfinite() & high.isfinite()
                before = self._finite.get(id(leaf))
                self._finite[id(leaf)] = finite if before is None else before & finite

    def _finish(self, leaf: Tensor) -> None:
        results: dict[Extension, list[Any]] = {}
        for extension in self.extensions:
            values = []
            for index, row in enumerate(extension.rows):
                partial = self._partial.pop((id(extension), index, id(leaf)), None)
                values.append(None if partial is None else row.over_v.result(partial))
            if any(value is not None for value in values):
                results[extension] = values
        self.done(leaf, results)

    def _warn_if_not_finite(self) -> None:
        if not self._finite or bool(torch.stack(list(self._finite.values())).all()):
            return
        for leaf in self.graph.leaves():
            if id(leaf) in self._finite and not bool(self._finite[id(leaf)]):
                warnings.warn(
                    f"The signal at parameter {self.graph.name(leaf)!r} holds NaN or infinite values; so do "
                    "the quantities computed from it.",
                    PackpropWarning,
                    stacklevel=2,
                )
                return


class _Collector:
    """Waits until the signals of all uses of a leaf have arrived, then has them consumed."""

    def __init__(
        self, observation: Observation, found: Sequence[Found], tasks: list[_Task], last: bool
    ) -> None:
        self._observation, self._tasks, self._last = observation, tasks, last
        self._parts: dict[int, list[tuple[Found, Site, list[Tensor | None]]]] = {}
        self._leaves = {id(site.leaf): site.leaf for f in found for site in f.sites}
        self._expected = _uses_by_leaf(found)

    def visit(self, found: Found, signals: list[Tensor | None]) -> None:
        """One use with its signals."""
        for site in found.take():
            key = id(site.leaf)
            self._observation.note(site.leaf, signals)
            parts = self._parts.setdefault(key, [])
            parts.append((found, site, signals))
            if len(parts) == self._expected[key]:
                self._consume(key)

    def flush(self, columns: int = 1) -> None:
        """End of the sweep: leaves that it has reached at some of their uses only, or at none."""
        for key in list(self._parts):
            self._consume(key)
        for leaf in list(self._leaves.values()):
            self._observation.vanish(leaf, columns, self._tasks)
            self._done(leaf)

    def _consume(self, key: int) -> None:
        leaf = self._leaves[key]
        self._observation._consume(leaf, self._parts.pop(key), self._tasks)
        self._done(leaf)

    def _done(self, leaf: Tensor) -> None:
        del self._leaves[id(leaf)]
        if self._last:
            self._observation._finish(leaf)


def _uses_by_leaf(found: Sequence[Found]) -> dict[int, int]:
    """How many times each leaf enters the uses, by identity."""
    times: dict[int, int] = {}
    for each in found:
        for site in each.sites:
            times[id(site.leaf)] = times.get(id(site.leaf), 0) + 1
    return times


def _by_subsampling(tasks: list[_Task]) -> list[tuple[list[int] | None, list[_Task]]]:
    groups: dict[tuple[int, ...] | None, list[_Task]] = {}
    for task in tasks:
        chosen = task.extension.subsampling
        groups.setdefault(None if chosen is None else tuple(chosen), []).append(task)
    return [(None if key is None else list(key), group) for key, group in groups.items()]


def _check_subsampling(extensions: Sequence[Extension], samples: int) -> None:
    for extension in extensions:
        for index in extension.subsampling or ():
            if not -samples <= index < samples:
                raise BadInput(
                    f"{extension.name}(subsampling={list(extension.subsampling or ())}) was asked for.",
                    f"index {index}",
                    f"the batch has {samples} samples",
                    f"give indices from 0 to {samples - 1}",
                )
