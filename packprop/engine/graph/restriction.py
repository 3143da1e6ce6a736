"""The leaves that the user's own pass can be restricted to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.graph.graph import Graph
from packprop.engine.graph.search import upstream_of


def split_leaves(graph: Graph, candidates: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the candidates that a pass can leave out, and all other leaves that it reaches.

    A pass that is restricted to the other leaves must still reach every use.
    """
    left_out, leaves = {id(leaf): leaf for leaf in candidates}, {}
    use_at = {node: use for use in graph.uses for node, _ in use.nodes.values()}
    reached: set[Node] = set()
    for node in graph.order:
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
            if id(leaf) not in left_out:
                reached.add(node)
        elif not reached.isdisjoint(upstream_of(node)):
            reached.add(node)
        elif node in use_at:
            for site in use_at[node].sites:
                left_out.pop(id(site.leaf), None)
            reached.add(node)
    return list(left_out.values()), [leaf for key, leaf in leaves.items() if key not in left_out]
