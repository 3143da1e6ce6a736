"""Pull seeds back to the outputs of uses, one column at a time or many at once."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from packprop.engine.functions.entry import ArrivedCotangents
from packprop.engine.functions.nodes import MASKS, name_of_node
from packprop.engine.graph.checkpoint_uses import ReentrantInputs, walk_again
from packprop.engine.graph.graph import Graph, ReachedUse, ReentrantCheckpoint
from packprop.engine.graph.hooks import refusing_changed_sums
from packprop.engine.graph.pull import pull_columns
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.reentrant import refused
from packprop.engine.tensors.hooks import Hooks

Visit = Callable[[ReachedUse, list[Tensor | None]], None]
"""A function of a use and the cotangents at its outputs ``[v, *y]``; ``None`` where nothing arrived."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep.

    Args:
        batched: Whether one vectorised pass pulls all columns back, and holds all cotangents at once.
        create_graph: Whether the cotangents are differentiable.
        needs_inputs: Whether visits need the inputs of uses.
        unmasked: Whether functions that drop entries by their values pass all of them on; see
            NOTE [Hidden mixing]. The vectors that arrive are then no cotangents.
        frees: Whether the sweep is the last pass through the graph, and frees it along the way.
    """

    batched: bool = False
    create_graph: bool = False
    needs_inputs: bool = True
    unmasked: bool = False
    frees: bool = False


ONE_COLUMN = SweepOptions()
NO_HOOKS = Hooks()
ONE_COLUMN_WITHOUT_INPUTS = SweepOptions(needs_inputs=False)


def checkpoints_of(uses: Sequence[ReachedUse]) -> list[ReentrantCheckpoint]:
    """Return the reentrant checkpoints that contain some uses, each once."""
    return list({id(use.checkpoint): use.checkpoint for use in uses if use.checkpoint is not None}.values())


def empty_checkpoints(uses: Sequence[ReachedUse]) -> list[ReentrantCheckpoint]:
    """Return the reentrant checkpoints without uses that sweeps to some uses may come through, each once."""
    return list({id(checkpoint): checkpoint for use in uses for checkpoint in use.through}.values())


@contextlib.contextmanager
def passing_nothing(checkpoints: Sequence[ReentrantCheckpoint]) -> Iterator[None]:
    """Make derivatives end at reentrant checkpoints, where PyTorch's own function raises an error."""

    def nothing(count: int, *_: Tensor | None) -> tuple[None, ...]:
        return (None,) * count

    for checkpoint in checkpoints:
        checkpoint.node.apply = functools.partial(nothing, 2 + len(checkpoint.node.inputs))
    try:
        yield
    finally:
        for checkpoint in checkpoints:
            checkpoint.node.__dict__.pop("apply", None)


