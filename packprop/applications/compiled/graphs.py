"""Traced graphs: removing redundant nodes, finding constants.

# NOTE [Tidy graphs]
A pass views one tensor in many ways. In a graph each view is a call, which takes as long as a small operation.
So packprop removes views that lead back to their source. They share its memory, so that in-place writes reach
both. Equal operations stay: they are few, a compiler joins them, and writes in place would decide which may be.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from packprop.applications.compiled.aliases import is_operation, takes_size_alone

_ATEN = torch.ops.aten

IDENTITIES = frozenset({_ATEN.detach.default, _ATEN.alias.default})
"""Operations that change nothing if nothing is differentiated."""

VIEWS = frozenset(
    {
        _ATEN.t.default,
        _ATEN.permute.default,
        _ATEN.transpose.int,
        _ATEN.expand.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.squeeze.default,
        _ATEN.unsqueeze.default,
    }
)
"""Views that begin where their inputs do, beside those that only take a size."""


def tidy(graph: GraphModule) -> GraphModule:
    """Remove nodes without effect; see NOTE [Tidy graphs]. The graph runs without gradients."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in IDENTITIES:
            node.replace_all_uses_with(node.args[0])
    _leave_out_views(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def constants_of(graph: GraphModule) -> Iterator[Tensor]:
    """Return the tensors that a graph holds beside its inputs."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(graph)
            if isinstance(value, Tensor):
                yield value


def operation_of_unknown_size(graph: GraphModule) -> str | None:
    """Return the first operation whose outputs have sizes that depend on values."""
    for node in graph.graph.nodes:
        if is_operation(node.target) and torch.Tag.dynamic_output_shape in node.target.tags:
            if node.target is _ATEN.index.Tensor and not any(map(_is_mask, node.args[1])):
                continue
            return str(node.target)
    return None


def _is_mask(index: Any) -> bool:
    """Tell whether an index takes as many entries as it has true ones."""
    made = index.meta.get("tensor_meta") if isinstance(index, Node) else None
    return index is not None and (made is None or made.dtype in (torch.bool, torch.uint8))


def operations_of(graph: GraphModule) -> int:
    """Count the operations of a graph; taking an entry of a tuple is none."""
    return sum(node.op == "call_function" and node.target is not operator.getitem for node in graph.graph.nodes)


def _leave_out_views(graph: Graph) -> None:
    """Remove views of views that are laid out like a tensor before them."""
    for node in graph.nodes:
        above = node
        while above.op == "call_function" and _begins_where_its_input_does(above):
            above = above.args[0]
            if (laid_out := _layout_of(above)) is not None and laid_out == _layout_of(node):
                node.replace_all_uses_with(above)
                break


def _begins_where_its_input_does(node: Node) -> bool:
    """Tell whether a node is a view of ``VIEWS``, or lays the same entries out in another size.

    Matrix products with more than two axes end in a view that does not declare its shared memory. So packprop
    recognises operations of this second kind by their arguments, and those that repeat or sum entries by the
    number of results.
    """
    if node.target in VIEWS:
        return True
    if not takes_size_alone(node.target):
        return False
    made, given = _layout_of(node), _layout_of(node.all_input_nodes[0])
    return made is not None and given is not None and made[0].numel() == given[0].numel()


def _layout_of(node: Node) -> tuple[Any, ...] | None:
    """Return shape, strides and precision of a node's result; ``None`` if they are not known."""
    made = node.meta.get("tensor_meta")
    return None if made is None else (torch.Size(made.shape), tuple(made.stride), made.dtype)
