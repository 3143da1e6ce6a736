"""Running extensions for modules of one class in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.compat.calls import (
    InputGradients,
    ModuleCall,
    are_calls_kept,
    calls_below,
    is_loss_class,
)
from packprop.compat.own import BackpropExtension, Catalogued, Overrides, SavedQuantities, Unsupported
from packprop.curvature.seeds import columns
from packprop.errors import PackpropError
from packprop.graph.graph import ReachedUse
from packprop.graph.samples import check_graph
from packprop.graph.sweep import SweepOptions, sweep
from packprop.graph.walk import walk
from packprop.types import EXACT


def run_on_modules(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    extensions: Sequence[BackpropExtension],
    create_graph: bool,
    done: Callable[[nn.Module], Any] | None,
) -> tuple[list[ModuleCall], Overrides]:
    """Run extensions on every call of a module that a backward pass will reach, before it does.

    Args:
        roots: Where the pass starts.
        gradients: What is fed in at each root; ``None`` for one.
        extensions: In the order in which they run on each module.
        create_graph: Whether values shall be differentiable.
        done: Called with each module after all extensions have run on it.

    Returns:
        The calls, and values that stand in for those of packprop's own extensions.

    Raises:
        PackpropError: If no call was kept.
    """
    calls = calls_below(roots)
    found = list(calls.values())
    if not calls:
        raise PackpropError(
            "A backward pass with extensions for single modules was started.",
            "the tensor that backward() was called on",
            "no call of an extended module was kept on its graph"
            + ("" if are_calls_kept() else ": no such extension had been defined when the forward pass ran"),
            "define the classes of extensions first, then extend the model and the loss, then run the forward "
            "pass, outside of disable()",
        )
    arrived: dict[ReachedUse, list[Tensor | None]] = {}
    starts = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
    ones = [torch.ones_like(r) if g is None else g for r, g in zip(roots, gradients, strict=True)]
    sweep(starts, ones, found, arrived.__setitem__, SweepOptions(create_graph=create_graph))
    with torch.set_grad_enabled(create_graph):
        for extension in extensions:
            given = _columns_for(extension, found, roots, gradients, create_graph)
            extension.__dict__["saved_quantities"] = SavedQuantities(given)
            extension.__dict__["_saved"] = []
        try:
            for call, each in calls.items():
                module = call.module
                if module is None:
                    _require_unneeded(call, extensions)
                if module is None or each not in arrived:
                    continue
                g_out = tuple(None if cotangent is None else cotangent[0] for cotangent in arrived.pop(each))
                g_inp = InputGradients(call, g_out)
                for extension in extensions:
                    if type(extension).__call__ is not BackpropExtension.__call__:
                        g_inp.require_kept()
                    extension(module, g_inp, g_out)
                if done is not None:
                    done(module)
            overrides = [
                (parameter, extension.savefield, value)
                for extension in extensions
                if isinstance(extension, Catalogued)
                for parameter, value in extension.__dict__["_saved"]
            ]
        finally:
            for extension in extensions:
                extension.__dict__["saved_quantities"] = SavedQuantities()
                extension.__dict__["_saved"] = []
    return list(calls), overrides


def _require_unneeded(call: ModuleCall, extensions: Sequence[BackpropExtension]) -> None:
    """Refuse to go on without a module that is no longer there, if an extension has something to do on it."""
    if any(call.kind in extension.module_extensions for extension in extensions):
        raise PackpropError(
            f"An extension of your own for {call.name} was to run.",
            f"a module of type {call.name}",
            "nothing refers to it any more",
            "keep it in a variable until backward() is done",
        )


def _columns_for(
    extension: BackpropExtension,
    found: Sequence[ReachedUse],
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    create_graph: bool,
) -> dict[Any, Tensor] | None:
    """Columns of the GGN's root at the outputs of modules, where the extension does not propagate its own.

    An extension that knows what to do with the loss begins a propagation of its own there.
    """
    if not extension.expects_backpropagation_quantities():
        return None
    known = extension.module_extensions
    modules = {each: each.recorded.forward.module() for each in found}
    if not isinstance(extension, Catalogued) and any(map(is_loss_class, known)):
        return None
    meant = [each for each, module in modules.items() if type(module) in known and 0 in each.nodes]
    graph = walk(roots, gradients, None)
    check_graph(graph)
    seed = extension.seed if isinstance(extension, Catalogued) else EXACT
    pieces: dict[ReachedUse, list[Tensor]] = {each: [] for each in meant}
    for group in columns(graph, seed, create_graph):
        for place in range(group.count):
            seeds = [chunk[0] for chunk in group.chunk(place, place + 1)]
            at: dict[ReachedUse, list[Tensor | None]] = {}
            sweep(group.edges, seeds, meant, at.__setitem__, SweepOptions(create_graph=create_graph))
            for each in meant:
                cotangent = at.get(each, [None])[0]
                zeros = roots[0].new_zeros(1, *each.recorded.shapes[0])
                pieces[each].append(zeros if cotangent is None else cotangent)
    chosen = extension.get_subsampling()
    result: dict[Any, Tensor] = {}
    for each, columns_of in pieces.items():
        node, output = each.nodes[0]
        stacked = torch.cat(columns_of)
        if chosen is not None:
            if stacked.shape[1] != graph.samples:
                raise Unsupported(
                    f"{type(extension).__name__}(subsampling=...) was to run a module extension.",
                    f"a module of type {each.recorded.name}",
                    f"the leading axis of its output has {stacked.shape[1]} entries, the batch {graph.samples}",
                    "keep samples on the leading axis, or leave subsampling out",
                )
            stacked = stacked[:, chosen]
        result[node, output] = stacked
    return result