class Watch:
    """Hooks that hand the cotangents at uses to ``visit`` while a backward pass runs.

    Args:
        uses: The uses to watch.
        visit: Called with a use and the cotangents at its outputs ``[1, *y]``, as soon as all have arrived.
        needs_inputs: Whether visits need the inputs of uses; a visit waits for inputs that are recomputed.
        accumulate: Whether the pass accumulates gradients of leaves, as the user's own pass does.
        hooks: Hooks of the user that run in this pass, but not while visits differentiate.
        options: Options of the sweep, for sweeps inside reentrant checkpoints.
        empty: Reentrant checkpoints without uses on the way, where PyTorch's own function raises an error.
    """

    def __init__(
        self,
        uses: Sequence[ReachedUse],
        visit: Visit,
        needs_inputs: bool = True,
        accumulate: bool = False,
        hooks: Hooks = NO_HOOKS,
        options: SweepOptions = ONE_COLUMN,
        empty: Sequence[ReentrantCheckpoint] = (),
    ) -> None:
        self._hooks = hooks
        self._visit, self._needs_inputs, self._accumulate = visit, needs_inputs, accumulate
        self._options = options
        self._late: dict[ReachedUse, list[Tensor | None]] = {}  # all cotangents are there, inputs are not
        self._pending: dict[ReachedUse, list[Tensor | None]] = {}  # some cotangents are missing
        self._missing: dict[ReachedUse, int] = {}  # the number of these
        self._visiting = False
        self._thread, self._context = threading.get_ident(), contextvars.copy_context()
        self._handles = [
            node.register_prehook(self._in_context(self._hook(use, index, output)))
            for use in uses
            for index, (node, output) in use.nodes.items()
        ]
        self._checkpoints = [*checkpoints_of(uses), *empty]
        for checkpoint in self._checkpoints:
            # the engine calls ``apply``: the watch replaces it on this node alone, for as long as it lasts
            checkpoint.node.apply = self._in_context(functools.partial(self._run_checkpoint, checkpoint))
        if needs_inputs:  # the node's own function may recompute the inputs
            self._handles += [
                node.register_hook(self._in_context(lambda *_: self._catch_up()))
                for use in uses
                if use.recorded.source is not None
                for node, _ in use.nodes.values()
            ]

    def _in_context(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook with this thread's context variables: autograd has a thread for each accelerator."""

        def run(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                return hook(*arguments)
            return self._context.copy().run(hook, *arguments)

        return run

    def _hook(self, use: ReachedUse, index: int, output: int) -> Callable[[Any], None]:
        def note_cotangent(gradients: Sequence[Tensor | None]) -> None:
            if self._visiting:  # a visit pulls back through this very node
                return
            self._catch_up()
            cotangent = gradients[output]
            self.note(use, index, None if cotangent is None else cotangent.unsqueeze(0))

        return note_cotangent

    def _run_checkpoint(
        self, checkpoint: ReentrantCheckpoint, *cotangents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run a reentrant checkpoint again and sweep it, in place of its node's own backward pass."""
        rerun, graph = walk_again(checkpoint)
        use_outside = dict(zip(graph.uses, checkpoint.uses, strict=True))

        def visit(inside: ReachedUse, cotangents: list[Tensor | None]) -> None:
            use = use_outside[inside]
            if self._needs_inputs:
                assert isinstance(use.recorded.source, ReentrantInputs)
                use.recorded.source.live = inside.entries()
            self._call(use, cotangents)

        pairs = [
            (value, cotangent)
            for number, (value, cotangent) in enumerate(zip(rerun.outputs, cotangents, strict=True))
            if value is not None and value.requires_grad and cotangent is not None
            if self._accumulate or number in checkpoint.reached
        ]
        outputs, seeds = [value for value, _ in pairs], [cotangent for _, cotangent in pairs]
        leaves = [value for value in rerun.inputs if isinstance(value, Tensor) and value.requires_grad]
        gradients: Sequence[Tensor | None]
        if self._accumulate:
            self._accumulate_in(graph, outputs, seeds, visit)
            gradients = [leaf.grad for leaf in leaves]
        else:
            edges = [get_gradient_edge(value) for value in outputs]
            options = replace(self._options, needs_inputs=self._needs_inputs, batched=False, frees=False)
            with graph.hooks.quiet():
                empty = [] if graph.uses else graph.checkpoints
                gradients = sweep(edges, seeds, graph.uses, visit, options, leaves, empty)
        graph.drop_checkpoint_uses()
        return rerun.gradients(dict(zip(map(id, leaves), gradients, strict=True)))

    def _accumulate_in(
        self, graph: Graph, outputs: Sequence[Tensor], seeds: Sequence[Tensor], visit: Visit
    ) -> None:
        """Accumulate gradients in a pass through a checkpoint's graph, and watch the uses in it."""
        graph.hold(False)
        watch = Watch(graph.uses, visit, self._needs_inputs, accumulate=True, hooks=graph.hooks)
        complete = False
        try:
            with refusing_changed_sums(graph):
                torch.autograd.backward(outputs, seeds)
            complete = True
        finally:
            watch.close(complete)

    def note(self, use: ReachedUse, index: int, cotangent: Tensor | None) -> None:
        """Note one cotangent ``[v, *y]``, and visit the use if it was the last."""
        nothing = ArrivedCotangents([None] * len(use.recorded.shapes))
        cotangents = self._pending.setdefault(use, nothing)
        cotangents[index] = cotangent
        missing = self._missing[use] = self._missing.get(use, len(use.nodes)) - 1
        if missing == 0:
            self._finish(use)

    def _finish(self, use: ReachedUse) -> None:
        cotangents = self._pending.pop(use)
        del self._missing[use]
        if all(cotangent is None for cotangent in cotangents):
            return
        if self._needs_inputs and not use.is_ready():
            self._late[use] = cotangents
        else:
            self._call(use, cotangents)

    def _catch_up(self) -> None:
        """Visit uses whose inputs have arrived in the meantime."""
        if self._visiting:
            return
        for use in [use for use in self._late if use.is_ready()]:
            self._call(use, self._late.pop(use))

    def _call(self, use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        self._visiting = True
        try:
            with self._hooks.quiet():
                self._visit(use, cotangents)
        finally:
            self._visiting = False

    def close(self, complete: bool = True) -> None:
        """Remove the hooks; if the pass is complete, visit uses with outputs that it did not reach."""
        for handle in self._handles:
            handle.remove()
        for checkpoint in self._checkpoints:
            checkpoint.node.__dict__.pop("apply", None)
        if complete:
            for use in list(self._pending):
                self._finish(use)
            for use in list(self._late):
                self._call(use, self._late.pop(use))


def sweep(
    outputs: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    uses: Sequence[ReachedUse],
    visit: Visit,
    options: SweepOptions = ONE_COLUMN,
    leaves: Sequence[Tensor] = (),
    empty: Sequence[ReentrantCheckpoint] = (),
) -> Sequence[Tensor | None]:
    """Pull one column (or many) back from ``outputs`` to every use that it reaches.

    Args:
        outputs: The edges where the seeds are fed in.
        seeds: One for each output; with a leading axis of columns ``[v, *f]`` if ``options.batched``.
        uses: The uses to visit. The sweep ends at those without a use upstream, and computes no gradient of a
            weight.
        visit: Called as ``visit(use, cotangents)``; cotangents have a leading axis of columns.
        options: Options of the sweep.
        leaves: Tensors whose gradients the sweep returns.
        empty: Reentrant checkpoints without uses that a sweep to the leaves may come through.
    """
    batched, create_graph = options.batched, options.create_graph
    calling = {use: _operands_of_called(use) for use in uses} if options.needs_inputs and not batched else {}
    watched = [] if batched else [use for use in uses if not use.is_end or calling.get(use)]
    ends = [
        (use, index, GradientEdge(node, output))
        for use in uses
        if batched or (use.is_end and not calling.get(use))
        for index, (node, output) in use.nodes.items()
    ]
    above_checkpoints = [_edge_above(checkpoint) for checkpoint in checkpoints_of(uses)]
    called = [edge for edges in calling.values() for edge in edges]
    wanted = [
        *(edge for _, _, edge in ends),
        *above_checkpoints,
        *called,
        *map(get_gradient_edge, leaves),
    ]
    gradients: Sequence[Tensor | None]
    empty = [*empty, *empty_checkpoints(uses)]
    watch = Watch(watched, visit, options.needs_inputs, options=options, empty=empty)
    unmasking = unmasked(outputs) if options.unmasked else contextlib.nullcontext()
    complete = False
    with torch.set_grad_enabled(create_graph), unmasking:
        try:
            if len(outputs) == 1 and not watched and all(edge[:2] == outputs[0][:2] for edge in wanted):
                gradients = [seeds[0]] * len(wanted)  # the seeds are the cotangents
            else:
                gradients = pull_columns(
                    outputs,
                    wanted,
                    seeds,
                    batched=batched,
                    create_graph=create_graph,
                    retain_graph=not options.frees,
                )
            for (use, index, _), cotangent in zip(ends, gradients[: len(ends)], strict=True):
                if cotangent is not None and not batched:
                    cotangent = cotangent.unsqueeze(0)
                watch.note(use, index, cotangent)
            complete = True
        except RuntimeError as error:
            if "selective activation checkpoint" in str(error):
                raise refused("a selective one gives what it kept to one pass alone") from error
            raise
        finally:
            watch.close(complete)
    return gradients[len(wanted) - len(leaves) :]


def _operands_of_called(use: ReachedUse) -> list[GradientEdge]:
    """Return the edges of the parameters of nodes that a visit calls; see NOTE [Nodes as functions]."""
    edges = [site.entry.calls_node(use.layouts) for site in use.sites] if use.layouts else []
    return [edge for edge in edges if edge is not None]


@contextlib.contextmanager
def unmasked(outputs: Sequence[GradientEdge]) -> Iterator[None]:
    """Make functions that drop entries by their values pass back all of them."""

    def pass_on(products: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> Any:
        (cotangent,) = given
        if cotangent is None:
            return None
        return tuple(
            None if product is None else cotangent.sum_to_size(product.shape).to(product.dtype)
            for product in products
        )

    masks = [node for node in nodes_above(edge.node for edge in outputs) if name_of_node(node) in MASKS]
    handles = [node.register_hook(pass_on) for node in masks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _edge_above(checkpoint: ReentrantCheckpoint) -> GradientEdge:
    """Return an edge upstream of a checkpoint: autograd runs a node only to get something upstream of it."""
    above = checkpoint.node.next_functions
    return next(GradientEdge(node, output) for node, output in above if node is not None)
