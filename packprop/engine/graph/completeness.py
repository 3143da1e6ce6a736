"""Checks that a pass can give quantities of single samples: every use is known, and can be differentiated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from packprop.engine.functions.nodes import made_by, readable_name
from packprop.engine.graph.graph import EAGER, Graph
from packprop.engine.graph.search import leaves_above
from packprop.engine.recording.marks import EXTENDED
from packprop.engine.recording.unrecorded import UNCOMPILED, is_compiled_region
from packprop.engine.tensors.hooks import Hooks
from packprop.engine.tensors.precision import is_for_storage
from packprop.engine.tensors.sharding import (
    is_distributed,
    is_fully_sharded_before,
    is_sharded_outside,
    sharded_units,
    shards_by_whole,
)
from packprop.errors import FreedGraph, PackpropError

UNKNOWN_LOSS = (
    "nothing says where the loss begins: neither a loss function of torch whose node tells it, nor an extended "
    "loss, nor the output of an extended model lies between it and the parameters"
)
"""The reason in messages if packprop finds no use of a parameter."""


MARK_THE_LOSS = (
    "call a loss function of torch; or extend the model (`packprop.extend(model)` before its forward pass, "
    "outside of vmap); or call your own loss as an extended module, or inside `with packprop.record():`"
)
"""The remedy in messages if packprop does not know where the loss begins."""


def require_alive(graph: Graph) -> None:
    """Raise if an earlier pass has freed the graph."""
    if any(loss.call.released for loss in graph.losses):
        raise freed("the first pass freed the graph, and what the loss was given")


def require_loss_inputs(graph: Graph) -> None:
    """Raise if an earlier pass that was refused has dropped the inputs of the losses."""
    if any(loss.call.without_input for loss in graph.losses):
        raise freed("the first pass, which was refused, freed what the loss was given")


def freed(why: str) -> FreedGraph:
    """Return the error for a graph that an earlier pass has freed."""
    return FreedGraph(
        "A second backward pass through one graph was asked for.",
        "the loss that backward() was called on",
        why,
        "pass retain_graph=True to the first backward()",
    )


def require_derivatives(graph: Graph, cut: Sequence[Node]) -> None:
    """Refuse leaves without gradients of samples: rounded to eight bits, or zero, upstream of ``cut`` nodes."""
    asked = "A quantity beyond the gradient was asked for."
    leaves = graph.leaves()
    for leaf in leaves:
        if is_for_storage(leaf.dtype):
            raise PackpropError(
                asked,
                f"parameter {graph.name(leaf)!r}, of {leaf.dtype}",
                "its gradients are rounded to eight bits, in which PyTorch neither adds nor multiplies numbers",
                "train it in float32, bfloat16 or float16, and convert it in the forward pass; or set "
                "requires_grad=False on it",
            )
    above = set(map(id, leaves_above(cut)))
    lost = next((leaf for leaf in leaves if id(leaf) in above), None)
    if lost is not None:
        raise PackpropError(
            asked,
            f"parameter {graph.name(lost)!r}, below a function that is quantised or has no kernel for autograd",
            "PyTorch has no derivative for the function, and uses zero in its place, with a warning",
            "run that layer in floating point, or set requires_grad=False on the parameters below it",
        )


def require_data(graph: Graph) -> None:
    """Refuse parameters without data (on the meta device), and nested tensors."""
    asked = "A quantity beyond the gradient was asked for."
    leaf = next((leaf for leaf in graph.leaves() if leaf.is_meta), None)
    if leaf is not None:
        raise PackpropError(
            asked,
            f"parameter {graph.name(leaf)!r}, on the meta device",
            "tensors there have no data, and packprop needs data to find the samples",
            "move the model and the batch to a device with to_empty(device=...), and load the weights; "
            "packprop.plan finds the memory of a step without data",
        )
    made_nested = [
        use for use in graph.uses for shape in use.shapes if any(isinstance(n, torch.SymInt) for n in shape)
    ]
    if made_nested:
        raise nested(graph.label(made_nested[-1]))


def nested(where: str) -> PackpropError:
    """Return the error for a nested tensor, whose rows differ in length."""
    return PackpropError(
        "A quantity beyond the gradient was asked for.",
        where,
        "it made a nested tensor, whose rows differ in length: no axis of it holds the samples",
        "pad the rows to one length (to_padded_tensor), and leave padded positions out of the loss with a "
        "mask or ignore_index",
    )


def shapes_of(node: Node) -> list[torch.Size]:
    """Return the shapes of a node's outputs; refuse nested tensors."""
    try:
        return [torch.Size(each.shape) for each in made_by(node)]
    except RuntimeError as error:  # PyTorch's message is about its internals
        raise nested(f"{node.name()}, which the backward pass goes through") from error


def shape_at(node: Node, place: int) -> torch.Size:
    """Return the shape of a node's operand at one place."""
    above, output = node.next_functions[place]
    return torch.Size(made_by(above)[output].shape)


