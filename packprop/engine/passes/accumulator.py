"""Results of leaves: statistics of chunks of samples, merged, and passed on when a leaf is complete."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import ONE, Extent, Partial
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.statistics import WITHOUT_TABLES, Statistic, per_sample_grad
from packprop.engine.algebra.structures import Dense, Outer, Statistical
from packprop.engine.functions.entry import Samples
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.passes.chunks import start_after
from packprop.engine.passes.contributions import (
    Build,
    Contribution,
    joined_once,
    joint_structure,
    looks_up,
    unreached,
    uses_of,
)
from packprop.engine.passes.finite import FiniteCheck, smallest_tensor
from packprop.engine.passes.kept_chunks import Kept
from packprop.engine.passes.partial_results import Begin, PartialResults
from packprop.engine.passes.request import Chosen, Request, Task, by_subsampling
from packprop.engine.passes.sample_memory import SampleMemory
from packprop.engine.tensors.nesting import tensors_in
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.state import share_memory
from packprop.errors import OfParameter, PackpropWarning, naming
from packprop.types import GRADIENT, INPUTS, Extension, Row, Seed

Done = Callable[[Tensor, dict[Extension, list[Any]]], None]
"""Called with a leaf when all of its results are complete."""


Log = Callable[[Tensor, Sequence[ReachedUse], Statistical, int], None]
"""Called after each chunk of samples: with the leaf, its uses, their structure, the size of a chunk."""


class Accumulator:
    """Accumulates the results of one pass.

    Args:
        request: The request of the pass.
        done: Called with each leaf that is finished.
        log: Called after each chunk of samples.
        begin: Called before the first value is kept.
    """

    def __init__(self, request: Request, done: Done, log: Log | None, begin: Begin) -> None:
        self.finite_check = FiniteCheck()
        self._graph, self._extensions = request.graph, request.extensions
        self._chunk_sizes, self._create_graph = request.chunk_sizes, request.create_graph
        self._done, self._log = done, log
        self._partial = PartialResults(begin, request.known)
        self._largest_chunk: dict[int, int] = {}
        self._gradients: dict[int, Tensor] = {}
        self._names: dict[int, str] | None = None
        self._summed = request.summed.extension
        self._at_once = request.is_whole

    def add_contributions(
        self,
        leaf: Tensor,
        contributions: list[Contribution],
        tasks: Sequence[Task],
        columns: Extent,
        build: Build = joint_structure,
    ) -> None:
        """Take the statistics of one leaf, and merge them into its partial results.

        ``build`` makes the structure that the statistics are taken of; by default that of all uses together.
        """
        if self._at_once and self._added_at_once(leaf, contributions, tasks, build):
            return
        for use, _, _ in contributions:
            if use.prepare is not None:
                use.prepare()
        contributions = joined_once(contributions)
        second_pass = by_subsampling([task for task in tasks if task.row.after is not None])
        kept = {chosen: Kept(self._chunk_sizes, group) for chosen, group in second_pass.items()}
        for chosen, group in by_subsampling([task for task in tasks if task.row.after is None]).items():
            chunks = kept.get(chosen)
            for part in [group] if chunks is not None else _with_and_without_tables(contributions, group):
                self._add_by_chunks(leaf, contributions, part, chosen, columns, build, chunks)
        for chosen, group in second_pass.items():
            with naming(lambda: self._graph.name(leaf)):
                self._partial.end_first_pass(leaf, group)
            self._add_by_chunks(leaf, contributions, group, chosen, columns, build, kept.pop(chosen))

    def _added_at_once(
        self, leaf: Tensor, contributions: list[Contribution], tasks: Sequence[Task], build: Build
    ) -> bool:
        """Take the statistics of all samples at once, each at a single use; tell whether they fit into memory.

        An earlier pass took the same statistics in one chunk: there is nothing to prepare, join, split or log.
        """
        try:
            structure = build(contributions, slice(None), self._chunk_sizes.held)
            values = evaluate_together(structure, [task.row.statistic for task in tasks])
        except torch.OutOfMemoryError:
            return False
        except OfParameter as error:
            raise error.named(self._graph.name(leaf)) from None
        for task, value in zip(tasks, values, strict=True):
            self.add_value(leaf, task, value)
        return True

    def _add_by_chunks(
        self,
        leaf: Tensor,
        contributions: list[Contribution],
        tasks: list[Task],
        chosen: Chosen,
        columns: Extent,
        build: Build,
        kept: Kept | None,
    ) -> None:
        """Go over all samples, or the ``chosen`` ones, in chunks; halve a chunk that does not fit.

        ``kept``: the chunks that a first pass keeps for a second one.
        """
        samples = self._graph.samples
        count = samples if chosen is None else len(chosen)
        whole = any(task.row.whole for task in tasks)
        step = count
        if not whole:
            statistics = [self._statistic(leaf, task) for task in tasks]
            is_joint = build is joint_structure
            memory = SampleMemory(leaf, contributions, statistics, is_joint, self._create_graph)
            step = self._chunk_sizes.samples_at_once(memory, samples)
            step = min(step, self._largest_chunk.get(id(leaf), count))
        if kept is not None:
            step = kept.samples_at_once(step)
        start = 0
        while start < count:
            stop = min(count, start + step)
            extent = Extent(start, stop, count)
            chunk: Samples
            if chosen is None:
                chunk = slice(None) if step >= count else slice(start, stop)
            else:
                chunk = torch.tensor(chosen[start:stop], device="cpu") % samples
            structure: Statistical | None = None
            try:
                given = None if kept is None else kept.take(extent)  # a first pass has kept nothing yet
                structure = build(contributions, chunk, self._chunk_sizes.held) if given is None else given
                if isinstance(structure, Outer):
                    structure = self._written_in_place(leaf, structure, tasks, columns, extent)
                partials = [self._partial.at(leaf, task) for task in tasks]
                if columns.whole and extent.whole and getattr(structure, "out", None) is None:
                    for partial in partials:  # the value is the whole result, and needs no spare memory
                        partial.drop_spare()
                values = self._statistics(leaf, structure, tasks)
            except torch.OutOfMemoryError:
                if whole or stop - start == 1:
                    raise
                step = self._largest_chunk[id(leaf)] = (stop - start) // 2
                self._warn_of_halving(leaf, step)
                continue
            except OfParameter as error:
                raise error.named(self._graph.name(leaf)) from None
            for partial, value in zip(partials, values, strict=True):
                partial.put(value, columns, extent)
            if self._log is not None:
                self._log(leaf, uses_of(contributions), structure, step)
            if kept is not None and tasks[0].row.after is None:
                kept.keep(structure, extent)
            del structure, values, value  # free them before the next chunk makes its own
            start = start_after(start, step, count)

    def _statistics(self, leaf: Tensor, structure: Statistical, tasks: list[Task]) -> list[Any]:
        """Return the statistics of one chunk; a second pass also gives them the results of the first one."""
        if tasks[0].row.after is None:
            return evaluate_together(structure, [self._statistic(leaf, task) for task in tasks])
        return [task.row.statistic(structure, self._partial.first_pass(leaf, task.extension)) for task in tasks]

    def _statistic(self, leaf: Tensor, task: Task) -> Statistic:
        """Return the statistic of a task, with the parameter's name and shape if the row needs them."""
        if not task.row.of_parameter:
            return task.row.statistic
        if self._names is None:
            self._names = self._graph.distinct_names(task.extension.name)
        return functools.partial(task.row.statistic, name=self._names[id(leaf)], shape=leaf.shape)

    def _written_in_place(
        self, leaf: Tensor, structure: Outer, tasks: list[Task], columns: Extent, samples: Extent
    ) -> Outer:
        """Return the structure; if a task keeps per-sample gradients, with the result to write them to."""
        kept = [task for task in tasks if task.row.statistic is per_sample_grad]
        if not kept:
            return structure
        return written_in_place(structure, leaf, lambda: self._partial.at(leaf, kept[0]), columns, samples)

    def _warn_of_halving(self, leaf: Tensor, step: int) -> None:
        warnings.warn(
            f"The device ran out of memory at parameter {self._graph.name(leaf)!r}; packprop keeps "
            f"what is finished, and continues with {step} samples at a time.",
            PackpropWarning,
            stacklevel=2,
        )

    def add_value(self, leaf: Tensor, task: Task, value: Any) -> None:
        """Merge a value of all samples and columns into the partial result."""
        self._partial.at(leaf, task).put(value, ONE, ONE)

    def add_zeros(self, leaf: Tensor, columns: Extent, tasks: Sequence[Task], build: Build) -> None:
        """Account for a leaf that a sweep has not reached: its gradients are zero.

        Statistics of tokens still count the tokens of the sweep; ``build`` knows which tokens count.
        """
        of_tokens = [task for task in tasks if task.row.seed.by_token]
        tasks = [task for task in tasks if not task.row.seed.by_token]
        missing = [task for task in tasks if not task.row.over_v.grows and not self._partial.has(leaf, task)]
        if missing or of_tokens:  # a factor takes its shape from a structure: make the zeros at the uses
            sites = [(use, site) for use in self._graph.uses for site in use.sites if site.leaf is leaf]
            count = columns.stop - columns.start if of_tokens else 1
            zeros_at_uses = [unreached(use, site, leaf, count) for use, site in sites]
            if missing:
                self.add_contributions(leaf, zeros_at_uses, missing, columns)
            if of_tokens:
                self.add_contributions(leaf, zeros_at_uses, of_tokens, columns, build)
        for task in tasks:
            if not task.row.over_v.grows:
                continue
            chosen = task.extension.subsampling
            count = self._graph.samples if chosen is None else len(chosen)
            dtype = accumulation_dtype(leaf.dtype)
            zeros = Dense(leaf.new_zeros(columns.stop - columns.start, count, *leaf.shape, dtype=dtype))
            self._partial.at(leaf, task).put(
                self._statistic(leaf, task)(zeros), columns, Extent(0, count, count)
            )

    def finish(self, leaf: Tensor) -> None:
        """Hand over the complete results of a leaf."""
        results: dict[Extension, list[Any]] = {}
        for extension in (*self._extensions, self._summed):
            values = self._partial.take(leaf, extension)
            if values is not None:
                results[extension] = values
        if self._summed in results:
            total = self._summed.finish(results.pop(self._summed), self._graph.samples)
            self._gradients[id(leaf)] = for_grad(leaf, total, results.values())
        smallest = smallest_sums(
            pair
            for each, values in results.items()
            if each.subsampling is None
            for pair in zip(each.rows, values, strict=True)
        )
        if id(leaf) in self._gradients:
            smallest.setdefault(GRADIENT, self._gradients[id(leaf)])
        self.finite_check.note([leaf], smallest.values())
        self._done(leaf, results)

    def take(self, leaf: Tensor, extension: Extension) -> list[Any] | None:
        """Take out the results of an internal extension; ``None`` if there are none."""
        return self._partial.take(leaf, extension)

    def take_gradients(self, leaves: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Take out the gradients summed by the task ``request.summed``, each with its leaf."""
        return [(leaf, self._gradients.pop(id(leaf))) for leaf in leaves if id(leaf) in self._gradients]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of results that are not handed over yet."""
        yield from self._partial.tensors()
        yield from self._gradients.values()


def _with_and_without_tables(contributions: list[Contribution], tasks: list[Task]) -> list[list[Task]]:
    """Split the tasks of a table: only statistics that form a table for each sample need small chunks."""
    if not looks_up(contributions):
        return [tasks]
    without = [task for task in tasks if task.row.statistic in WITHOUT_TABLES]
    return [part for part in (without, [task for task in tasks if task not in without]) if part]


def written_in_place(
    structure: Outer, leaf: Tensor, result: Callable[[], Partial], columns: Extent, samples: Extent
) -> Outer:
    """Return the structure, with the place in a result to write per-sample gradients to, if they fit there.

    If one call computes the gradients of all samples, its value is the result itself, and needs no such place.
    """
    cotangent = structure.cotangent
    if cotangent is None or structure.fold is not fold_to(leaf.shape):
        return structure
    if columns.whole and samples.whole and structure.by_groups:
        return structure
    dtype = structure.extents.dtype
    if columns.stop - columns.start != 1 or leaf.dtype != dtype:
        return structure
    out = result().out(cotangent.new_empty((), dtype=dtype), leaf.shape, columns, samples)
    return structure if out is None else replace(structure, out=out)


def for_grad(leaf: Tensor, total: Tensor, results: Iterable[Any]) -> Tensor:
    """Return the summed gradient of a leaf as ``.grad`` may take it: in memory that no result shares."""
    gradient = total.to(leaf.dtype)
    is_shared = any(share_memory(gradient, each) for each in tensors_in([*results]))
    return gradient.clone() if is_shared else gradient


def smallest_sums(results: Iterable[tuple[Row, Any]]) -> dict[Seed, Tensor]:
    """Return for each seed the smallest result that its cotangents enter: NaN in a cotangent shows there.

    If no row makes such a result, the check has seen the cotangents themselves.
    """
    by_seed: dict[Seed, list[Any]] = {}
    for row, value in results:
        if row.seed != INPUTS and (row.sums or row.condenses):
            by_seed.setdefault(row.seed, []).append(value)
    found = {seed: smallest_tensor(values) for seed, values in by_seed.items()}
    return {seed: tensor for seed, tensor in found.items() if tensor is not None}
