"""Pull seeds back to the outputs of uses, one column at a time or many at once."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from packprop.graph.graph import ReachedUse, ReentrantCheckpoint, ReentrantInputs
from packprop.recording.regions import opened

Visit = Callable[[ReachedUse, list[Tensor | None]], None]


def checkpoints_of(found: Sequence[ReachedUse]) -> list[ReentrantCheckpoint]:
    """Reentrant checkpoints that uses are in, each once."""
    return list({id(f.checkpoint): f.checkpoint for f in found if f.checkpoint is not None}.values())


class Watch:
    """Hooks that hand the cotangents at uses to ``visit`` while a backward pass runs.

    Args:
        found: Uses to watch.
        visit: Called with a use and the cotangents at its outputs ``[1, *y]``, as soon as all have arrived.
        inputs: Whether a visit needs the inputs of the use: it waits for those that are computed again.
        accumulate: Whether gradients of leaves are to be accumulated, as by the user's own pass.
    """

    def __init__(
        self, found: Sequence[ReachedUse], visit: Visit, inputs: bool = True, accumulate: bool = False
    ) -> None:
        self._visit, self._inputs, self._accumulate = visit, inputs, accumulate
        self._late: dict[ReachedUse, list[Tensor | None]] = {}
        self._pending: dict[ReachedUse, list[Tensor | None]] = {}
        self._waiting: dict[ReachedUse, int] = {}
        self._visiting = False
        self._thread, self._context = threading.get_ident(), contextvars.copy_context()
        self._handles = [
            node.register_prehook(self._here(self._hook(f, index, output)))
            for f in found
            for index, (node, output) in f.nodes.items()
        ]
        self._checkpoints = checkpoints_of(found)
        for (
            checkpoint
        ) in self._checkpoints:  # what the engine calls, for this node alone and as long as the watch lasts
            checkpoint.node.apply = self._here(functools.partial(self._inside, checkpoint))
        if inputs:  # the node's own function may be what has the inputs computed again
            self._handles += [
                node.register_hook(self._here(lambda *_: self._catch_up()))
                for f in found
                if f.recorded.source is not None
                for node, _ in f.nodes.values()
            ]

    def _here(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same with context variables of this thread: autograd runs each accelerator in another."""

        def run(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                return hook(*arguments)
            return self._context.copy().run(hook, *arguments)

        return run

    def _hook(self, found: ReachedUse, index: int, output: int) -> Callable[[Any], None]:
        def arrived(gradients: Sequence[Tensor | None]) -> None:
            if self._visiting:  # a visit pulls back through this very node
                return
            self._catch_up()
            cotangent = gradients[output]
            self.arrived(found, index, None if cotangent is None else cotangent.unsqueeze(0))

        return arrived

    def _inside(self, checkpoint: ReentrantCheckpoint, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        """What a reentrant checkpoint's node does instead of its own backward pass."""
        rerun, graph = checkpoint.again()
        own = dict(zip(graph.uses, checkpoint.uses, strict=True))

        def visit(found: ReachedUse, cotangents: list[Tensor | None]) -> None:
            use = own[found].recorded
            if self._inputs:
                assert isinstance(use.source, ReentrantInputs)
                use.source.live = found.entries()
            self._call(own[found], cotangents)

        pairs = [
            (value, gradient)
            for number, (value, gradient) in enumerate(zip(rerun.outputs, arriving, strict=True))
            if value is not None and value.requires_grad and gradient is not None
            if self._accumulate or number in checkpoint.reached
        ]
        outputs, seeds = [value for value, _ in pairs], [gradient for _, gradient in pairs]
        leaves = [value for value in rerun.inputs if isinstance(value, Tensor) and value.requires_grad]
        gradients: Sequence[Tensor | None]
        if self._accumulate:
            graph.hold(False)
            with opened((found.recorded.source for found in graph.uses), False):
                watch = Watch(graph.uses, visit, self._inputs, accumulate=True)
                complete = False
                try:
                    torch.autograd.backward(outputs, seeds)
                    complete = True
                finally:
                    watch.close(complete)
            gradients = [leaf.grad for leaf in leaves]
        else:
            edges = [get_gradient_edge(value) for value in outputs]
            gradients = sweep(edges, seeds, graph.uses, visit, inputs=self._inputs, leaves=leaves)
        graph.forget()
        found = dict(zip(map(id, leaves), gradients, strict=True))
        return rerun.gradients(found)

    def arrived(self, found: ReachedUse, index: int, cotangent: Tensor | None) -> None:
        """Note one cotangent ``[v, *y]``; visit the use if it was the last."""
        cotangents = self._pending.setdefault(found, [None] * len(found.recorded.shapes))
        cotangents[index] = cotangent
        waiting = self._waiting[found] = self._waiting.get(found, len(found.nodes)) - 1
        if waiting == 0:
            self._finish(found)

    def _finish(self, found: ReachedUse) -> None:
        cotangents = self._pending.pop(found)
        del self._waiting[found]
        if all(cotangent is None for cotangent in cotangents):
            return
        if self._inputs and not found.is_ready():
            self._late[found] = cotangents
        else:
            self._call(found, cotangents)

    def _catch_up(self) -> None:
        """Visit uses whose inputs were still missing, and are there by now."""
        if self._visiting:
            return
        for found in [found for found in self._late if found.is_ready()]:
            self._call(found, self._late.pop(found))

    def _call(self, found: ReachedUse, cotangents: list[Tensor | None]) -> None:
        self._visiting = True
        try:
            self._visit(found, cotangents)
        finally:
            self._visiting = False

    def close(self, complete: bool = True) -> None:
        """Remove the hooks; visit uses of which some outputs were not reached."""
        for handle in self._handles:
            handle.remove()
        for checkpoint in self._checkpoints:
            checkpoint.node.__dict__.pop("apply", None)
        if complete:
            for found in list(self._pending):
                self._finish(found)
            for found in list(self._late):
                self._call(found, self._late.pop(found))


def sweep(
    outputs: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    found: Sequence[ReachedUse],
    visit: Visit,
    *,
    batched: bool = False,
    create_graph: bool = False,
    inputs: bool = True,
    leaves: Sequence[Tensor] = (),
    bare: bool = False,
) -> Sequence[Tensor | None]:
    """Pull one seed (or many) back from ``outputs`` to every use in ``found`` that it reaches.

    Args:
        outputs: Where the seeds are fed in.
        seeds: One for each output; with a leading axis of columns ``[v, *f]`` if ``batched``.
        found: The uses; those upstream of no other end the sweep, so no gradient of a weight is computed.
        visit: Called as ``visit(found, cotangents)``; cotangents have a leading axis of columns.
        batched: Pull all columns back in one vectorised pass, which holds all cotangents at once.
        create_graph: Whether the cotangents shall be differentiable.
        inputs: Whether visits need the inputs of uses.
        leaves: Tensors whose gradients are returned.
        bare: Whether there is one output, and no hook of the user's on it.
    """
    with opened((f.recorded.source for f in found), create_graph, inputs):
        return _sweep(outputs, seeds, found, visit, batched, create_graph, inputs, leaves, bare)


def _sweep(
    outputs: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    found: Sequence[ReachedUse],
    visit: Visit,
    batched: bool,
    create_graph: bool,
    inputs: bool,
    leaves: Sequence[Tensor],
    bare: bool,
) -> Sequence[Tensor | None]:
    watched = [] if batched else [f for f in found if not f.first]
    ends = [
        (f, index, GradientEdge(node, output))
        for f in found
        if batched or f.first
        for index, (node, output) in f.nodes.items()
    ]
    # a node is run only if something upstream of it is asked for
    upstream = [
        next(GradientEdge(node, output) for node, output in checkpoint.node.next_functions if node is not None)
        for checkpoint in checkpoints_of(found)
    ]
    wanted = [*(edge for _, _, edge in ends), *upstream, *map(get_gradient_edge, leaves)]
    cotangents: Sequence[Tensor | None]
    watch = Watch(watched, visit, inputs)
    complete = False
    with torch.set_grad_enabled(create_graph):
        try:
            if bare and not watched and all(edge[:2] == outputs[0][:2] for edge in wanted):
                cotangents = [seeds[0]] * len(
                    wanted
                )  # fed in where they are to arrive: there is nothing to run
            else:
                cotangents = pull_columns(outputs, wanted, seeds, batched=batched, create_graph=create_graph)
            for (f, index, _), cotangent in zip(ends, cotangents[: len(ends)], strict=True):
                if cotangent is not None and not batched:
                    cotangent = cotangent.unsqueeze(0)
                watch.arrived(f, index, cotangent)
            complete = True
        finally:
            watch.close(complete)
    return cotangents[len(ends) + len(upstream) :]


def pull_columns(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Tensor],
    *,
    batched: bool = True,
    create_graph: bool = False,
    retain_graph: bool = True,
) -> list[Tensor | None]:
    """Vector-Jacobian products of many columns ``[v, *y]``, one after the other where they cannot be batched.

    Args:
        outputs: Tensors or edges that the columns are fed in at.
        ends: Tensors or edges; ``None`` is returned for what is not reached.
        seeds: Columns for each output; without their axis unless ``batched``.
        batched: Whether there is an axis of columns.
        create_graph: Whether products shall be differentiable.
        retain_graph: Whether the graph stays; where ``batched``, it does.
    """

    def pull(given: Sequence[Tensor], batched: bool, retain_graph: bool = True) -> list[Tensor | None]:
        found: Any = torch.autograd.grad(
            list(outputs),
            list(ends),
            list(given),
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
        return [t.to_dense() if t is not None and t.is_sparse else t for t in found]

    if not batched:
        return pull(seeds, False, retain_graph)
    count = len(seeds[0])
    if count > 1:
        try:
            return pull(seeds, batched=True)
        except RuntimeError:  # no batching rule; what else is wrong is raised again below
            pass
    columns = [pull([seed[place] for seed in seeds], batched=False) for place in range(count)]
    return [
        None if pieces[0] is None else torch.stack([piece for piece in pieces if piece is not None])
        for pieces in zip(*columns, strict=True)
    ]
