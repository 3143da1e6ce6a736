"""Going through the nodes of the autograd graph, and what these have made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.autograd.graph import Node


def depth_first(
    starts: Iterable[Node], upstream: Callable[[Node], list[Node]], stepped: dict[Node, list[Node]]
) -> Iterator[tuple[Node, bool]]:
    """Each node on the way down (``False``) and again when all upstream of it is done (``True``).

    Args:
        starts: Where to begin.
        upstream: The neighbours that a node leads to.
        stepped: Is filled with them.
    """

    def enter(node: Node) -> tuple[Node, Iterator[Node]]:
        stepped[node] = upstream(node)
        return node, iter(stepped[node])

    for start in starts:
        if start in stepped:
            continue
        stack = [enter(start)]
        yield start, False
        while stack:
            node, remaining = stack[-1]
            child = next(remaining, None)
            if child is None:
                stack.pop()
                yield node, True
            elif child not in stepped:
                stack.append(enter(child))
                yield child, False


def upstream_of(node: Node) -> list[Node]:
    """A node's upstream neighbours."""
    return [upstream for upstream, _ in node.next_functions if upstream is not None]


def made_by(node: Node) -> list[Any]:
    """Shape, dtype and device of each of the tensors that a node made.

    A private attribute of autograd nodes: no public one says how many outputs there are.
    """
    return list(node._input_metadata)
