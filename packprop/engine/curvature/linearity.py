"""Nonlinear nodes between the losses and the uses."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.dependence import upstream_first
from packprop.engine.functions.node_calls import has_complex_numbers
from packprop.engine.functions.nodes import ENTRYWISE, RESHAPES, Kind, kind_of, made_by, name_of_node
from packprop.engine.graph.graph import Graph
from packprop.engine.samples.separation import Place, places_at


@dataclass(frozen=True)
class Nonlinearity:
    """An elementwise nonlinearity between a loss and some uses.

    Args:
        node: Its node.
        input: The edge of its input.
        upstream: Bits of the uses that its input depends on.
    """

    node: Node
    input: GradientEdge
    upstream: int


@dataclass
class NonlinearNodes:
    """The nodes between the losses and the uses that are not linear.

    Args:
        elementwise: Elementwise nonlinearities.
        places: Their inputs, with the places of samples in them.
        products: Products, each by the bits of its factors. A product is linear for a leaf if only one of its
            factors depends on the leaf's uses.
        unknown: Bits of the uses upstream of nodes of any other kind.
    """

    elementwise: list[Nonlinearity] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    products: set[tuple[int, ...]] = field(default_factory=set)
    unknown: int = 0

    def allow_sweep(self, bits: int) -> bool:
        """Tell whether uses, given as bits, have only linear and elementwise nodes downstream."""
        if bits & self.unknown:
            return False
        return not any(sum(bool(bits & factor) for factor in factors) > 1 for factors in self.products)


def nonlinear_nodes(graph: Graph, masks: dict[Node, int]) -> NonlinearNodes:
    """Find the nodes between the losses and the uses that are not linear.

    Args:
        graph: The graph, with its samples located.
        masks: The uses upstream of each node, as bits.
    """
    nodes = NonlinearNodes()
    for node in upstream_first([loss.entrance.edge.node for loss in graph.losses]):
        _classify(node, masks, nodes)
    while nodes.elementwise:
        places = places_at(graph, [each.input for each in nodes.elementwise])
        if isinstance(places, list):
            nodes.places = places
            break
        nodes.unknown |= nodes.elementwise.pop(places).upstream  # its layout was not found
    return nodes


def kind_of_map(node: Node, place: int) -> Kind | Literal["complex", "reshape", "piecewise"]:
    """Return the kind of a node in one of its inputs, and tell three kinds apart from the others.

    A ``"complex"`` node has complex numbers. A ``"reshape"`` keeps all entries in order, and a ``"piecewise"``
    linear function takes each entry by itself.
    """
    if has_complex_numbers(node):
        return "complex"
    name, kind = name_of_node(node), kind_of(node, [place])
    if name in RESHAPES:
        return "reshape"
    return "piecewise" if kind == "linear" and name in ENTRYWISE else kind


def _classify(node: Node, masks: dict[Node, int], nodes: NonlinearNodes) -> None:
    """Add a node to those of its kind, unless it is linear."""
    edges = node.next_functions
    factors = [
        (place, masks[above]) for place, (above, _) in enumerate(edges) if above is not None and masks[above]
    ]
    if not factors:
        return
    places = [place for place, _ in factors]
    upstream = functools.reduce(int.__or__, (mask for _, mask in factors))
    complex_numbers = has_complex_numbers(node)
    kind = kind_of(node, places, complex_numbers)
    if kind == "elementwise":
        source, output = edges[places[0]]
        assert source is not None
        if made_by(source)[output].shape == made_by(node)[0].shape:
            nodes.elementwise.append(Nonlinearity(node, GradientEdge(source, output), upstream))
            return
    if kind == "linear":
        return
    if len(places) > 1 and all(kind_of(node, [place], complex_numbers) == "linear" for place in places):
        nodes.products.add(tuple(mask for _, mask in factors))
    else:
        nodes.unknown |= upstream
