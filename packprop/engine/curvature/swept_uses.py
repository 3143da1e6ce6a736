"""Copies of uses for sweeps that go only to some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from packprop.engine.curvature.dependence import upstream_bits
from packprop.engine.curvature.routes import Routes
from packprop.engine.graph.graph import Graph, ReachedUse


def swept_uses(graph: Graph, routes: Routes) -> list[ReachedUse]:
    """Copy the uses of swept leaves, with these leaves alone."""
    swept = {id(leaf) for leaf in routes.swept}
    copies = []
    for use in graph.uses:
        sites = [site for site in use.sites if id(site.leaf) in swept]
        if sites:
            copy = replace(use, sites=sites)
            routes.bits[copy] = routes.bits[use]
            copies.append(copy)
    return with_own_ends(copies, routes)


def with_own_ends(uses: Sequence[ReachedUse], routes: Routes) -> list[ReachedUse]:
    """Copy uses for a sweep that ends at those without another one of them upstream."""
    copies = []
    for use in uses:
        copy = replace(use, is_end=False)
        routes.bits[copy] = routes.bits[use]
        copies.append(copy)
    masks = upstream_bits(
        [node for use in copies for node, _ in use.nodes.values()], {use: routes.bits[use] for use in copies}
    )
    for use in copies:
        above = [above for node, _ in use.nodes.values() for above, _ in node.next_functions]
        use.is_end = not any(masks[node] for node in above if node is not None)
    return copies
