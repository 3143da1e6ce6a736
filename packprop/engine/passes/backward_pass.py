"""One backward pass; this module alone decides on the order of seeds, on their uses, and on the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.curvature.columns import Columns
from packprop.engine.curvature.seeds import columns
from packprop.engine.functions.entry import ArrivedCotangents
from packprop.engine.functions.saved import explaining_checkpoints
from packprop.engine.passes.accumulator import Accumulator, Done, Log
from packprop.engine.passes.collector import Collector
from packprop.engine.passes.column_sweeps import ColumnSweeps, groups_of_uses
from packprop.engine.passes.gradient import Backward, GradientPass
from packprop.engine.passes.hessian import add_hessian, add_without_sweep
from packprop.engine.passes.partial_results import Begin, cubes_of_factors
from packprop.engine.passes.request import Request, Task, require_possible, tasks_by_seed
from packprop.engine.tensors.autocast import AutocastRegions
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.long_work import expect, long_work
from packprop.errors import PackpropError
from packprop.types import ENTRYWISE, EXACT, GRADIENT, GRADIENT_BY_TOKEN, HESSIAN, INPUTS, Extension, Seed


class BackwardPass:
    """The work of one backward pass.

    Args:
        request: The request of the pass.
        done: Called with a leaf when all of its results are complete.
        log: Called after each chunk of samples: with the leaf, its uses, their structure, the size of a chunk.
        begin: Called once, before the first value is kept; returns tensors that results may overwrite, by
            extension and leaf.
    """

    def __init__(self, request: Request, done: Done, log: Log | None = None, begin: Begin = dict) -> None:
        self._request = request
        self.results = Accumulator(request, done, log, begin)

    def run(self, backward: Backward | None) -> None:
        """Sweep every seed; sweep the gradient along with the user's own ``backward``, if there is one."""
        graph = self._request.graph
        autocast = AutocastRegions.now({leaf.device.type for leaf in graph.leaves()})

        def with_autocast(leaves: Sequence[Tensor] | None) -> None:
            assert backward is not None
            with autocast.switched(True), graph.hooks.heard():
                backward(leaves)

        user_pass = None if backward is None else with_autocast
        quiet = graph.hooks.quiet()
        with (
            long_work_of(self._request.extensions),
            torch.set_grad_enabled(self._request.create_graph),
            autocast.switched(False),
            quiet,
            explaining_checkpoints(),
        ):
            self._sweep_in_order(GradientPass(self._request, self.results, user_pass, autocast))
        self.results.finite_check.warn(graph)

    def _sweep_in_order(self, gradient_pass: GradientPass) -> None:
        """Check the request; take the Hessian, other double backward, inputs, columns, then the gradient."""
        graph, results, tasks = self._request.graph, self.results, tasks_by_seed(self._request.extensions)
        require_possible(self._request, tasks)
        sweeps = ColumnSweeps(self._request, results)
        hessian = tasks.pop(HESSIAN, [])
        exact = share_exact_columns(tasks)
        roots = made_columns(self._request, tasks)  # before any work: this refuses a loss without a rule
        if hessian:
            left = add_hessian(sweeps, hessian, roots.get(exact))
            if left is not None:
                tasks.setdefault(exact, []).extend(hessian)
                roots[exact] = left
            del left
        for seed in [seed for seed in tasks if seed.kind in ("hessian_mc", "graph")]:
            add_without_sweep(self._request, results, seed, tasks.pop(seed))
        inputs, gradient = tasks.get(INPUTS, []), tasks.get(GRADIENT, [])
        swept = sweeps.in_order(tasks, roots)
        if inputs:
            self._look_at_inputs(inputs)
        groups = groups_of_uses(self._request, waits=bool(gradient))
        counts = [sum(group.count for group in roots[seed]) for seed, _ in swept]
        expect("columns", len(groups) * sum(counts))
        if self._request.known is None and any(
            task.row.after is not None for _, work in swept for task in work
        ):
            expect("eigenvectors", cubes_of_factors(graph))
        for uses in groups:
            for number, (seed, work) in enumerate(swept, 1):
                last = not gradient and number == len(swept)
                sweeps.run(roots[seed], work, uses, last=last)
        roots.clear()  # they are as large as the inputs of the losses
        graph.release_losses()
        gradient_pass.run(gradient, apart=GRADIENT_BY_TOKEN in tasks)
        if not swept and not gradient:
            for leaf in graph.leaves():
                results.finish(leaf)

    def _look_at_inputs(self, tasks: list[Task]) -> None:
        """Take the statistics of inputs alone: visit every use without a cotangent."""
        uses = self._request.graph.uses
        collector = Collector(self.results, uses, tasks)
        for use in uses:
            collector.visit(use, ArrivedCotangents([None] * len(use.shapes)))


def long_work_of(extensions: Sequence[Extension], bar: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Time the work for these extensions inside the context; see NOTE [Long work]. A dry run is not timed."""
    if is_dry_run():
        return contextlib.nullcontext()
    cheaper = [f"{each.cheaper} in place of {each.name}" for each in extensions if each.cheaper]
    return long_work(", ".join(extension.name for extension in extensions), cheaper, bar)


def share_exact_columns(tasks: dict[Seed, list[Task]]) -> Seed:
    """Move tasks of ``EXACT`` to ``ENTRYWISE`` if both have tasks: any root of the Hessian will do.

    Returns the seed whose columns are the exact root of the loss's Hessian.
    """
    if ENTRYWISE not in tasks:
        return EXACT
    if EXACT in tasks:
        tasks[ENTRYWISE] = [*tasks[ENTRYWISE], *tasks.pop(EXACT)]
    return ENTRYWISE


def made_columns(request: Request, tasks: dict[Seed, list[Task]]) -> dict[Seed, list[Columns]]:
    """Return the columns of all seeds that consist of columns.

    Raises:
        PackpropError: If the samples of a loss have no entries.
    """
    made = {}
    for seed in dict.fromkeys([*request.draws, *tasks]):
        if seed.kind in ("ggn", "empirical", "jacobian") or seed.by_token:
            found = request.drawn.pop(seed, []) or columns(request.graph, seed, request.create_graph)
            found = [group for group in found if group.count]  # a loss may have no entries
            if not found:
                raise PackpropError(
                    request.graph.asked,
                    "the input of the loss, or the output of the model",
                    "its samples have no entries, so that there is nothing to feed in",
                    "leave such batches out",
                )
            if seed in tasks:
                made[seed] = found
    return made
