"""Products with the block of one parameter, which keep the graph of their forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.curvature.nonlinearities import residuals
from packprop.engine.curvature.products import CurvatureProduct, GaussNewton, Hessian
from packprop.engine.curvature.routes import Routes, choose_routes
from packprop.engine.curvature.second_order import named
from packprop.engine.curvature.seeds import loss_hessians
from packprop.engine.curvature.snapshots import (
    Snapshot,
    frozen_parameters,
    read_by_products,
    snapshots_of,
    were_changed,
)
from packprop.engine.graph.graph import Graph
from packprop.engine.tensors.precision import at_least, result_dtype
from packprop.errors import BadInput, PackpropError

Matrix = Literal["hessian", "ggn", "positive"]


Modify = Literal["clip", "abs"]


@dataclass(eq=False)
class BlockProduct:
    """The product with one parameter's block of a curvature matrix, for vectors ``[v, *p]`` or one ``[*p]``.

    The product keeps the graph of its forward pass, and does not run the model again. It stays valid, and takes
    memory, until you drop it (``del parameter.hmp``) or another backward pass overwrites it. It raises if a
    parameter that it reads has changed; it mostly reads the parameters downstream of its own. See ``Snapshot``
    for the way it detects a change.

    Args:
        leaf: The parameter.
        product: The product with the block, for vectors ``[v, *p]``.
        snapshots: Snapshots, from the backward pass, of the parameters that the product reads.
        name: Name of the parameter, for messages.
        factor: The factor on products.
    """

    leaf: Tensor
    product: CurvatureProduct
    snapshots: Sequence[Snapshot]
    name: str
    factor: Tensor | float = 1.0

    def __reduce__(self) -> NoReturn:
        raise PackpropError(
            "An object that holds a product with a curvature block was to be pickled.",
            f"parameter {self.name!r}",
            "the product refers to the graph of its backward pass, which nothing can copy",
            "delete the attribute of every parameter first (del parameter.hmp), or save model.state_dict()",
        )

    def __copy__(self) -> BlockProduct:
        return replace(self)

    def scaled(self, factor: Tensor | float) -> BlockProduct:
        """Return the product with a multiple of the block."""
        return replace(self, factor=self.factor * factor)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return products of the shape of ``vectors``.

        Raises:
            BadInput: If the vectors do not have the parameter's shape, after at most one leading axis.
            PackpropError: If a parameter or another tensor that the product reads was changed in place since
                the backward pass.
        """
        shape = self.leaf.shape
        single = vectors.shape == shape
        if not single and vectors.shape[1:] != shape:
            raise BadInput(
                "A product with a curvature block was asked for.",
                f"vectors of shape {list(vectors.shape)}",
                f"parameter {self.name!r} has shape {list(shape)}",
                "give [v, *p] or [*p]",
            )
        if were_changed(self.snapshots):
            raise PackpropError(
                "A product with a curvature block was asked for.",
                f"parameter {self.name!r}",
                "parameters were changed in place since the backward pass: the block is that of old values",
                "run a forward and a backward pass with the extension again",
            )
        given = vectors.detach().to(self.leaf.dtype)
        (product,) = self.product([given[None] if single else given])
        product = product[0] if single else product
        return (self.factor * product).to(result_dtype(vectors, product)).contiguous()


def block_products(graph: Graph, matrix: Matrix, modify: Modify) -> Iterator[tuple[Tensor, BlockProduct]]:
    """Yield each leaf, and the product with its block.

    Args:
        graph: The graph, with its samples located; the products keep it alive.
        matrix: The Hessian, the GGN, or the positive-curvature Hessian.
        modify: The treatment of negative curvature of elementwise nonlinearities in the positive-curvature
            Hessian: set to zero, or replaced by its absolute value.

    Raises:
        PackpropError: If the Hessian of a loss cannot be used; for the positive-curvature Hessian, if a
            nonlinearity is not elementwise.
    """
    leaves = graph.leaves()
    now = dict(zip(map(id, leaves), snapshots_of(leaves), strict=True))
    frozen = snapshots_of(frozen_parameters(graph.order))
    read = [[*(now[id(each)] for each in needed), *frozen] for needed in read_by_products(graph, leaves)]
    roots, seeds = graph.roots, graph.root_gradients()
    tensors: list[GradientEdge] = []
    hessians: list[Callable[[Tensor], Tensor]] = []
    if matrix != "hessian":
        tensors, hessians = loss_hessians(graph)
    if matrix == "positive":
        routes = choose_routes(graph, known_losses=True, per_sample=True)
        _require_swept(graph, routes)
        tensors += [place.edge for place in routes.nonlinearities.values()]
        weights = residuals(graph, list(routes.nonlinearities))
        weights = [at_least(each, 0.0) if modify == "clip" else each.abs() for each in weights]
        hessians += [functools.partial(torch.mul, weight) for weight in weights]
    for leaf, snapshots in zip(leaves, read, strict=True):
        block = (
            Hessian(roots, seeds, [leaf])
            if matrix == "hessian"
            else GaussNewton(roots, seeds, [leaf], tensors, hessians)
        )
        where = named(graph)(leaf)
        called = f"A product with the block of {where}"
        product = CurvatureProduct(block, called, where, named(graph), graph.hooks, graph=graph)
        yield leaf, BlockProduct(leaf, product, snapshots, graph.name(leaf))


def _require_swept(graph: Graph, routes: Routes) -> None:
    for leaf in graph.leaves():
        if routes.route(leaf) != "swept":
            raise PackpropError(
                "A positive-curvature Hessian was asked for.",
                f"parameter {graph.name(leaf)!r}",
                "between it and the loss lie functions that are neither linear nor elementwise: their "
                "curvature has no sign at each entry",
                "ask for GGNMP, or set requires_grad=False on the parameter",
            )
