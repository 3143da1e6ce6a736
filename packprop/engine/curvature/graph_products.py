"""Products with the curvature matrix of all parameters together, for a recorded graph with known losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.columns import Columns
from packprop.engine.curvature.generic_loss import loss_hessian_products
from packprop.engine.curvature.linear import ASKED, INSTEAD, Vectors, linearize, vjps, with_zeros
from packprop.engine.curvature.not_finite import faulty_jacobian, faulty_node, warn_unless_finite
from packprop.engine.curvature.products import Product, hessian_product
from packprop.engine.curvature.second_order import differentiating_twice, named, require_second_derivatives
from packprop.engine.curvature.seeds import columns
from packprop.engine.graph.graph import Graph
from packprop.types import EXACT

Matrix = Literal["ggn", "hessian"]


def graph_product(graph: Graph, matrix: Matrix, parameters: Sequence[Tensor]) -> Product:
    """Return the product with the GGN, or the Hessian, of a recorded loss.

    The product maps vectors ``[v, *p]`` for each parameter to products. The GGN linearises everything before
    the loss function, as for the extensions: operations between the model's output and the loss function belong
    to the model.

    Args:
        graph: The graph, with its samples located; the product keeps it alive.
        matrix: The GGN or the Hessian.
        parameters: Leaves; the products of those that the graph does not reach are zero.

    Raises:
        PackpropError: If a function in the graph is not twice differentiable, or a loss has no GGN. The product
            may also raise this.
    """
    if matrix == "hessian":
        return hessian_product("operators.of_data", graph.roots[0], parameters)[0]
    _refuse_losses_without(graph)
    edges: list[GradientEdge] = [loss.entrance.edge for loss in graph.losses]
    hessians: list[Callable[[Tensor], Tensor]] = [loss_hessian_products(graph, loss) for loss in graph.losses]
    require_second_derivatives(graph.roots, parameters, named(graph), ASKED, linear=True)
    with differentiating_twice("the loss of a batch", ASKED, INSTEAD), graph.hooks.quiet():
        jacobian = linearize(edges, parameters)
    looked_at: list[bool] = []

    def product(vectors: Vectors) -> list[Tensor]:
        with differentiating_twice("the loss of a batch", ASKED, INSTEAD), graph.hooks.quiet():
            at_losses = jacobian(vectors)
            curved = [hessian(each) for hessian, each in zip(hessians, at_losses, strict=True)]
            products = with_zeros(vjps(edges, parameters, curved), parameters, len(vectors[0]))
            if not looked_at:  # once is enough, because it waits for the device
                looked_at.append(True)
                warn_unless_finite("A product with the GGN of a batch", products, vectors, search, graph)
            return products

    def search() -> Node | None:
        own = faulty_node(graph.roots, graph.root_gradients(), edges, edges)
        return own or faulty_jacobian(edges, parameters)

    return product


def _refuse_losses_without(graph: Graph) -> list[Columns]:
    """Raise if a loss has no GGN. Columns are made on demand, so this makes none of them."""
    with torch.no_grad():
        return columns(graph, EXACT, create_graph=False)
