"""Nodes that take rows in an order that data decide on, and the axes of these rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.engine.functions.nodes import (
    function_of,
    is_change_of_view,
    is_from_outside,
    is_identity,
    made_by,
    name_of_node,
    names_of_nodes,
    saved_option,
)
from packprop.engine.functions.operands import (
    BY_DATA,
    EXPANDING,
    MATRIX_PRODUCTS,
    is_mask,
    is_norm_without_nan,
    is_sparse,
    takes_sparse,
)
from packprop.engine.tensors.dry import is_dry_run

ALONG_AXIS = names_of_nodes(
    "IndexSelect Gather TakeAlongDim IndexAdd IndexCopy Scatter ScatterAdd ScatterReduce Sort Topk"
)
"""Functions that take rows along the axis that they saved as ``dim``."""


BY_ROWS = BY_DATA | names_of_nodes(
    """
    IndexPut IndexPutImpl IndexCopy IndexFill IndexReduce Put MaskedScatter ScatterReduce SegmentReduce
    RepeatInterleave MaxUnpool2D MaxUnpool3D Sort Topk SparseAddmm SparseMm SparseSampledAddmm
    SparseMmReduceImpl PackPaddedSequence
    """
)
"""Functions that take rows in an order that data decide on: indices, masks, or places of sparse entries."""


UNSEEN = names_of_nodes("Cdist EuclideanDist Pdist Std StdMean Renorm Cumprod GridSampler2D GridSampler3D")
"""Functions whose values decide which entries meet in their derivatives; NaN does not show these entries."""


def may_change_unseen(node: Node) -> bool:
    """Tell whether other samples may meet at an equal node of a later pass, and none of its options shows it.

    A change in place through a view shows neither the view nor the entries that it left as they were.
    """
    return is_change_of_view(node) or name_of_node(node) in UNSEEN or is_norm_without_nan(node)


def axes_reordered(node: Any) -> frozenset[int] | None:
    """Return the axes of a node's output along which rows may be in any order; ``None`` if all axes may be."""
    name = name_of_node(node)
    if name in MATRIX_PRODUCTS:
        return None if takes_sparse(node) else frozenset()
    if isinstance(node, BackwardCFunction):
        return None if any(map(_may_be_indices, _kept_by(node))) else frozenset()
    if name not in BY_ROWS:
        return frozenset()
    above = node.next_functions[0][0] if node.next_functions else None
    if above is not None and name_of_node(above) in EXPANDING:
        source, number = above.next_functions[0]
        if source is None or tuple(made_by(source)[number].shape) != tuple(made_by(above)[0].shape):
            return None  # each place may take any of the rows
    if name == "Index":
        return _axes_of_index(node)
    if name in ALONG_AXIS and hasattr(node, "_saved_dim"):
        axes = len(made_by(node)[0].shape)
        return frozenset({saved_option(node, "dim") % axes} if axes else ())
    return None


def is_opaque(node: Node) -> bool:
    """Tell whether a node hides what its function computed, so that an equal node may compute something else.

    These are functions in C++ without a class in Python, such as scripted regions; functions whose class was
    made inside a function, such as compiled regions; and functions that keep objects other than tensors,
    numbers and texts. Identities hide nothing.
    """
    if not is_from_outside(node) or is_identity(node):
        return False
    if not isinstance(node, BackwardCFunction):
        return True
    return "<locals>" in function_of(node).__qualname__ or not all(map(_is_plain, vars(node).values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (Tensor, int, float, str, torch.dtype, torch.device))


def _axes_of_index(node: Any) -> frozenset[int] | None:
    """Return the axes that lists of indices have made, in place of the indexed axes; ``None`` if unknown."""
    try:
        indices = node._saved_indices
    except RuntimeError:  # freed; the pass raises an error later
        return None
    places = [place for place, index in enumerate(indices) if index is not None]
    if not places or places[-1] - places[0] != len(places) - 1:
        return None
    new = max(indices[place].dim() for place in places)
    first = indices[places[0]]
    above, number = node.next_functions[0]
    if new == 1 and above is not None and not is_mask(first) and not is_dry_run():
        extent = made_by(above)[number].shape[places[0]]
        if len(first) == extent and torch.equal(first, torch.arange(extent, device=first.device)):
            return frozenset()  # one entry of each row, in their order
    return frozenset(range(places[0], places[0] + new))


def _kept_by(node: Any) -> list[Any]:
    try:
        return [*vars(node).values(), *node.saved_tensors]
    except RuntimeError:  # freed; the pass raises an error later
        return []


def _may_be_indices(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_may_be_indices(each) for each in value)
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole or is_sparse(value)
