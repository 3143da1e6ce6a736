"""The leaves that the user's own pass can be restricted to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.graph.graph import Graph
from packprop.engine.graph.traversal import depth_first, upstream_of


def split_leaves(graph: Graph, candidates: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the candidates that a pass can leave out, and all other leaves that it reaches.

    A pass that is restricted to the other leaves must still reach every use.
    """
    left_out, leaves = {id(leaf): leaf for leaf in candidates}, {}
    use_at = {node: use for use in graph.uses for node, _ in use.nodes.values()}
    roots = [root.grad_fn for root in graph.roots if root.grad_fn is not None]
    reached: set[Node] = set()
    upstream: dict[Node, list[Node]] = {}
    for node, done in depth_first(roots, upstream_of, upstream):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        if not done:
            continue
        if leaf is not None and id(leaf) in left_out:
            continue
        if node in use_at and not any(neighbour in reached for neighbour in upstream[node]):
            for site in use_at[node].sites:
                left_out.pop(id(site.leaf), None)
            reached.add(node)
        elif leaf is not None or any(neighbour in reached for neighbour in upstream[node]):
            reached.add(node)
    return list(left_out.values()), [leaf for key, leaf in leaves.items() if key not in left_out]
