"""Traced graphs: removing redundant nodes, finding constants.

# NOTE [Tidy graphs]
A pass views one tensor in many ways. In a graph each view is a call, which takes as long as a small operation.
So packprop removes views that lead back to their source. They share its memory, so that in-place writes reach
both. packprop leaves equal operations alone: there are few, a compiler joins them, and packprop would have to
find out which of them in-place writes set apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from packprop.applications.compiled.aliases import is_operation

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("alias", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"),
        "_unsafe_view",  # at the end of matrix products with more than two axes; it declares no shared memory
    )
)
"""Operations whose results begin where their inputs do, and share their memory."""


def tidy(graph: GraphModule) -> GraphModule:
    """Remove redundant views and unused nodes; see NOTE [Tidy graphs]. The graph runs without gradients."""
    for node in graph.graph.nodes:
        above = node
        while _is_view(above):
            above = above.args[0]
            if (laid_out := _layout_of(above)) is not None and laid_out == _layout_of(node):
                node.replace_all_uses_with(above)
                break
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def constants_of(graph: GraphModule) -> Iterator[Tensor]:
    """Yield the tensors that a graph holds besides its inputs."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(graph)
            if isinstance(value, Tensor):
                yield value


def operations_of(graph: GraphModule) -> int:
    """Count the operations of a graph, without those that take an entry of a tuple."""
    return sum(node.op == "call_function" and node.target is not operator.getitem for node in graph.graph.nodes)


def _is_view(node: Node) -> bool:
    target: Any = node.target
    return is_operation(target) and str(target.overloadpacket) in VIEWS


def _layout_of(node: Node) -> tuple[Any, ...] | None:
    """Return shape, strides and precision of a node's result; ``None`` if they are not known."""
    made = node.meta.get("tensor_meta")
    return None if made is None else (torch.Size(made.shape), tuple(made.stride), made.dtype)
