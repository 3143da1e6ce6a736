"""Routes to each parameter's diagonal of the Hessian.

# NOTE [Hessian diagonal]
A loss has curvature in the output y of a use because the loss function has curvature, and because nodes
between the two have curvature. If these nodes are (piecewise) linear or elementwise,
``H = sum_losses J^T H_l J + sum_z J_z^T diag(r) J_z``, with z the input of a nonlinear node phi, J_z its
Jacobian in y, and ``r = phi''(z) dL/dphi(z)``.

*swept*: The first sum is the GGN, so packprop sweeps its columns. For the second sum it sweeps a unit column
for each entry of z, and weights the squares of the cotangents by r, which may have either sign. It does not
take a root of r, which would not be differentiable where r is zero. If z is y itself, squares of the use's
inputs replace the sweep. If each entry of the parameter enters one entry of y, the diagonal of the Hessian in y
is enough, and columns end there. Columns at the output of a matrix product or a convolution begin at its input
if its Jacobian is the same for all samples: one pass then gives as many rows of the Jacobian as there are
samples. Without nonlinear nodes the Hessian is the GGN.

*output*: For parameters upstream of any other node, packprop computes columns ``H u`` of the Hessian at the
outputs of the uses by double backward: ``diag(J^T H J) = sum_u (J^T H u) * (J^T u)`` over unit columns u. This
requires that outputs are affine in the parameter, and that no use of it is upstream of another.

*parameter*: packprop differentiates twice in all other parameters, entry by entry: tied weights with one use
upstream of another, parametrised weights, and parameters of functions that are not affine in them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.generic_loss import are_coupled
from packprop.engine.curvature.second_order import (
    ASKED,
    differentiating_twice,
    gradients_at,
    named,
    require_second_derivatives,
)
from packprop.engine.functions.node_calls import has_complex_numbers
from packprop.engine.functions.nodes import (
    ENTRYWISE,
    RESHAPES,
    Kind,
    is_wrong_in_third_order,
    kind_of,
    made_by,
    name_of_node,
)
from packprop.engine.graph.graph import EAGER, Graph, ReachedUse
from packprop.engine.graph.search import nodes_above
from packprop.engine.samples.feeding import model_outputs
from packprop.engine.samples.separation import Place, places_at
from packprop.engine.tensors.traced import decided
from packprop.errors import PackpropError


def bits_by_node(graph: Graph) -> dict[Node, int]:
    """Return a bit for each use, by its node: sets of uses are fast if they are bits of a number."""
    return {use.anchors[0]: 1 << place for place, use in enumerate(graph.uses)}


def dependence(graph: Graph) -> dict[Node, int]:
    """Return the bits of the uses that lie upstream of each node, or at the node itself.

    Raises:
        PackpropError: If ``eager_backward()`` has freed a branch of the graph.
    """
    bits = bits_by_node(graph)
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
    """Return some nodes and all nodes upstream of them, each after the nodes upstream of it."""
    above = set(nodes_above(starts))
    return [node for node in graph.order if node in above]


def couples_samples(graph: Graph) -> bool:
    """Tell whether the Hessian in the model's outputs has entries between samples."""
    if graph.samples == 1:
        return False
    require_second_derivatives(graph.roots, graph.leaves(), named(graph), linear=True)
    edges = [output.edge for output in model_outputs(graph)]
    with differentiating_twice(graph.label(graph.uses[0])), torch.enable_grad():
        gradients = gradients_at(graph, edges, create_graph=True)
        return are_coupled(gradients, edges, graph.source_layouts)


