"""The sweep of the gradient, along with the user's own backward pass if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.statistics import forms_rows
from packprop.engine.curvature.double_backward import term_gradients
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.hooks import refusing_changed_sums
from packprop.engine.graph.site import Site
from packprop.engine.graph.sweep import SweepOptions, Watch, sweep
from packprop.engine.passes.accumulator import Accumulator
from packprop.engine.passes.clipped_sums import ClippedSums
from packprop.engine.passes.clipping import ASKED, Clip
from packprop.engine.passes.collector import Collector
from packprop.engine.passes.contributions import extents_of
from packprop.engine.passes.request import Request, Task
from packprop.engine.tensors.autocast import AutocastRegions
from packprop.engine.tensors.hooks import NOTHING
from packprop.errors import PackpropError

WORTH_SUMMING = 2**22
"""The number of multiplications from which on it pays not to compute a weight's gradient twice."""


Backward = Callable[[Sequence[Tensor] | None], None]
"""Runs the user's own pass: for the given leaves, or for all leaves if it gets ``None``."""


def changed_gradient() -> PackpropError:
    """Return the error for a hook that changes a gradient after packprop swept single samples separately."""
    return PackpropError(
        "Quantities of single samples were asked for.",
        "a hook on a tensor, a node or a module, which changed the gradient",
        "packprop computes these values in a separate pass, and calls none of your hooks there, so they would "
        "belong to the gradient without your hook. The separate pass is for backward(inputs=...), for tokens, "
        "for parameters that you compute from others and use more than once, and for extensions for modules",
        "remove the hook, or change .grad after the pass; or call backward() without inputs",
    )


class GradientPass:
    """The last part of a pass: statistics of the gradient's cotangents, and the user's own pass.

    Args:
        request: The request of the pass.
        results: Merges the statistics.
        backward: The user's own pass, if there is one.
        autocast: The regions that the user's pass runs in; packprop takes statistics outside of them.
    """

    def __init__(
        self, request: Request, results: Accumulator, backward: Backward | None, autocast: AutocastRegions
    ) -> None:
        self._request, self._results = request, results
        self._backward, self._autocast = backward, autocast

    def run(self, tasks: list[Task], *, apart: bool = False) -> None:
        """Take the statistics of some tasks, and run the user's pass.

        ``apart``: whether an earlier sweep took the gradients, so that no hook may change them in this pass.
        """
        graph = self._request.graph
        if self._request.clip is not None:
            self._sweep_clipped(tasks, self._request.clip)
        elif self._request.groups is not None:
            self._sweep_groups(tasks)
        elif not tasks:
            self._run_user_pass(swept=apart)
        elif (
            apart
            or self._backward is None
            or graph.ties_computed_parameters
            or graph.shards_computed_parameters
        ):
            self._sweep(tasks)
        else:
            self._watch(tasks, self._backward)

    def _sweep(self, tasks: list[Task]) -> None:
        """Sweep the gradient in a pass of its own."""
        graph = self._request.graph
        collector = Collector(self._results, graph.uses, tasks, last=True)
        self._sweep_roots(collector, SweepOptions(create_graph=self._request.create_graph))
        self._run_user_pass(swept=True)
        collector.flush()

    def _sweep_roots(self, collector: Collector, options: SweepOptions) -> None:
        graph = self._request.graph
        edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
        sweep(edges, graph.root_gradients(), graph.uses, collector.visit, options)

    def _sweep_groups(self, tasks: list[Task]) -> None:
        """Sweep the gradient, and hand that of training rows to the leaves. See NOTE [Probe rows]."""
        graph = self._request.graph
        leaves = graph.leaves()
        self._require_parameters_alone(
            "Probe rows were asked for.", "probes cannot be left out of its gradient"
        )
        first_tasks = {id(leaf): [self._request.summed] for leaf in leaves}
        collector = Collector(self._results, graph.uses, tasks, last=True, first_tasks=first_tasks)
        self._sweep_apart(collector, lambda: self._results.take_gradients(leaves))

    def _sweep_clipped(self, tasks: list[Task], clip: Clip) -> None:
        """Sweep the gradient, and hand clipped sums to the leaves. See NOTE [Clipping]."""
        graph = self._request.graph
        self._require_parameters_alone(ASKED, "its gradient would not be clipped")
        sums = ClippedSums(self._request, clip, self._results)
        for use in graph.uses:  # uses wait until all norms are known
            use.waits |= any(sums.keeps_contributions(site.leaf) for site in use.sites)
        collector = Collector(
            self._results, graph.uses, tasks, last=True, first_tasks=sums.tasks, keep=sums.keep
        )

        def take() -> list[tuple[Tensor, Tensor]]:
            found, gradients = sums.take()
            clip.tell(found)
            return gradients

        self._sweep_apart(collector, take)

    def _require_parameters_alone(self, asked: str, why: str) -> None:
        """Raise if a tensor requires gradients, but is no parameter of a use or of a term without samples."""
        graph = self._request.graph
        leaves = graph.leaves()
        _, others = graph.split_leaves(leaves)
        known = {id(leaf) for leaf in leaves} | set(graph.in_terms)
        unknown = [leaf for leaf in others if id(leaf) not in known]
        if unknown:
            raise PackpropError(
                asked,
                f"a tensor of shape {list(unknown[0].shape)} that requires a gradient, and is no parameter",
                why,
                "detach it, or take its gradient in a pass of its own",
            )

    def _sweep_apart(self, collector: Collector, take: Callable[[], list[tuple[Tensor, Tensor]]]) -> None:
        """Sweep the gradient without autograd's sums, and hand over the sums that ``take`` returns."""
        graph = self._request.graph
        terms = list(graph.in_terms.values())
        of_terms = term_gradients(graph, terms)
        self._sweep_roots(collector, SweepOptions(frees=not graph.kept and not graph.calls_nodes))
        collector.flush()
        gradients = take()
        gradients += [(leaf, term) for leaf, term in zip(terms, of_terms, strict=True) if term is not None]
        if self._backward is not None:
            with graph.hooks.heard():
                hand_over(gradients)

    def _watch(self, tasks: list[Task], backward: Backward) -> None:
        """Take the cotangents from the user's pass while it runs."""
        graph = self._request.graph
        statistics = [task.row.statistic for task in tasks if task.extension.subsampling is None]
        summed, others = summed_leaves(self._request, statistics)
        first_tasks = {id(leaf): [self._request.summed] for leaf in summed}
        collector = Collector(self._results, graph.uses, tasks, last=True, first_tasks=first_tasks)

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            with self._autocast.switched(False):
                collector.visit(use, cotangents)

        terms = term_gradients(graph, summed)
        watch = Watch(graph.uses, visit, graph.hooks)
        complete = False
        try:
            with graph.hooks.heard(), refusing_changed_sums(graph):
                backward(others if summed else None)
            complete = True
        finally:
            watch.close(complete)
        collector.flush()
        gradients = self._results.take_gradients(summed)
        gradients += [(leaf, term) for leaf, term in zip(summed, terms, strict=True) if term is not None]
        with graph.hooks.heard():
            hand_over(gradients)

    def _run_user_pass(self, *, swept: bool) -> None:
        """Run the user's own pass, if there is one; no hook may change gradients that are ``swept`` already."""
        hooks = self._request.graph.hooks
        if self._backward is not None:
            with hooks.heard(), hooks.refusing_changes(changed_gradient) if swept else NOTHING:
                self._backward(None)


