"""Running extensions for single modules in a backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from packprop.compat.calls import (
    InputGradients,
    ModuleCall,
    is_loss_class,
    require_kept,
)
from packprop.compat.catalogue import Catalogued
from packprop.compat.own import BackpropExtension, Unsupported
from packprop.compat.saved_quantities import SavedQuantities
from packprop.engine.curvature import Columns, columns
from packprop.engine.graph import Graph, ReachedUse, SweepOptions, sweep, walk
from packprop.engine.passes import tasks_by_seed
from packprop.engine.samples import check_graph
from packprop.errors import PackpropError
from packprop.types import ENTRYWISE, Extension, Seed

Overrides = list[tuple[Tensor, str, Any]]
"""Parameter, attribute, and the value that replaces packprop's own."""


@dataclass
class Start:
    """The start of a backward pass.

    Args:
        roots: The tensors that the pass differentiates.
        gradients: The gradient at each root; ``None`` stands for 1.
        create_graph: Make values differentiable.
        extensions: packprop's own extensions, which run afterwards.
        drawn: Sampled columns by seed. Modules and the pass share these draws, made in the order of the pass.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    create_graph: bool
    extensions: Sequence[Extension] = ()
    drawn: dict[Seed, list[Columns]] = field(default_factory=dict)

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph between the roots and the leaves, with its samples located."""
        graph = walk(self.roots, self.gradients, None)
        check_graph(graph)
        return graph

    def columns(self, seed: Seed) -> list[Columns]:
        """Return the columns of a seed; the pass will sweep the same draws of a sampled seed."""
        if seed.mc_samples is None:
            return columns(self.graph, seed, self.create_graph)
        for other in tasks_by_seed(self.extensions):
            if other.kind == "ggn" and other.mc_samples is not None and other not in self.drawn:
                self.drawn[other] = columns(self.graph, other, self.create_graph)
        return self.drawn[seed]

    def swept(
        self, edges: Sequence[GradientEdge], seeds: Sequence[Tensor], uses: Sequence[ReachedUse]
    ) -> dict[ReachedUse, list[Tensor | None]]:
        """Pull one column back from some edges, and return the cotangents ``[1, *y]`` at the uses."""
        cotangents: dict[ReachedUse, list[Tensor | None]] = {}
        sweep(edges, seeds, uses, cotangents.__setitem__, SweepOptions(create_graph=self.create_graph))
        return cotangents


def run_on_modules(
    start: Start,
    calls: Mapping[ModuleCall, ReachedUse],
    extensions: Sequence[BackpropExtension],
    done: Callable[[nn.Module], Any] | None,
) -> Overrides:
    """Run extensions on every module call that a backward pass will reach, before that pass.

    Args:
        start: The start of the pass.
        calls: The calls that were kept, the last one first.
        extensions: The extensions, in the order in which they run on each module.
        done: A function to call with each module after all extensions have run on it.

    Returns:
        Values that replace those of packprop's own extensions.

    Raises:
        PackpropError: If no call was kept, or the tensors of a call are gone or were changed.
        Unsupported: If an extension does not support a module.
    """
    if not calls:
        raise PackpropError(
            "A backward pass with extensions for single modules was started.",
            "the tensor that backward() was called on",
            "no call of an extended module was kept on its graph",
            "define the classes of extensions first, then extend the model and the loss, then run the forward "
            "pass, outside of disable()",
        )
    edges = [get_gradient_edge(root) for root in start.roots]
    seeds = [
        torch.ones_like(root) if gradient is None else gradient
        for root, gradient in zip(start.roots, start.gradients, strict=True)
    ]
    cotangents = start.swept(edges, seeds, list(calls.values()))
    with torch.set_grad_enabled(start.create_graph), _saving(extensions):
        for extension in extensions:
            given = _columns_for(extension, calls, start)
            extension.__dict__["saved_quantities"] = SavedQuantities(given)
        for call, use in calls.items():
            module = call.module
            if module is None:
                _require_unneeded(call, extensions)
            elif use in cotangents:
                g_out = tuple(None if cotangent is None else cotangent[0] for cotangent in cotangents.pop(use))
                g_inp = InputGradients(call, g_out, use)
                for extension in extensions:
                    if type(extension).__call__ is not BackpropExtension.__call__:
                        require_kept(call)
                    extension(module, g_inp, g_out)
                if done is not None:
                    done(module)
        return [
            (parameter, extension.savefield, value)
            for extension in extensions
            if isinstance(extension, Catalogued)
            for parameter, value in extension.__dict__["_saved"]
        ]


@contextlib.contextmanager
def _saving(extensions: Sequence[BackpropExtension]) -> Iterator[None]:
    """Let extensions note their saved values inside, and forget them afterwards."""
    for extension in extensions:
        extension.__dict__["_saved"] = []
    try:
        yield
    finally:
        for extension in extensions:
            extension.__dict__["saved_quantities"] = SavedQuantities()
            extension.__dict__["_saved"] = []


def _require_unneeded(call: ModuleCall, extensions: Sequence[BackpropExtension]) -> None:
    """Refuse a call whose module is gone, if an extension has something to do on it."""
    if any(call.kind in extension.module_extensions for extension in extensions):
        raise PackpropError(
            f"An extension of your own for {call.name} was to run.",
            f"a module of type {call.name}",
            "nothing refers to it any more",
            "keep it in a variable until backward() is done",
        )


def _columns_for(
    extension: BackpropExtension, calls: Mapping[ModuleCall, ReachedUse], start: Start
) -> dict[Any, Tensor] | None:
    """Return columns of the GGN's root at the outputs of modules, unless the extension makes its own.

    An extension that has a module extension for the loss propagates its own quantities from there.
    """
    if not extension.expects_backpropagation_quantities():
        return None
    known = extension.module_extensions
    if not isinstance(extension, Catalogued) and any(map(is_loss_class, known)):
        return None
    wanted = [use for call, use in calls.items() if type(call.module) in known and 0 in use.nodes]
    seed = extension.seed if isinstance(extension, Catalogued) else ENTRYWISE
    columns_of: dict[ReachedUse, list[Tensor]] = {use: [] for use in wanted}
    for group in start.columns(seed):
        for number in range(group.count):
            seeds = [chunk[0] for chunk in group.chunk(number, number + 1)]
            cotangents = start.swept(group.edges, seeds, wanted)
            for use, pieces in columns_of.items():
                cotangent = cotangents.get(use, [None])[0]
                zeros = start.roots[0].new_zeros(1, *use.shapes[0])
                pieces.append(zeros if cotangent is None else cotangent)
    samples, subsampling = start.graph.samples, extension.get_subsampling()
    result: dict[Any, Tensor] = {}
    for use, pieces in columns_of.items():
        stacked = torch.cat(pieces)
        if subsampling is not None:
            if stacked.shape[1] != samples:
                raise Unsupported(
                    f"{type(extension).__name__}(subsampling=...) was to run a module extension.",
                    f"a module of type {use.name}",
                    f"its output has {stacked.shape[1]} entries on the leading axis, the batch {samples}",
                    "keep samples on the leading axis, or leave subsampling out",
                )
            stacked = stacked[:, subsampling]
        result[use.nodes[0]] = stacked
    return result
