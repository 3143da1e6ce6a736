"""Which parameters a product with a block reads: those whose change makes it a product at other values.

A product differentiates what lies between its parameter and the roots, and reads what the nodes there saved:
the weights downstream of it. Its own weight, and what lies upstream, may change.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.curvature.dependence import upstream_first
from packprop.functions.nodes import CONVOLUTIONS, NORMALISATIONS, PRODUCTS, name_of_node
from packprop.functions.operands import WITH_SUMMAND, saved_tensors
from packprop.functions.saved import keeps_elsewhere
from packprop.graph.graph import Graph

AFFINE = NORMALISATIONS | {"NativeLayerNorm", "NativeGroupNorm"}
"""Functions whose derivative in what scales and shifts (all but the first input) does not read it."""


def read_by_products(graph: Graph, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    """For each leaf the leaves that the product with its block reads."""
    everything = [list(leaves) for _ in leaves]
    if graph.checkpoints:
        return everything
    bits = {id(leaf): 1 << place for place, leaf in enumerate(leaves)}
    at = {leaf.untyped_storage().data_ptr(): leaf for leaf in leaves if not leaf.is_sparse}
    masks: dict[Node, int] = {}
    readers = {id(leaf): 0 for leaf in leaves}
    for node in upstream_first([root.grad_fn for root in graph.roots if root.grad_fn is not None]):
        variable = getattr(node, "variable", None)
        slots = [0 if above is None else masks[above] for above, _ in node.next_functions]
        masks[node] = bits.get(id(variable), 0)
        for slot in slots:
            masks[node] |= slot
        if not masks[node] or variable is not None:
            continue
        if isinstance(node, BackwardCFunction) or "Backward" not in node.name():  # may hold anything
            return everything
        if keeps_elsewhere(node):  # what is computed again reads all parameters again
            return everything
        for saved in saved_tensors(node):
            leaf = None if saved.layout != leaves[0].layout else at.get(saved.untyped_storage().data_ptr())
            if leaf is not None:
                readers[id(leaf)] |= _readers(name_of_node(node), slots, bits[id(leaf)])
    return [[each for each in leaves if readers[id(each)] & bits[id(leaf)]] for leaf in leaves]


def _readers(name: str, slots: Sequence[int], own: int) -> int:
    """Leaves, as bits, whose product reads a leaf that a node has saved.

    Args:
        name: Name of the node.
        slots: The leaves that each of its inputs depends on.
        own: The leaf that it has saved.

    The derivative of a product in one operand reads the other one, that in a summand neither.
    """
    read = slots
    if name in AFFINE:
        read = slots[:1]
    elif name in PRODUCTS and sum(bool(slot & own) for slot in slots) == 1:
        first, last = name in WITH_SUMMAND or name == "Addcmul", name in CONVOLUTIONS or name == "Linear"
        summand = 0 if first else 2 if last else None  # it stands before the two operands, or behind them
        read = [slot for place, slot in enumerate(slots) if place != summand and not slot & own]
    found = 0
    for slot in read:
        found |= slot
    return found
