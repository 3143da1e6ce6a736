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
    done: set[Node] = set()
    stack = [*starts][::-1]
    while stack:
        node = stack[-1]
        if node not in neighbours:
            neighbours[node] = upstream(node)
            stack += neighbours[node][::-1]
            yield node, False
            continue
        del stack[-1]
        if node not in done:
            done.add(node)
            yield node, True


def upstream_of(node: Node) -> list[Node]:
    """Return a node's upstream neighbours."""
    return [upstream for upstream, _ in node.next_functions if upstream is not None]
