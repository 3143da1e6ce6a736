"""The uses that each node of the graph depends on. Uses are bits of a number, which makes their sets fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.autograd.graph import Node

from packprop.engine.curvature.second_order import ASKED
from packprop.engine.graph.graph import EAGER, Graph, ReachedUse
from packprop.errors import PackpropError


def dependence(graph: Graph) -> dict[Node, int]:
    """Return for each node between roots and leaves the uses that it depends on, as bits."""
    return upstream_bits([root.grad_fn for root in graph.roots if root.grad_fn is not None], bits_of(graph))


def bits_of(graph: Graph) -> dict[ReachedUse, int]:
    """Return a bit for each use."""
    return {use: 1 << place for place, use in enumerate(graph.uses)}


def upstream_bits(starts: Sequence[Node], bits: dict[ReachedUse, int]) -> dict[Node, int]:
    """Return the bits of the uses that lie upstream of each node, or at the node itself.

    Raises:
        PackpropError: If a branch of the graph has been summed already.
    """
    own: dict[Node, int] = {}
    for use, bit in bits.items():
        for node, _ in use.nodes.values():
            own[node] = own.get(node, 0) | bit
    masks: dict[Node, int] = {}
    for node in upstream_first(starts):
        if node.name() == EAGER:
            raise PackpropError(
                ASKED,
                "a branch inside eager_backward()",
                "its gradient has been taken, and its graph is gone: the second derivative is not known",
                "leave the branch outside eager_backward()",
            )
        masks[node] = own.get(node, 0)
        for upstream, _ in node.next_functions:
            if upstream is not None:
                masks[node] |= masks[upstream]
    return masks


def upstream_first(starts: Sequence[Node]) -> Iterator[Node]:
    """Yield every node once, after all nodes upstream of it."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(start, False) for start in starts]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [
                (above, False) for above, _ in node.next_functions if above is not None and above not in seen
            ]
