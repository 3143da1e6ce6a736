"""Pull seeds back to the outputs of uses, one column at a time or many at once."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.functions.entry import ArrivedCotangents
from packprop.engine.functions.nodes import MASKS, POOLS, SELECTING, has_option, name_of_node, saved_option
from packprop.engine.functions.operands import CURVED
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.pull import pull_columns
from packprop.engine.graph.search import nodes_above
from packprop.engine.tensors.hooks import NO_HOOKS, Hooks
from packprop.errors import PackpropError

Visit = Callable[[ReachedUse, list[Tensor | None]], None]
"""A function of a use and the cotangents at its outputs ``[v, *y]``; ``None`` if none has arrived."""


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
ONE_COLUMN_WITHOUT_INPUTS = SweepOptions(needs_inputs=False)


class Watch:
    """Hooks that pass the cotangents ``[1, *y]`` at a use to ``visit``, once all of them have arrived.

    ``hooks`` are the user's hooks that run in this pass, but not while visits differentiate.
    """

    def __init__(self, uses: Sequence[ReachedUse], visit: Visit, hooks: Hooks = NO_HOOKS) -> None:
        self._hooks, self._visit = hooks, visit
        self._pending: dict[ReachedUse, dict[int, Tensor | None]] = {}  # by output; some have not arrived
        self._visiting = False
        self._thread, self._context = threading.get_ident(), contextvars.copy_context()
        self._handles = [
            node.register_prehook(functools.partial(self._note_arrived, use, index, output))
            for use in uses
            for index, (node, output) in use.nodes.items()
        ]

    def _note_arrived(
        self, use: ReachedUse, index: int, output: int, gradients: Sequence[Tensor | None]
    ) -> None:
        """Note a cotangent, with the context variables of the thread that watches; a hook.

        Autograd has a thread for each accelerator.
        """
        if self._visiting:  # a visit pulls back through this very node
            return
        cotangent = gradients[output]
        cotangent = None if cotangent is None else cotangent.unsqueeze(0)
        if threading.get_ident() == self._thread:
            self.note(use, index, cotangent)
        else:
            self._context.copy().run(self.note, use, index, cotangent)

    def note(self, use: ReachedUse, index: int, cotangent: Tensor | None) -> None:
        """Note one cotangent ``[v, *y]``, and visit the use if it was the last."""
        arrived = self._pending.setdefault(use, {})
        arrived[index] = cotangent
        if len(arrived) == len(use.nodes):
            self._finish(use)

    def _finish(self, use: ReachedUse) -> None:
        arrived = self._pending.pop(use)
        cotangents = ArrivedCotangents(map(arrived.get, range(len(use.shapes))))
        for cotangent in cotangents:
            if cotangent is not None:
                break
        else:  # nothing has arrived at any output
            return
        self._visiting = True
        try:
            if self._hooks.are_any:
                with self._hooks.quiet():
                    self._visit(use, cotangents)
            else:
                self._visit(use, cotangents)
        finally:
            self._visiting = False

    def close(self, complete: bool = True) -> None:
        """Remove the hooks; if the pass is complete, visit uses with outputs that the pass did not reach."""
        for handle in self._handles:
            handle.remove()
        if complete:
            for use in list(self._pending):
                self._finish(use)


def sweep(
    outputs: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    uses: Sequence[ReachedUse],
    visit: Visit,
    options: SweepOptions = ONE_COLUMN,
) -> None:
    """Pull one column (or many) back from ``outputs`` to all uses upstream.

    The sweep ends at uses without another use upstream, and computes no gradient of a weight.

    Args:
        outputs: The edges where the seeds are fed in.
        seeds: One for each output; with a leading axis of columns ``[v, *f]`` if ``options.batched``.
        uses: The uses to visit.
        visit: Called with a use and its cotangents, which have a leading axis of columns.
        options: Options of the sweep.
    """
    batched = options.batched
    calling = {use: _operands_of_called(use) for use in uses} if options.needs_inputs and not batched else {}
    watched = [] if batched else [use for use in uses if not use.is_end or calling.get(use)]
    ends = [
        (use, index, GradientEdge(node, output))
        for use in uses
        if batched or (use.is_end and not calling.get(use))
        for index, (node, output) in use.nodes.items()
    ]
    wanted = [edge for _, _, edge in ends] + [edge for edges in calling.values() for edge in edges]
    gradients: Sequence[Tensor | None]
    watch = Watch(watched, visit)
    unmasking = unmasked(outputs) if options.unmasked else contextlib.nullcontext()
    complete = False
    with torch.set_grad_enabled(options.create_graph), unmasking:
        try:
            if len(outputs) == 1 and not watched and all(edge[:2] == outputs[0][:2] for edge in wanted):
                gradients = [seeds[0]] * len(wanted)  # the seeds are the cotangents
            else:
                gradients = pull_columns(
                    outputs,
                    wanted,
                    seeds,
                    batched=batched,
                    create_graph=options.create_graph,
                    retain_graph=not options.frees,
                )
            for (use, index, _), cotangent in zip(ends, gradients[: len(ends)], strict=True):
                if cotangent is not None and not batched:
                    cotangent = cotangent.unsqueeze(0)
                watch.note(use, index, cotangent)
            complete = True
        except RuntimeError as error:
            if "selective activation checkpoint" in str(error):
                raise PackpropError(
                    "A quantity beyond the gradient was asked for.",
                    "a part of the model inside torch.utils.checkpoint",
                    "a selective checkpoint gives the tensors that it kept to one pass alone",
                    "leave out context_fn, so that the checkpoint keeps nothing",
                ) from error
            raise
        finally:
            watch.close(complete)


def _operands_of_called(use: ReachedUse) -> list[GradientEdge]:
    """Return the edges of the parameters of nodes that a visit calls; see NOTE [Nodes as functions]."""
    edges = []
    for site in use.sites if use.layouts else ():
        edge = site.entry.calls_node(use.layouts)
        if edge is not None:
            edges.append(edge)
    return edges


def _passed_to_all(node: Any, products: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> Any:
    """Pass the cotangent of a function that selects entries on to all entries that it might have selected."""
    (product, *others), (cotangent, *_) = products, given
    if product is None or cotangent is None:
        return None
    axes = [*range(-POOLS.get(name_of_node(node), 0), 0)]
    if has_option(node, "dim") and product.dim():  # else one entry is selected of all
        axes = [saved_option(node, "dim") % product.dim()]
        if cotangent.dim() < product.dim():
            cotangent = cotangent.unsqueeze(axes[0])
    total = cotangent.sum(axes, keepdim=True) if axes else cotangent
    return total.expand_as(product).to(product.dtype), *others


@contextlib.contextmanager
def unmasked(outputs: Sequence[GradientEdge], of_kinks: bool = False) -> Iterator[None]:
    """Make functions that drop entries by their values pass cotangents back to all entries.

    With ``of_kinks``, leave out functions whose second derivatives tell which entries meet in them.
    """

    def pass_on(products: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> Any:
        (cotangent,) = given
        if cotangent is None:
            return None
        return tuple(
            None if product is None else cotangent.sum_to_size(product.shape).to(product.dtype)
            for product in products
        )

    handles = []
    for node in nodes_above(edge.node for edge in outputs):
        name = name_of_node(node)
        if of_kinks and name in CURVED:
            continue
        if name in MASKS:
            handles.append(node.register_hook(pass_on))
        elif name in POOLS or name in SELECTING:
            handles.append(node.register_hook(functools.partial(_passed_to_all, node)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
