"""Nodes that hide what they take: which rows meet in them is told neither by the graph nor by a mark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.functions.entry import plain_options
from packprop.functions.nodes import names_of_nodes, short_name
from packprop.functions.operands import BY_DATA

UNSEEN = BY_DATA | names_of_nodes(
    """
    IndexPut IndexPutImpl IndexCopy IndexFill IndexReduce Put MaskedScatter ScatterReduce SegmentReduce
    RepeatInterleave MaxUnpool2D MaxUnpool3D Sort Topk SparseAddmm SparseMm SparseSampledAddmm
    SparseMmReduceImpl
    """
)
"""Functions that take rows as data say: by indices, masks, or the places of sparse entries."""


PRODUCTS = {
    "Mm": ("_saved_self", "_saved_mat2"),
    "Addmm": ("_saved_mat1", "_saved_mat2"),
    "Mv": ("_saved_self",),
}
"""Products of matrices -> what their nodes have saved of both, of which a constant may be sparse."""


def hides_order(node: Node) -> bool:
    """Whether data that are not looked at say which rows meet in a node that carries no mark."""
    name = short_name(node.name())
    if name in PRODUCTS:
        has_constants = any(above is None for above, _ in node.next_functions)
        return has_constants and any(_is_sparse(getattr(node, each, None)) for each in PRODUCTS[name])
    if isinstance(node, BackwardCFunction):
        return any(_may_be_indices(value) for value in _kept_by(node))
    return name in UNSEEN


def own_options(node: Node) -> Any:
    """Whole numbers and texts that a user's own function has kept."""
    if not isinstance(node, BackwardCFunction):
        return None
    return tuple((key, plain_options(value)) for key, value in sorted(vars(node).items()))


def _kept_by(node: Any) -> Iterator[Any]:
    yield from vars(node).values()
    try:
        yield from node.saved_tensors
    except RuntimeError:  # they were freed; the pass will say so
        return


def _may_be_indices(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_may_be_indices(each) for each in value)
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole or _is_sparse(value)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is not torch.strided
