"""Nonlinear nodes between the losses and the uses."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.dependence import upstream_first
from packprop.engine.functions.node_calls import has_complex_numbers
from packprop.engine.functions.nodes import kind_of, made_by
from packprop.engine.graph.graph import Graph
from packprop.engine.samples.separation import layouts_at
from packprop.engine.tensors.layout import Layout


@dataclass(frozen=True)
class Nonlinearity:
    """An elementwise nonlinearity between a loss and some uses.

    Args:
        node: Its node.
        input: The edge of its input.
        shape: Shape of its input.
        upstream: Bits of the uses that its input depends on.
    """

    node: Node
    input: GradientEdge
    shape: torch.Size
    upstream: int


@dataclass
class NonlinearNodes:
    """The nodes between the losses and the uses that are not linear.

    Args:
        elementwise: Elementwise nonlinearities.
        layouts: The places of samples in their inputs.
        products: Products, each by the bits of its factors. A product is linear for a leaf if only one of its
            factors depends on the leaf's uses.
        unknown: Bits of the uses upstream of nodes of any other kind.
    """

    elementwise: list[Nonlinearity] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
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
        layouts = layouts_at(graph, [(each.input, each.shape) for each in nodes.elementwise])
        if isinstance(layouts, list):
            nodes.layouts = layouts
            break
        nodes.unknown |= nodes.elementwise.pop(layouts).upstream  # its layout was not found
    return nodes


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
        shape = torch.Size(made_by(source)[output].shape)
        if shape == torch.Size(made_by(node)[0].shape):
            nodes.elementwise.append(Nonlinearity(node, GradientEdge(source, output), shape, upstream))
            return
    if kind == "linear":
        return
    if len(places) > 1 and all(kind_of(node, [place], complex_numbers) == "linear" for place in places):
        nodes.products.add(tuple(mask for _, mask in factors))
    else:
        nodes.unknown |= upstream
