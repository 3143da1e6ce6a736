"""Sweeps of columns: their chunks, the uses that they go to, and second passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from packprop.engine.algebra.monoid import Extent
from packprop.engine.curvature.columns import Columns
from packprop.engine.curvature.nonlinearities import OutputDiagonals
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.sweep import SweepOptions, Visit, sweep
from packprop.engine.passes.accumulator import Accumulator
from packprop.engine.passes.collector import Collector
from packprop.engine.passes.contributions import by_token, joint_structure, weighted_squares
from packprop.engine.passes.request import Request, Task
from packprop.engine.tensors.long_work import doing
from packprop.types import Seed


class ColumnSweeps:
    """Sweeps columns back to uses, chunk by chunk, and hands their cotangents on.

    Args:
        request: The request of the pass.
        results: Merges the statistics.
    """

    def __init__(self, request: Request, results: Accumulator) -> None:
        self.request, self.results = request, results

    def run(
        self,
        groups: list[Columns],
        tasks: list[Task],
        uses: Sequence[ReachedUse],
        *,
        last: bool = False,
        diagonals: OutputDiagonals | None = None,
    ) -> None:
        """Sweep all columns of some groups to some uses.

        Args:
            groups: Groups of columns, each with its own edges; results merge over all groups.
            tasks: The tasks at every leaf of these uses.
            uses: The uses.
            last: Whether the results of these leaves are complete afterwards.
            diagonals: Takes the squares of columns at uses that need only these squares.
        """
        total = sum(group.tokens for group in groups)
        before = 0
        for group in groups:
            for start, stop in group.chunks(columns_at_once(self.request, group, uses)):
                each = group.per_token
                extent = Extent(before + start // each, before - (-stop // each), total)
                final = last and group is groups[-1] and stop == group.count
                with doing("columns", stop - start):
                    self._run_chunk(group, range(start, stop), extent, tasks, uses, final, diagonals)
            before += group.tokens

    def _run_chunk(
        self,
        group: Columns,
        chunk: range,
        extent: Extent,
        tasks: list[Task],
        uses: Sequence[ReachedUse],
        last: bool,
        diagonals: OutputDiagonals | None,
    ) -> None:
        """Sweep some columns of a group; ``extent`` is their place among the columns of all groups."""
        start, stop = chunk.start, chunk.stop
        weights = None if group.weights is None else group.weights[start:stop]
        build = joint_structure if weights is None else weighted_squares(weights)
        if group.counted is not None:
            build = by_token(group.counted[start // group.per_token : -(-stop // group.per_token)])
        at_outputs = {use for use in uses if diagonals is not None and diagonals.are_sufficient(use)}
        collected = [use for use in uses if use not in at_outputs]
        collector = Collector(self.results, collected, tasks, last=last, columns=extent, build=build)

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            if use not in at_outputs or diagonals is None or weights is None:
                collector.visit(use, cotangents)
            else:
                diagonals.add_columns(use, cotangents, weights)

        sweep_chunk(group, chunk, uses, visit, self.request.create_graph)
        collector.flush()

    def in_order(
        self, tasks: Mapping[Seed, list[Task]], columns: Mapping[Seed, list[Columns]]
    ) -> list[tuple[Seed, list[Task]]]:
        """Return the seeds whose columns are swept, each with its tasks; second passes come last.

        # NOTE [Second pass]
        Corrected eigenvalues of Kronecker factors need the eigenvectors of all columns before packprop can
        rotate the first column. The cotangents of all columns would take as many times the memory of a backward
        pass as there are columns, and per-sample gradients would take more. So packprop sweeps the columns
        again: sampled ones with fresh draws (NOTE [Fresh draws], ``packprop/extensions/kronecker.py``), others
        unchanged. One sweep is enough if it brings all columns of a leaf at once, and they are not drawn anew
        (the empirical Fisher, a vectorised sweep). packprop then makes both passes when the sweep reaches the
        leaf, and the second pass reads the chunks that the first has kept (``kept_chunks.py``). The
        eigenvectors replace the results of the first pass, which are freed.
        """
        first = {seed: tasks[seed] for seed in columns}
        second: dict[Seed, list[Task]] = {}
        for seed, groups in columns.items():
            at_once = not seed.fresh and are_one_sweep(self.request, groups)
            if not at_once and any(task.row.after is not None for task in tasks[seed]):
                first[seed] = [task for task in tasks[seed] if task.row.after is None]
                second[seed] = [task for task in tasks[seed] if task.row.after is not None]
        return [(seed, work) for seed, work in [*first.items(), *second.items()] if work]


def sweep_chunk(
    group: Columns, chunk: range, uses: Sequence[ReachedUse], visit: Visit, create_graph: bool = False
) -> None:
    """Sweep some columns of a group; a single column goes without an axis of columns."""
    seeds, batched = group.chunk(chunk.start, chunk.stop), len(chunk) > 1
    given = seeds if batched else [seed[0] for seed in seeds]
    sweep(group.edges, given, uses, visit, SweepOptions(batched=batched, create_graph=create_graph))


def columns_at_once(request: Request, group: Columns, uses: Sequence[ReachedUse]) -> int:
    """Return the number of columns in one sweep: 1 if packprop has to recompute inputs for each sweep."""
    if not request.graph.holds_inputs:
        return 1
    return request.chunk_sizes.columns_at_once(group.count, uses, group.weights is not None)


def are_one_sweep(request: Request, groups: Sequence[Columns]) -> bool:
    """Tell whether a single sweep to all uses takes all columns of some groups."""
    return len(groups) == 1 and columns_at_once(request, groups[0], request.graph.uses) >= groups[0].count


def groups_of_uses(request: Request, waits: bool) -> list[list[ReachedUse]]:
    """Split the uses into groups; all columns are swept to one group after the other.

    All uses of a leaf are in one group. There is a single group unless ``ChunkSizes.parameters`` limits its
    size. Several groups pay if a hook can take the results of one group away before the next group begins. They
    do not pay if every result ``waits`` for the gradient's pass.
    """
    graph, most = request.graph, request.chunk_sizes.parameters
    if most is None or waits:
        return [graph.uses]
    groups: list[tuple[list[ReachedUse], set[int]]] = []
    for use in graph.uses:
        leaves = {id(site.leaf) for site in use.sites}
        uses = [use]
        for group in [group for group in groups if group[1] & leaves]:
            groups.remove(group)
            uses, leaves = group[0] + uses, group[1] | leaves
        if groups and len(groups[-1][1] | leaves) <= most:
            uses, leaves = groups[-1][0] + uses, groups.pop()[1] | leaves
        groups.append((uses, leaves))
    # a sweep to a few uses holds the cotangents at all of them, so each use is an end
    return [[replace(use, is_end=True) for use in uses] for uses, _ in groups]
