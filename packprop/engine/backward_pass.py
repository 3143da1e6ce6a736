"""One backward pass: which seeds are swept in which order, over which uses, with what passes; nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.formation import forms_rows
from packprop.algebra.partial import ONE, Extent
from packprop.algebra.structures import Dense, Diagonal
from packprop.curvature.columns import Columns
from packprop.curvature.double_backward import estimated_diagonals, hessian_columns, parameter_diagonals
from packprop.curvature.nonlinearities import nonlinearity_terms
from packprop.curvature.output_diagonals import OutputDiagonals
from packprop.curvature.routes import choose_routes
from packprop.curvature.seeds import columns
from packprop.curvature.swept_uses import swept_uses
from packprop.engine.accumulator import SUMMED, Accumulator, Begin, Done, Log, Task, by_subsampling
from packprop.engine.autocast import AutocastRegions
from packprop.engine.chunks import ChunkSizes, starts
from packprop.engine.collector import Collector
from packprop.engine.contributions import diagonal, extents_of, joint_structure, products_with, weighted_squares
from packprop.errors import BadInput, PackpropError
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.restriction import split_leaves
from packprop.graph.site import Site
from packprop.graph.sweep import SweepOptions, Watch, sweep
from packprop.recording.regions import opened
from packprop.types import ENTRYWISE, EXACT, GRADIENT, HESSIAN, INPUTS, Extension, Seed

WORTH_SUMMING = 2**24
"""Multiplications of a weight's gradient from which on it is worth an effort not to compute it twice."""


Backward = Callable[[Sequence[Tensor] | None], None]
"""Runs the user's own pass; restricted to some leaves if these are given."""


