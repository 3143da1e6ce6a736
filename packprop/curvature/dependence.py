"""On which uses each node of the graph depends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.autograd.graph import Node

from packprop.curvature.second_order import ASKED
from packprop.errors import PackpropError
from packprop.graph.graph import EAGER, Graph, ReachedUse


def dependence(graph: Graph) -> dict[Node, int]:
    """For each node between roots and leaves, whether (and on which uses, as bits) it depends."""
    found = {f: 1 << place for place, f in enumerate(graph.uses)}
    return upstream_bits([root.grad_fn for root in graph.roots if root.grad_fn is not None], found)


def upstream_bits(starts: Sequence[Node], found: dict[ReachedUse, int]) -> dict[Node, int]:
    """Bits of the uses that lie upstream of each node, itself included."""
    own: dict[Node, int] = {}
    for f, bit in found.items():
        for node, _ in f.nodes.values():
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
    """Every node once, after all those that it leads to."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(start, False) for start in starts]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(up, False) for up, _ in node.next_functions if up is not None and up not in seen]
