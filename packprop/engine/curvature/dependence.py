"""The uses that each node of the graph depends on. Uses are bits of a number, which makes their sets fast."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch.autograd.graph import Node

from packprop.engine.curvature.second_order import ASKED
from packprop.engine.graph.graph import EAGER, Graph
from packprop.engine.graph.search import nodes_above
from packprop.errors import PackpropError


def bits_of(graph: Graph) -> dict[Node, int]:
    """Return a bit for each use, by its node."""
    return {use.anchors[0]: 1 << place for place, use in enumerate(graph.uses)}


def dependence(graph: Graph) -> dict[Node, int]:
    """Return the bits of the uses that lie upstream of each node, or at the node itself.

    Raises:
        PackpropError: If a branch of the graph has been summed already.
    """
    bits = bits_of(graph)
    masks: dict[Node, int] = {}
    for node in graph.order:
        if node.name() == EAGER:
            raise PackpropError(
                ASKED,
                "a branch inside eager_backward()",
                "its gradient has been taken, and its graph is gone: the second derivative is not known",
                "leave the branch outside eager_backward()",
            )
        above = [masks[upstream] for upstream, _ in node.next_functions if upstream is not None]
        masks[node] = functools.reduce(int.__or__, above, bits.get(node, 0))
    return masks


def upstream_first(graph: Graph, starts: Iterable[Node]) -> list[Node]:
    """Return some nodes and all upstream of them, each node after all that lie upstream of it."""
    above = set(nodes_above(starts))
    return [node for node in graph.order if node in above]