class BackwardPass:
    """The work of one backward pass.

    Args:
        graph: What the pass goes through, with its samples located.
        extensions: What was asked for.
        create_graph: Whether results shall be differentiable.
        done: Called with a leaf when all of its results are there.
        chunks: How much is taken at once.
        log: Called with what is taken of a leaf: the leaf, its uses, the structure, samples in a chunk.
        begin: Called once, before the first value is kept; returns tensors that results may be written over, by
            extension and leaf.
    """

    def __init__(
        self,
        graph: Graph,
        extensions: Sequence[Extension],
        create_graph: bool,
        done: Done,
        chunk_sizes: ChunkSizes,
        log: Log | None = None,
        begin: Begin = dict,
    ) -> None:
        self.graph, self.extensions, self.create_graph, self.chunk_sizes = (
            graph,
            extensions,
            create_graph,
            chunk_sizes,
        )
        self.results = Accumulator(graph, extensions, create_graph, chunk_sizes, done, log, begin)
        self._autocast = AutocastRegions(())

    def run(self, backward: Backward | None) -> None:
        """Sweep every seed; the gradient along with the user's own ``backward`` pass, if there is one."""
        self._autocast = AutocastRegions.now({leaf.device.type for leaf in self.graph.leaves()})

        def as_begun(leaves: Sequence[Tensor] | None) -> None:
            assert backward is not None
            with self._autocast.switched(True):
                backward(leaves)

        with torch.set_grad_enabled(self.create_graph), self._autocast.switched(False):
            self._run(None if backward is None else as_begun)
        self.results.finite_check.warn(self.graph)

    def _run(self, backward: Backward | None) -> None:
        tasks: dict[Seed, list[Task]] = {}
        for extension in self.extensions:
            for index, row in enumerate(extension.rows):
                tasks.setdefault(row.seed, []).append(Task(extension, index, row))
        _check_subsampling(self.extensions, self.graph.samples)
        _check_second_passes(self.extensions)
        if self.graph.checkpoints and any(seed.kind in ("hessian", "hessian_mc", "graph") for seed in tasks):
            raise PackpropError(
                "Second derivatives were asked for.",
                "a part of the model inside torch.utils.checkpoint",
                "reentrant checkpointing cannot be differentiated twice",
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        hessian = tasks.pop(HESSIAN, [])
        exact = ENTRYWISE if ENTRYWISE in tasks else EXACT  # any root of the Hessian will do for the latter
        if EXACT in tasks:
            tasks.setdefault(exact, []).extend([] if exact == EXACT else tasks.pop(EXACT))
        # everything that can be refused is refused before any work
        curved = {
            seed: columns(self.graph, seed, self.create_graph)
            for seed in tasks
            if seed.kind in ("ggn", "empirical", "jacobian")
        }
        roots = self._hessian(hessian, curved.get(exact)) if hessian else None
        if roots is not None:
            tasks.setdefault(exact, []).extend(hessian)
            curved[exact] = roots
        for seed in [seed for seed in tasks if seed.kind in ("hessian_mc", "graph")]:
            self._without_sweep(seed, tasks.pop(seed))
        swept = self._passes(tasks, curved)
        inputs, gradient = tasks.get(INPUTS, []), tasks.get(GRADIENT, [])
        if inputs:
            self._inputs(inputs)
        for found in self._in_turn(waits=bool(gradient)):
            for number, (seed, work) in enumerate(swept, 1):
                self._columns(curved[seed], work, not gradient and number == len(swept), found)
        curved.clear()  # roots are as large as what the losses were given
        roots = None
        self.graph.release_losses()
        self._gradient(gradient, backward)
        if not swept and not gradient:
            for leaf in self.graph.leaves():
                self.results.finish(leaf)

    def _passes(
        self, tasks: Mapping[Seed, list[Task]], curved: Mapping[Seed, list[Columns]]
    ) -> list[tuple[Seed, list[Task]]]:
        """The columns that are swept, and what for; at the end those for rows of a second pass.

        # NOTE [Second pass]
        Corrected eigenvalues of Kronecker factors need the eigenvectors of all columns before the first column
        can be looked at. Keeping cotangents of all columns until then would take their number times the memory
        of a backward pass, and keeping per-sample gradients more; so the same columns are swept again, with
        their draws. Where one sweep brings all columns of a leaf at once (a single draw, the empirical
        Fisher, a vectorised sweep), both passes are made when the leaf is met, and there is no second sweep.
        What was made of the first pass takes the place of its results, which are gone then.
        """
        first = {seed: tasks[seed] for seed in curved}
        second: dict[Seed, list[Task]] = {}
        for seed, groups in curved.items():
            once = len(groups) == 1 and self._columns_at_once(groups[0], self.graph.uses) >= groups[0].count
            if not once and any(task.row.after is not None for task in tasks[seed]):
                first[seed] = [task for task in tasks[seed] if task.row.after is None]
                second[seed] = [task for task in tasks[seed] if task.row.after is not None]
        return [(seed, work) for seed, work in [*first.items(), *second.items()] if work]

    def _hessian(self, tasks: list[Task], roots: list[Columns] | None) -> list[Columns] | None:
        """All of the Hessian but what the GGN's columns give; these, if they are left for all leaves.

        See NOTE [Hessian diagonal].
        """
        graph, create_graph = self.graph, self.create_graph
        per_sample = any(t.row.over_n.grows or t.extension.subsampling is not None for t in tasks)
        if roots is None:  # a loss without a root has second derivatives, too
            with contextlib.suppress(PackpropError):
                roots = columns(graph, EXACT, create_graph)
        route = choose_routes(graph, roots is not None, per_sample, create_graph)
        if route.is_gauss_newton:
            return roots
        found = swept_uses(graph, route)
        diagonals = OutputDiagonals(graph, route, found)
        for term in nonlinearity_terms(graph, route, found, diagonals, create_graph):
            self._columns([term.columns], tasks, False, term.uses, diagonals)
        for f, cotangents in diagonals.take():
            for site in f.take():
                self.results.take(site.leaf, [(f, site, cotangents)], tasks, ONE, diagonal)
        for leaf, values in parameter_diagonals(graph, route.parameter, per_sample, create_graph):
            for chosen, group in by_subsampling(tasks):
                own = Diagonal(Dense((values if chosen is None else values[chosen])[None]))
                for task in group:
                    self.results.merge(leaf, task, task.row.statistic(own))
        for uses, leaves in route.output:
            for units, products in hessian_columns(graph, uses, create_graph):
                for leaf in leaves:
                    left, right = (
                        [(f, s, t) for f, t in zip(uses, each, strict=True) for s in f.take() if s.leaf is leaf]
                        for each in (products, units)
                    )
                    self.results.take(leaf, left, tasks, ONE, products_with(right))
        if route.output or route.parameter:
            if found and roots is not None:
                self._columns(roots, tasks, False, found)
            return None
        return roots

    def _without_sweep(self, seed: Seed, tasks: list[Task]) -> None:
        """Values that come from double backward in the parameters themselves."""
        leaves = self.graph.leaves()
        if seed.kind == "hessian_mc":
            for leaf, values in estimated_diagonals(self.graph, leaves, seed, self.create_graph):
                for task in tasks:
                    self.results.merge(leaf, task, task.row.statistic(Diagonal(Dense(values[None, None]))))
            return
        for task in tasks:
            for leaf, product in task.row.statistic(self.graph):
                self.results.merge(leaf, task, product)

    def _inputs(self, tasks: list[Task]) -> None:
        """Statistics of the inputs alone: every use is visited, and nothing arrives."""
        collect = Collector(self.results, self.graph.uses, tasks, False, ONE)
        with opened((found.recorded.source for found in self.graph.uses), self.create_graph):
            for found in self.graph.uses:
                collect.visit(found, [None] * len(found.recorded.shapes))

    def _gradient(self, tasks: list[Task], backward: Backward | None) -> None:
        if not tasks:
            self._last_pass(backward)
            return
        if backward is None or self.graph.ties_computed_parameters:
            collect = Collector(self.results, self.graph.uses, tasks, True, ONE)
            graph = self.graph
            edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
            seeds = graph.root_gradients()
            sweep(edges, seeds, graph.uses, collect.visit, SweepOptions(create_graph=self.create_graph))
            self._last_pass(backward)
            collect.flush()
            return
        summing, others = self._summing(tasks)
        more = {id(leaf): [SUMMED] for leaf in summing}
        collect = Collector(self.results, self.graph.uses, tasks, True, ONE, more)

        def visit(found: ReachedUse, cotangents: list[Tensor | None]) -> None:
            with self._autocast.switched(False):
                collect.visit(found, cotangents)
            if not self.graph.kept:
                found.release()

        with opened((found.recorded.source for found in self.graph.uses), self.create_graph):
            watch = Watch(self.graph.uses, visit, accumulate=True)
            complete = False
            try:
                backward(others if summing else None)
                complete = True
            finally:
                watch.close(complete)
        collect.flush()
        made = self.results.gradients(summing)
        if made:
            torch.autograd.backward([leaf for leaf, _ in made], [gradient for _, gradient in made])

    def _summing(self, tasks: list[Task]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves whose gradient is summed from per-sample ones, and the leaves that are left to autograd.

        # NOTE [One product for two]
        A weight that is shared over positions has per-sample gradients that cost as many multiplications as
        the summed one. Where they are formed anyway autograd is kept from computing the sum again: its pass
        is restricted to the other leaves, and these are given theirs at the end, through their own nodes, so
        that hooks on them run.
        """
        if self.create_graph or self.graph.checkpoints:  # a reentrant checkpoint refuses a restricted pass
            return [], []
        statistics = [task.row.statistic for task in tasks if task.extension.subsampling is None]
        graph = self.graph
        chosen: dict[int, Tensor] = {}
        for found in graph.uses:
            if any(self._worth_summing(found, site, statistics) for site in found.sites):
                # a bias, too: autograd computes gradients of weight and bias by one function
                chosen |= {id(s.leaf): s.leaf for s in found.sites if s.direct and s.leaf.is_leaf}
        return split_leaves(graph, list(chosen.values())) if chosen else ([], [])

    def _worth_summing(self, found: ReachedUse, site: Site, statistics: Sequence[Callable[..., Any]]) -> bool:
        extents = extents_of(found, site, self.graph.samples, self.chunk_sizes.held)
        if extents is None:
            return False
        work = extents.positions * site.leaf.numel() * self.graph.samples
        return work >= WORTH_SUMMING and any(forms_rows(statistic, extents) for statistic in statistics)

    def _in_turn(self, waits: bool) -> list[list[ReachedUse]]:
        """Uses by groups that columns are swept for one after the other, with all uses of a leaf in one.

        That is of use where results can be finished, and taken away by a hook, before the next are begun;
        not where each ``waits`` for the gradient's pass.
        """
        most = self.chunk_sizes.parameters
        if most is None or waits or self.graph.checkpoints:  # a checkpoint's node is run for all of its uses
            return [self.graph.uses]
        groups: list[tuple[list[ReachedUse], set[int]]] = []
        for found in self.graph.uses:
            leaves = {id(site.leaf) for site in found.sites}
            uses = [found]
            for group in [group for group in groups if group[1] & leaves]:
                groups.remove(group)
                uses, leaves = group[0] + uses, group[1] | leaves
            if groups and len(groups[-1][1] | leaves) <= most:
                uses, leaves = groups[-1][0] + uses, groups.pop()[1] | leaves
            groups.append((uses, leaves))
        # what is held of so few are the cotangents at all of them: each is an end of its own
        return [[replace(f, is_end=True) for f in uses] for uses, _ in groups]

    def _last_pass(self, backward: Backward | None) -> None:
        """The user's own pass, when all that was asked for is there."""
        if backward is None:
            return
        if not self.graph.kept:
            for found in self.graph.uses:
                found.release()
        backward(None)

    def _columns(
        self,
        groups: list[Columns],
        tasks: list[Task],
        last: bool,
        found: Sequence[ReachedUse],
        diagonals: OutputDiagonals | None = None,
    ) -> None:
        summed = {f for f in found if diagonals is not None and diagonals.are_sufficient(f)}
        whole = [f for f in found if f not in summed]
        total = sum(group.count for group in groups)
        before = 0
        for group in groups:
            step = self._columns_at_once(group, found)
            for start in starts(group.count, step):
                stop = min(group.count, start + step)
                seeds = group.chunk(start, stop)
                extent = Extent(before + start, before + stop, total)
                weights = None if group.weights is None else group.weights[start:stop]
                build = joint_structure if weights is None else weighted_squares(weights)
                final = last and extent.stop == total
                collect = Collector(self.results, whole, tasks, final, extent, build=build)

                def visit(
                    f: ReachedUse,
                    cotangents: list[Tensor | None],
                    collect: Collector = collect,
                    weights: Tensor | None = weights,
                ) -> None:
                    if f not in summed or diagonals is None or weights is None:
                        collect.visit(f, cotangents)
                    else:
                        diagonals.add_columns(f, cotangents, weights)

                batched = stop - start > 1
                options = SweepOptions(batched, self.create_graph, unhooked=group.unhooked)
                sweep(group.edges, seeds if batched else [seed[0] for seed in seeds], found, visit, options)
                collect.flush()
            before += group.count

    def _columns_at_once(self, group: Columns, found: Sequence[ReachedUse]) -> int:
        """All of the graph must be there: what is computed again is not the same for all columns."""
        if not self.graph.holds_inputs:
            return 1
        return self.chunk_sizes.columns_at_once(group.count, found, group.weights is not None)


def _check_second_passes(extensions: Sequence[Extension]) -> None:
    for extension in extensions:
        for index, row in enumerate(extension.rows):
            if row.after is None:
                continue
            before, swept = extension.rows[:index], ("gradient", "ggn", "empirical", "jacobian")
            fits = row.seed.kind in swept and all(each.seed in (INPUTS, row.seed) for each in before)
            if not fits or index != len(extension.rows) - 1:
                raise BadInput(
                    f"{extension.name}() was asked for.",
                    f"row {index}, which comes after others",
                    "a second pass is one over the columns of the first",
                    "make it the last row, of a seed that is swept, behind rows of that seed or of inputs",
                )


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
