"""Traversal of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.autograd.graph import Node


def depth_first(
    starts: Iterable[Node], upstream: Callable[[Node], list[Node]], neighbours: dict[Node, list[Node]]
) -> Iterator[tuple[Node, bool]]:
    """Yield each node when it is met (``False``), and again when all nodes upstream of it are done (``True``).

    Args:
        starts: The nodes to begin at.
        upstream: Returns the upstream neighbours of a node.
        neighbours: Gets the upstream neighbours of each node.
    """

    def enter(node: Node) -> tuple[Node, Iterator[Node]]:
        neighbours[node] = upstream(node)
        return node, iter(neighbours[node])

    for start in starts:
        if start in neighbours:
            continue
        stack = [enter(start)]
        yield start, False
        while stack:
            node, remaining = stack[-1]
            child = next(remaining, None)
            if child is None:
                stack.pop()
                yield node, True
            elif child not in neighbours:
                stack.append(enter(child))
                yield child, False


def upstream_of(node: Node) -> list[Node]:
    """Return a node's upstream neighbours."""
    return [upstream for upstream, _ in node.next_functions if upstream is not None]
