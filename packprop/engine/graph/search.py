"""Searches of the autograd graph upstream of some nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.recording.marks import nodes_above

__all__ = ["depth_first", "leaves_above", "nodes_above", "upstream_of"]


def leaves_above(nodes: Iterable[Node | None]) -> list[Tensor]:
    """Return the leaves that require gradients and that the outputs of some nodes were computed from."""
    return [leaf for node in nodes_above(nodes) if (leaf := getattr(node, "variable", None)) is not None]


def upstream_of(node: Node) -> list[Node]:
    """Return a node's upstream neighbours."""
    return [upstream for upstream, _ in node.next_functions if upstream is not None]


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
