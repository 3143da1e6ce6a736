"""Sweeps of columns: how many at once, to which uses, and again where rows need a second pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from packprop.algebra.partial import Extent
from packprop.curvature.columns import Columns
from packprop.curvature.output_diagonals import OutputDiagonals
from packprop.engine.accumulator import Accumulator
from packprop.engine.collector import Collector
from packprop.engine.contributions import by_token, joint_structure, weighted_squares
from packprop.engine.request import Request, Task
from packprop.graph.graph import ReachedUse
from packprop.graph.sweep import SweepOptions, sweep
from packprop.tensors.long_work import doing
from packprop.types import Seed


class ColumnSweeps:
    """Sweeps columns back to uses, chunk by chunk, and hands their cotangents on.

    Args:
        request: What the pass is asked for.
        results: What statistics are merged into.
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
            groups: Columns that are fed in together; results merge over all groups.
            tasks: What is asked of every leaf of these uses.
            uses: The uses.
            last: Whether the results of these leaves are complete afterwards.
            diagonals: Takes the squares of columns at the uses that need no more of them.
        """
        at_outputs = {use for use in uses if diagonals is not None and diagonals.are_sufficient(use)}
        collected = [use for use in uses if use not in at_outputs]
        total = sum(group.tokens for group in groups)
        before = 0
        for group in groups:
            for start, stop in group.chunks(self.columns_at_once(group, uses)):
                each = group.per_token
                extent = Extent(before + start // each, before - (-stop // each), total)
                final = last and group is groups[-1] and stop == group.count
                with doing("columns", stop - start):
                    self._run_chunk(group, start, stop, extent, tasks, uses, collected, final, diagonals)
            before += group.tokens

    def _run_chunk(
        self,
        group: Columns,
        start: int,
        stop: int,
        extent: Extent,
        tasks: list[Task],
        uses: Sequence[ReachedUse],
        collected: Sequence[ReachedUse],
        last: bool,
        diagonals: OutputDiagonals | None,
    ) -> None:
        """Sweep some columns of a group; their results are the ``extent`` of all."""
        seeds = group.chunk(start, stop)
        weights = None if group.weights is None else group.weights[start:stop]
        build = joint_structure if weights is None else weighted_squares(weights)
        if group.counted is not None:
            build = by_token(group.counted[start // group.per_token : -(-stop // group.per_token)])
        collector = Collector(self.results, collected, tasks, last=last, columns=extent, build=build)
        at_outputs = set(uses) - set(collected)

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            if use not in at_outputs or diagonals is None or weights is None:
                collector.visit(use, cotangents)
            else:
                diagonals.add_columns(use, cotangents, weights)

        sweep(
            group.edges,
            seeds if stop - start > 1 else [seed[0] for seed in seeds],
            uses,
            visit,
            SweepOptions(
                batched=stop - start > 1,
                create_graph=self.request.create_graph,
            ),
        )
        collector.flush()

    def columns_at_once(self, group: Columns, uses: Sequence[ReachedUse]) -> int:
        """How many columns one sweep takes: one where inputs are recomputed, which is done column by column."""
        if not self.request.graph.holds_inputs:
            return 1
        return self.request.chunk_sizes.columns_at_once(group.count, uses, group.weights is not None)

    def in_order(
        self, tasks: Mapping[Seed, list[Task]], columns: Mapping[Seed, list[Columns]]
    ) -> list[tuple[Seed, list[Task]]]:
        """The seeds whose columns are swept, each with its tasks; those for rows of a second pass at the end.

        # NOTE [Second pass]
        Corrected eigenvalues of Kronecker factors need the eigenvectors of all columns before the first column
        can be rotated. To keep the cotangents of all columns until then would take their number times the
        memory of a backward pass, and to keep per-sample gradients more. So columns are swept again: sampled
        ones with fresh draws (NOTE [Fresh draws], ``packprop/extensions/kronecker.py``), others as they were.
        Where one sweep brings all columns of a leaf at once, and they are not drawn anew (the empirical Fisher,
        a vectorised sweep), both passes are made when the sweep meets the leaf, and there is no second sweep;
        the second pass then finds what the first has kept for it (``kept_chunks.py``). What is made of the
        results of the first pass takes their place; the results are gone then.
        """
        first = {seed: tasks[seed] for seed in columns}
        second: dict[Seed, list[Task]] = {}
        for seed, groups in columns.items():
            at_once = (
                not seed.fresh
                and len(groups) == 1
                and self.columns_at_once(groups[0], self.request.graph.uses) >= groups[0].count
            )
            if not at_once and any(task.row.after is not None for task in tasks[seed]):
                first[seed] = [task for task in tasks[seed] if task.row.after is None]
                second[seed] = [task for task in tasks[seed] if task.row.after is not None]
        return [(seed, work) for seed, work in [*first.items(), *second.items()] if work]


def groups_of_uses(request: Request, waits: bool) -> list[list[ReachedUse]]:
    """Groups of uses; all columns are swept to one group after the other. All uses of a leaf are in one group.

    There is one group unless ``ChunkSizes.parameters`` limits it. Several groups pay where results can be
    finished, and taken away by a hook, before the next are begun; not where each ``waits`` for the gradient's
    pass.
    """
    graph, most = request.graph, request.chunk_sizes.parameters
    if most is None or waits or graph.checkpoints:  # a checkpoint's node is run for all of its uses
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
    # a sweep to so few uses holds the cotangents at all of them: each use is an end of its own
    return [[replace(use, is_end=True) for use in uses] for uses, _ in groups]