@dataclass
class NonlinearNodes:
    """The nodes between the losses and the uses that are not linear.

    Args:
        elementwise: Elementwise nonlinearities, each with its input.
        products: Products, each by the bits of its factors. A product is linear for a leaf if only one of its
            factors depends on the leaf's uses.
        unknown: Bits of the uses upstream of nodes of any other kind.
    """

    elementwise: dict[Node, Place] = field(default_factory=dict)
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
    nodes, inputs = NonlinearNodes(), dict[Node, GradientEdge]()
    for node in upstream_first(graph, [loss.entrance.edge.node for loss in graph.losses]):
        if (edge := _classify(node, masks, nodes)) is not None:
            inputs[node] = edge
    while inputs:
        places = places_at(graph, list(inputs.values()))
        if isinstance(places, list):
            nodes.elementwise = dict(zip(inputs, places, strict=True))
            break
        nodes.unknown |= masks[inputs.pop([*inputs][places]).node]  # its layout was not found
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


def _classify(node: Node, masks: dict[Node, int], nodes: NonlinearNodes) -> GradientEdge | None:
    """Return the input of an elementwise nonlinearity; add products and nodes of unknown kind to ``nodes``."""
    edges = node.next_functions
    factors = [
        (place, masks[above]) for place, (above, _) in enumerate(edges) if above is not None and masks[above]
    ]
    if not factors:
        return None
    places, bits = zip(*factors, strict=True)
    complex_numbers = has_complex_numbers(node)
    kind = kind_of(node, places, complex_numbers)
    if kind == "elementwise":
        source, output = edges[places[0]]
        assert source is not None
        if made_by(source)[output].shape == made_by(node)[0].shape:
            return GradientEdge(source, output)
    if kind == "linear":
        return None
    if len(places) > 1 and all(kind_of(node, [place], complex_numbers) == "linear" for place in places):
        nodes.products.add(bits)
    else:
        nodes.unknown |= functools.reduce(int.__or__, bits)
    return None


Route = Literal["swept", "output", "parameter"]


@dataclass
class Routes:
    """The route of each leaf's diagonal.

    Args:
        swept: Leaves of the route *swept*, from losses and elementwise nonlinearities.
        nonlinearities: These nonlinearities, each with its input.
        output: Uses whose outputs get Hessian columns, with the leaves whose diagonals these columns give.
        parameter: Leaves of the route *parameter*.
        bits: The bit of each use, by its node.
        masks: The uses that each node depends on, as bits; see ``dependence``.
    """

    swept: list[Tensor] = field(default_factory=list)
    nonlinearities: dict[Node, Place] = field(default_factory=dict)
    output: list[tuple[list[ReachedUse], list[Tensor]]] = field(default_factory=list)
    parameter: list[Tensor] = field(default_factory=list)
    bits: dict[Node, int] = field(default_factory=dict)
    masks: dict[Node, int] = field(default_factory=dict)

    @property
    def is_gauss_newton(self) -> bool:
        """True if only the losses have curvature: the Hessian is the generalized Gauss-Newton matrix."""
        return not (self.nonlinearities or self.output or self.parameter)

    def route(self, leaf: Tensor) -> Route:
        """Return the route of one leaf."""
        if any(leaf is other for other in self.swept):
            return "swept"
        return "parameter" if any(leaf is other for other in self.parameter) else "output"

    def bits_of(self, uses: Iterable[ReachedUse]) -> int:
        """Return the bits of some uses, or of copies of them."""
        return sum(self.bits[use.anchors[0]] for use in uses)


