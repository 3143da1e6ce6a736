"""Statistics of gradients, each taken at its use and saved at once.

# NOTE [Direct passes]
Where a kept walk serves a pass, each parameter has one use, and an earlier pass took its statistics of all
samples in one chunk, there is nothing to collect, to split or to merge: the value of the one chunk is the
result. So such a pass goes without the collector and the accumulator, which take a large part of the time of a
pass through a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import ONE, Extent, Partial, whole
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.algebra.statistics import per_sample_grad, summed_grad
from packprop.engine.algebra.structures import Dense, Outer, Statistical
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.site import Site
from packprop.engine.graph.sweep import Watch
from packprop.engine.passes.accumulator import Accumulator, for_grad, smallest_sums, written_in_place
from packprop.engine.passes.autocast import AutocastRegions
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.finite import FiniteCheck
from packprop.engine.passes.gradient import Backward, hand_over, summed_leaves
from packprop.engine.passes.request import Request, tasks_by_seed
from packprop.engine.passes.saving import ResultSaver
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.errors import OfParameter
from packprop.types import GRADIENT, Extension, Row

ALL = slice(None)


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


class DirectPass:
    """A pass that takes statistics of gradients directly; see NOTE [Direct passes].

    Args:
        request: The request of the pass, through a graph that a kept walk has found.
        saver: Saves the values.
        reuses: Whether values may take the memory of those that they replace.
    """

    def __init__(self, request: Request, saver: ResultSaver, reuses: bool) -> None:
        self._request, self._saver, self._reuses = request, saver, reuses
        self._rows = [row for extension in request.extensions for row in extension.rows]
        self._statistics = [row.statistic for row in self._rows]
        self._sums = any(row.sums or row.condenses for row in self._rows)
        self._finite = FiniteCheck()
        self._asked = self._rows, request.chunk_sizes
        self._notes = next((notes for notes in request.graph.notes if notes.asked == self._asked), None)
        self._gradients: dict[int, Tensor] = {}
        self._left = {id(leaf): leaf for leaf in request.graph.leaves()}
        self._spare: dict[tuple[Extension, int], Tensor] | None = None

    @property
    def is_possible(self) -> bool:
        """Tell whether this pass can be direct, as far as an earlier one of this structure has shown."""
        return self._notes is not None and self._notes.is_direct and self._is_of_gradients

    @property
    def _is_of_gradients(self) -> bool:
        """Tell whether all values are statistics of the gradients of all samples."""
        return all(
            row.seed == GRADIENT and row.after is None and not row.of_parameter for row in self._rows
        ) and not any(extension.subsampling for extension in self._request.extensions)

    def notes(self) -> Notes | None:
        """Return the notes of an ordinary pass; ``None`` if it need not take any."""
        if self._notes is not None or not self._is_of_gradients:
            return None
        graph = self._request.graph
        is_direct = not any(use.waits or len(use.nodes) > 1 for use in graph.uses)
        leaves = summed_leaves(self._request, self._statistics)
        return Notes(self._asked, graph.samples, is_direct, *leaves)

    def run(self, backward: Backward) -> None:
        """Run the user's own pass, and take the statistics along with it."""
        graph, notes = self._request.graph, self._notes
        assert notes is not None
        self._summed = set(map(id, notes.summed))
        self._autocast = AutocastRegions.now({leaf.device.type for leaf in self._left.values()})
        watch = Watch(graph.uses, self._visit, graph.hooks)
        complete = False
        try:
            backward(notes.others if notes.summed else None)
            complete = True
        finally:
            watch.close(complete)
        for leaf in list(self._left.values()):
            self._save_zeros(leaf)
        summed = [leaf for leaf in notes.summed if id(leaf) in self._gradients]
        hand_over([(leaf, self._gradients.pop(id(leaf))) for leaf in summed])
        self._finite.warn(graph)

    @property
    def _has_rows(self) -> bool:
        return per_sample_grad in self._statistics

    def _visit(self, use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        if self._spare is None:
            self._spare = self._saver.take_off(self._request.extensions, self._reuses and self._has_rows)
        with self._autocast.switched(False):
            if not self._sums:
                self._finite.note([site.leaf for site in use.sites], cotangents)
            for site in use.sites:
                del self._left[id(site.leaf)]
                try:
                    results = self._results(use, site, cotangents)
                except torch.OutOfMemoryError:
                    self._take_in_chunks(use, site, cotangents)
                    continue
                except OfParameter as error:
                    raise error.named(self._request.graph.name(site.leaf)) from None
                if self._sums:
                    self._finite.note([site.leaf], smallest_sums(results).values())
                self._saver.save(site.leaf, results)

    def _results(
        self, use: ReachedUse, site: Site, cotangents: list[Tensor | None]
    ) -> dict[Extension, list[Any]]:
        """Return the results of one leaf; keep its gradient if packprop sums it."""
        leaf, statistics = site.leaf, self._statistics
        structure = site.structure_of(cotangents, use.layouts, ALL, self._request.chunk_sizes.held)
        if self._has_rows and isinstance(structure, Outer):
            of_all = Extent(0, self._request.graph.samples, self._request.graph.samples)
            structure = written_in_place(structure, leaf, lambda: self._result_of_rows(leaf), ONE, of_all)
        self._drop_spares(leaf)
        if id(leaf) in self._summed:
            total, *values = evaluate_together(structure, [summed_grad, *statistics])
            self._gradients[id(leaf)] = for_grad(leaf, total, values)
        else:
            values = evaluate_together(structure, statistics)
        return self._by_extension(values)

    def _result_of_rows(self, leaf: Tensor) -> Partial:
        """Return the result that per-sample gradients of a leaf are written to."""
        pairs = ((each, row) for each in self._request.extensions for row in each.rows)
        extension, row = next(pair for pair in pairs if pair[1].statistic is per_sample_grad)
        spare = None if self._spare is None else self._spare.pop((extension, id(leaf)), None)
        return Partial(row.over_v, row.over_n, spare)

    def _drop_spares(self, leaf: Tensor) -> None:
        """Free results of an earlier pass that no value takes the place of, before the values are made."""
        if self._spare:
            for extension in self._request.extensions:
                self._spare.pop((extension, id(leaf)), None)

    def _save_zeros(self, leaf: Tensor) -> None:
        """Save the values of a leaf that the pass has not reached: its gradients are zero."""
        shape = 1, self._request.graph.samples, *leaf.shape
        zeros = Dense(leaf.new_zeros(shape, dtype=accumulation_dtype(leaf.dtype)))
        with torch.no_grad():
            self._saver.save(leaf, self._by_extension([statistic(zeros) for statistic in self._statistics]))

    def _by_extension(self, values: list[Any]) -> dict[Extension, list[Any]]:
        """Return the results of all rows, by the extension that they belong to."""
        values = [whole(value, row.over_v, row.over_n) for value, row in zip(values, self._rows, strict=True)]
        if len(values) == 1:
            return {self._request.extensions[0]: values}
        rest = iter(values)
        return {each: [next(rest) for _ in each.rows] for each in self._request.extensions}

    def _take_in_chunks(self, use: ReachedUse, site: Site, cotangents: list[Tensor | None]) -> None:
        """Take the statistics of one leaf in chunks, because those of all samples did not fit into memory."""
        results = Accumulator(self._request, self._saver.save, None, dict)
        tasks = [*tasks_by_seed(self._request.extensions)[GRADIENT]]
        if id(site.leaf) in self._summed:
            tasks = [self._request.summed, *tasks]
        results.add_contributions(site.leaf, [(use, site, cotangents)], tasks, ONE)
        results.finish(site.leaf)
        self._gradients |= {id(leaf): total for leaf, total in results.take_gradients([site.leaf])}
        results.finite_check.warn(self._request.graph)