def require_separable(graph: Graph) -> None:
    """Raise if packprop knows that a layer mixes the samples."""
    if graph.mixers:
        raise PackpropError(
            "A quantity of single samples was asked for.",
            f"layer {graph.mixers[0]}",
            "batch normalisation in training mode mixes the samples: no sample has a gradient of its own",
            "call .eval() on the layer, or use GroupNorm, LayerNorm or InstanceNorm",
        )
    if graph.reading is not None and graph.reading.mixing:
        (node, *_) = graph.reading.mixing
        raise PackpropError(
            "A quantity of single samples was asked for.",
            f"{readable_name(node)} behind the output of the model",
            "parameters join numbers that are computed from the outputs: nothing tells of which samples",
            "add terms without samples, loss + penalty, with no function but factors behind the sum; apply "
            "other parameters before the loss is reduced to a number",
        )


def find_missing(graph: Graph, consumed: list[tuple[Tensor, Node]], wanted: Sequence[Tensor] | None) -> None:
    """Note parameters of extended modules, or of uses, that the pass also reaches outside of all uses."""
    if not consumed:  # the usual case needs no list of the parameters of all modules
        return
    modules = graph.known_modules
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    used = {id(leaf) for leaf in graph.leaves()}
    owned |= used | shards_by_whole(modules).keys()
    owned |= {id(leaf) for leaf, node in consumed if is_compiled_region(node)}  # whoever owns it
    data = {id(ref()) for forward in graph.forwards for ref in forward.leaves} - used
    counted = (owned if wanted is None else owned & {id(leaf) for leaf in wanted}) - data
    graph.missing = [(leaf, node) for leaf, node in consumed if id(leaf) in counted]


def require_unsharded(modules: Iterable[nn.Module], hooks: Hooks) -> None:
    """Raise if parameters are sharded between processes: extensions for modules see shards alone."""
    modules = list(modules)
    if sharded_units(modules) or is_fully_sharded_before(modules) or is_sharded_outside([], hooks.owners()):
        raise PackpropError(
            "An extension for modules was asked for.",
            "parameters that FSDP2 or FSDP1 has sharded between processes",
            "functions get whole parameters for a moment only; the module holds shards",
            "use an extension of packprop, DistributedDataParallel, or one process",
        )


def require_known_shards(graph: Graph, unshards: bool) -> None:
    """Raise if parameters are sharded between processes in a way that packprop cannot follow.

    ``unshards`` says whether the caller puts sharded parameters together for its sweeps.
    """
    asked = "A quantity beyond the gradient was asked for."
    parts = [leaf for leaf in [*graph.leaves(), *(leaf for leaf, _ in graph.missing)] if is_distributed(leaf)]
    if parts:
        raise PackpropError(
            asked,
            f"parameter {graph.name(parts[0])!r}, a DTensor that is used as it is",
            "parallelize_module, or distribute_tensor, has split the function that uses it between processes, "
            "each of which has a part of every sample's gradient",
            "use DistributedDataParallel or fully_shard, which give functions whole parameters, or one process",
        )
    if graph.units and not unshards:
        raise PackpropError(
            asked,
            "parameters that fully_shard (FSDP2) has sharded between processes",
            "packprop puts them together for its sweeps only inside `with packprop.backpack(...)`",
            "use `with packprop.backpack(..., ranks='all')` around backward(); or DistributedDataParallel, or "
            "one process",
        )
    modules = graph.modules
    if is_fully_sharded_before(modules) or is_sharded_outside(modules, graph.hooks.owners()):
        raise PackpropError(
            asked,
            "parameters that FullyShardedDataParallel (FSDP1) has sharded between processes, or fully_shard "
            "(FSDP2) around the module that was extended",
            "functions get whole parameters for a moment only, as parts of one flat tensor, or from a module "
            "that packprop does not know: it could attach no value to a parameter that the model holds",
            "use fully_shard (FSDP2) or DistributedDataParallel, and extend the outermost module",
        )


def require_complete(graph: Graph) -> None:
    """Raise unless packprop knows every use of every wanted parameter."""
    if not graph.missing:
        return
    order = {id(p): place for module in EXTENDED for place, p in enumerate(module.parameters())}
    leaf, consumer = min(graph.missing, key=lambda pair: order.get(id(pair[0]), len(order)))
    name, node = graph.name(leaf), consumer.name()
    if node == EAGER:
        why = "eager_backward() has already summed this parameter's gradient over the samples"
        instead = "leave the branch outside eager_backward(), or set requires_grad=False on the parameter"
    elif is_compiled_region(consumer):
        why = "it is used in what torch.compile compiled, and compiled regions are not recorded"
        instead = UNCOMPILED
    elif node == "AccumulateGrad":
        why, instead = "the loss is the parameter itself", "leave it out of this loss"
    elif not graph.uses:
        why = f"no use of it is known: {UNKNOWN_LOSS}; or this is a penalty whose constants may hold samples"
        instead = f"{MARK_THE_LOSS}. Call backward() of a penalty outside of `with backpack(...)`"
    else:
        why = (
            f"{node} uses it outside of every known loss function, so packprop cannot tell which samples it "
            "belongs to: the term is not simply added to the loss, or its constants may contain samples"
        )
        instead = (
            "if it weights losses, keep it in a module that you do not extend, and extend the losses inside. "
            "If the term is a penalty, add it to the loss, and keep its constants in buffers of an extended "
            "module, or without an axis (torch.zeros(())). Compute every other term with a loss function of "
            "torch, or with an extended loss without parameters. Or set requires_grad=False on the parameter: "
            "other values stay the same"
        )
    raise PackpropError("A quantity beyond the gradient was asked for.", f"parameter {name!r}", why, instead)
