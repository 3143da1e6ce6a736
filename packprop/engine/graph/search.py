"""Searches of the autograd graph upstream of some nodes, and the notes of a walk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.recording.marks import nodes_above

__all__ = ["Trail", "depth_first", "is_beside", "leaves_above", "nodes_above", "upstream_of"]


def leaves_above(nodes: Iterable[Node | None]) -> list[Tensor]:
    """Return the leaves that require gradients and that the outputs of some nodes were computed from."""
    return [leaf for node in nodes_above(nodes) if (leaf := getattr(node, "variable", None)) is not None]


def is_beside(node: Node, first: dict[tuple[str, Node], Node]) -> bool:
    """Tell whether a function takes a leaf again, and not behind the first time, as in a loop over samples.

    ``first`` holds the first node of each function that takes a leaf.
    """
    above = set(nodes_above([node]))
    leaves = [each for each in above if hasattr(each, "variable")]
    return not above.issuperset([first.setdefault((node.name(), leaf), node) for leaf in leaves])


def upstream_of(node: Node) -> list[Node]:
    """Return a node's upstream neighbours."""
    return [upstream for upstream, _ in node.next_functions if upstream is not None]


def depth_first(
    starts: Iterable[Node], upstream: Callable[[Node], list[Node]], neighbours: dict[Node, list[Node]]
) -> Iterator[tuple[Node, bool]]:
    """Yield each node when it is met (``False``), and again when all nodes upstream of it are done (``True``).

    ``neighbours`` gets what ``upstream`` returns for each node.
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


SAME_AS = {"ReshapeAliasBackward0": "ViewBackward0"}
"""Nodes that have another name while a pass is traced."""


@dataclass
class Trail:
    """The notes of a walk.

    Args:
        neighbours: The upstream neighbours of each node; for a use, those that lead to data.
        order: Nodes, each after all nodes upstream of it.
        names: The name of each node, in the order of the walk; ``places`` has its number in this order.
        inputs: The ``next_functions`` of each node, read once.
        options: Axes, places and exponents that nodes have saved, and what users' functions have kept.
        extents: Extents that nodes have saved.
        orders: Axes along which rows of nodes may be in any order.
        consumed: Leaves, each with a node that takes it.
    """

    neighbours: dict[Node, list[Node]] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)
    names: dict[Node, str] = field(default_factory=dict)
    places: dict[Node, int] = field(default_factory=dict)
    inputs: dict[Node, Any] = field(default_factory=dict)
    options: list[Any] = field(default_factory=list)
    extents: list[Any] = field(default_factory=list)
    orders: list[Any] = field(default_factory=list)
    leaves: dict[Node, Tensor] = field(default_factory=dict)
    consumed: list[tuple[Tensor, Node]] = field(default_factory=list)

    @functools.cached_property
    def wiring(self) -> int:
        """A number that is equal for graphs of the same nodes, options and edges; known after the walk.

        Options enter as a text. Python's hash of a number is the number modulo 2^61 - 1, and that of -1 is -2:
        it would not tell axis -1 from -2, nor axis -2, which autograd shows as 2^64 - 2, from 6. Places and
        extents are small, so their hashes are safe.
        """
        edges = tuple(
            (-1 if above is None else self.places.get(above, -1), output)
            for node in self.places
            for above, output in self.inputs[node]
        )
        return hash((tuple(self.names.values()), repr(self.options), edges))

    def below(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the nodes that were computed from any of these nodes."""
        found, sources = set(), set(nodes)
        for node in self.order:
            if not sources.isdisjoint(self.neighbours[node]):
                found.add(node)
                sources.add(node)
        return found