class _HandOver(torch.autograd.Function):
    """Gives gradients to leaves. Only autograd refers to them then, so ``.grad`` takes them without a copy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        given = None, *ctx.gradients
        ctx.gradients.clear()
        return given


def hand_over(gradients: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to ``.grad`` through the leaves' own nodes, so that hooks on them run; empty the list."""
    if not gradients:
        return
    leaves, given = [leaf for leaf, _ in gradients], [gradient for _, gradient in gradients]
    gradients.clear()
    with torch.enable_grad():
        root = _HandOver.apply(given, *leaves)  # type: ignore[no-untyped-call]  # torch's own
    del given
    root.backward()


def summed_leaves(
    request: Request, statistics: Sequence[Callable[..., Any]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the leaves whose gradient packprop sums from per-sample gradients, and all other leaves.

    # NOTE [One product for two]
    The per-sample gradients of a weight that is shared over positions cost as many multiplications as the
    summed gradient. If packprop forms them anyway, it restricts autograd's pass to the other leaves, so
    that autograd does not compute the sum again. At the end, packprop hands the sums to their leaves
    through the leaves' own nodes, so that hooks on them run. It adds the gradients of terms that no sample
    enters. User hooks on tensors or modules in between, and processes that exchange gradients when a pass
    ends, would miss gradients in a restricted pass, and a hook on several leaves would run in both passes. In
    these cases packprop restricts nothing.
    """
    graph = request.graph
    if graph.hooks.are_any or request.create_graph:
        return [], []
    chosen: dict[int, Tensor] = {}
    for use in graph.uses:
        if any(_is_worth_summing(request, use, site, statistics) for site in use.sites):
            # with the bias: autograd computes the gradients of weight and bias in one function
            chosen |= {id(s.leaf): s.leaf for s in use.sites if s.direct and s.leaf.is_leaf}
    return graph.split_leaves(list(chosen.values())) if chosen else ([], [])


def _is_worth_summing(
    request: Request, use: ReachedUse, site: Site, statistics: Sequence[Callable[..., Any]]
) -> bool:
    samples = request.graph.samples
    extents = extents_of(use, site, samples, request.chunk_sizes.held)
    if extents is None:
        return False
    multiplications = extents.positions * site.leaf.numel() * samples
    return multiplications >= WORTH_SUMMING and any(forms_rows(each, extents) for each in statistics)