def choose_routes(graph: Graph, known_losses: bool, per_sample: bool, create_graph: bool = False) -> Routes:
    """Choose a route for every leaf.

    Args:
        graph: The graph, with its samples located.
        known_losses: Whether the losses have roots of their Hessians, and enter linearly.
        per_sample: Whether the request is for diagonals of single samples.
        create_graph: Whether the diagonals are differentiable.

    Raises:
        PackpropError: If ``eager_backward()`` has freed a branch of the graph, or third derivatives are wrong.
    """
    routes = Routes(bits=bits_by_node(graph), masks=dependence(graph))
    all_known = known_losses and not graph.without_loss
    nonlinear = nonlinear_nodes(graph, routes.masks) if all_known else NonlinearNodes(unknown=-1)
    coupled = not all_known and decided(
        "whether the Hessian has entries between samples", lambda: couples_samples(graph)
    )
    # the rows of these samples were reordered by assignments, which columns for all samples do not follow
    scattered = any(layout.rows is not None for use in graph.uses for layout in use.layouts)
    outputs: dict[tuple[ReachedUse, ...], list[Tensor]] = {}
    for leaf in graph.leaves():
        uses = _uses_of(graph, [leaf])
        bits = routes.bits_of(uses)
        if coupled or scattered or not _is_affine(leaf, uses, bits, routes.masks):
            routes.parameter.append(leaf)
        elif nonlinear.allow_sweep(bits):
            routes.swept.append(leaf)
        else:
            outputs.setdefault(tuple(uses), []).append(leaf)
    for shared, leaves in outputs.items():
        columns = sum(shape.numel() for use in shared for shape in use.shapes) // max(graph.samples, 1)
        if not per_sample and sum(leaf.numel() for leaf in leaves) < columns:
            routes.parameter += leaves  # the parameter needs fewer columns than the outputs
        else:
            routes.output.append((list(shared), leaves))
    if create_graph:
        twice = [*routes.parameter, *(leaf for _, leaves in routes.output for leaf in leaves)]
        require_third_derivatives(graph, twice)
    swept = routes.bits_of(_uses_of(graph, routes.swept))
    routes.nonlinearities = {
        node: place for node, place in nonlinear.elementwise.items() if routes.masks[place.edge.node] & swept
    }
    return routes


def require_third_derivatives(graph: Graph, leaves: Sequence[Tensor]) -> None:
    """Raise if PyTorch's third derivative of a node is wrong, which ``create_graph`` would need.

    Raises:
        PackpropError: If such a node lies between the roots and one of the leaves.
    """
    own = bits_by_node(graph)
    bits = sum(own[use.anchors[0]] for use in _uses_of(graph, leaves))
    for node, mask in dependence(graph).items():
        if mask & bits and is_wrong_in_third_order(node):
            raise PackpropError(
                "A diagonal of the Hessian was asked for with create_graph=True.",
                f"parameter {graph.name(leaves[0])!r}, behind {node.name()}",
                "the diagonal takes two derivatives of that node, and PyTorch's third derivative is wrong",
                "leave out create_graph=True, write the normalisation out in basic operations, or ask for GGN "
                "quantities, which take one derivative",
            )


def _uses_of(graph: Graph, leaves: Sequence[Tensor]) -> list[ReachedUse]:
    """Return the uses that some leaves enter."""
    wanted = {id(leaf) for leaf in leaves}
    return [use for use in graph.uses if any(id(site.leaf) in wanted for site in use.sites)]


def _is_affine(leaf: Tensor, uses: Sequence[ReachedUse], bits: int, masks: dict[Node, int]) -> bool:
    """Tell whether the outputs of its uses are affine in a leaf, and their inputs do not depend on it."""
    sites = [site for use in uses for site in use.sites if site.leaf is leaf]
    if not all(site.direct and site.entry.linear for site in sites):
        return False
    return not any(masks.get(edge.node, -1) & bits for use in uses for edge in use.edges)


def swept_uses(graph: Graph, routes: Routes) -> list[ReachedUse]:
    """Copy the uses of swept leaves, with these leaves alone."""
    swept = {id(leaf) for leaf in routes.swept}
    copies = [
        replace(use, sites=[site for site in use.sites if id(site.leaf) in swept])
        for use in _uses_of(graph, routes.swept)
    ]
    return with_own_ends(copies, routes)


def with_own_ends(uses: Sequence[ReachedUse], routes: Routes) -> list[ReachedUse]:
    """Copy uses for a sweep to them, which ends at each use that has none of the others upstream."""
    bits = routes.bits_of(uses)
    return [
        replace(use, is_end=not bits & routes.masks[use.anchors[0]] & ~routes.bits_of([use])) for use in uses
    ]
