"""Products with the block of one parameter, which keep the graph of their forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.generic_loss import loss_hessian_products
from packprop.engine.curvature.linear import ASKED, INSTEAD, jvps, vjps
from packprop.engine.curvature.needed import read_by_products
from packprop.engine.curvature.nonlinearities import residuals
from packprop.engine.curvature.not_finite import faulty_jacobian, faulty_node, warn_unless_finite
from packprop.engine.curvature.routes import Routes, choose_routes
from packprop.engine.curvature.second_order import (
    differentiating_twice,
    gradients_at,
    require_second_derivatives,
)
from packprop.engine.curvature.seeds import columns
from packprop.engine.curvature.snapshots import Snapshot, snapshots_of, were_changed
from packprop.engine.graph.graph import Graph
from packprop.engine.tensors.hooks import Hooks
from packprop.engine.tensors.precision import at_least, result_dtype
from packprop.errors import BadInput, PackpropError
from packprop.types import EXACT

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
        product: Maps vectors ``[v, *p]`` to products.
        snapshots: Snapshots, from the backward pass, of the parameters that the product reads.
        name: Name of the parameter, for messages.
        hooks: The user's hooks on the graph, which products do not run.
        factor: The factor on products.
    """

    leaf: Tensor
    product: _HessianBlock | _GaussNewtonBlock
    snapshots: Sequence[Snapshot]
    name: str
    hooks: Hooks
    factor: Tensor | float = 1.0
    _looked_at: bool = False

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
            BadInput: If the vectors do not have the parameter's shape behind at most one axis.
            PackpropError: If a parameter that the product reads was changed in place since the backward pass.
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
        try:
            with self.hooks.quiet():
                product = self.product(given[None] if single else given)
                if not self._looked_at:  # once is enough, because it waits for the device
                    self._looked_at = True
                    what = f"A product with the block of parameter {self.name!r}"
                    warn_unless_finite(what, [product], [given], self.product.faulty_node, self.product.graph)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise PackpropError(
                "A product with a curvature block was asked for.",
                f"parameter {self.name!r}",
                "inputs or other tensors of the forward pass were changed in place since",
                "run a forward and a backward pass with the extension again",
            ) from error
        product = product[0] if single else product
        return (self.factor * product).to(result_dtype(vectors, product)).contiguous()


def block_products(graph: Graph, matrix: Matrix, modify: Modify) -> Iterator[tuple[Tensor, BlockProduct]]:
    """Yield each leaf with the product with its block.

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
    read = [[now[id(each)] for each in needed] for needed in read_by_products(graph, leaves)]
    if matrix == "hessian":
        for leaf, snapshots in zip(leaves, read, strict=True):
            yield leaf, BlockProduct(leaf, _HessianBlock(graph, leaf), snapshots, graph.name(leaf), graph.hooks)
        return
    columns(graph, EXACT, create_graph=False)  # refuses losses that have no GGN
    tensors: list[GradientEdge] = [loss.entrance.edge for loss in graph.losses]
    hessians: list[Callable[[Tensor], Tensor]] = [loss_hessian_products(graph, loss) for loss in graph.losses]
    if matrix == "positive":
        routes = choose_routes(graph, known_losses=True, per_sample=True)
        _require_swept(graph, routes)
        tensors += [place.edge for _, place in routes.nonlinearities]
        weights = residuals(graph, [nonlinearity.node for nonlinearity, _ in routes.nonlinearities])
        hessians += [_Scaling(at_least(each, 0.0) if modify == "clip" else each.abs()) for each in weights]
    for leaf, snapshots in zip(leaves, read, strict=True):
        block = _GaussNewtonBlock(graph, leaf, tensors, hessians)
        yield leaf, BlockProduct(leaf, block, snapshots, graph.name(leaf), graph.hooks)


def _require_swept(graph: Graph, routes: Routes) -> None:
    for leaf in graph.leaves():
        if routes.route(leaf) != "swept":
            raise PackpropError(
                "A positive-curvature Hessian was asked for.",
                f"parameter {graph.name(leaf)!r}",
                "between it and the loss lies more than linear maps and elementwise nonlinearities: only the "
                "curvature of these has a sign at each entry",
                "ask for GGNMP, or set requires_grad=False on the parameter",
            )


@dataclass(frozen=True)
class _Scaling:
    weight: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        return vectors * self.weight


@dataclass(eq=False)
class _HessianBlock:
    """The product ``H v``: the first call computes the gradient, and keeps it."""

    graph: Graph
    leaf: Tensor
    _gradient: list[Tensor | None] = field(default_factory=list)

    def __call__(self, vectors: Tensor) -> Tensor:
        with differentiating_twice(f"parameter {self.graph.name(self.leaf)!r}", ASKED, INSTEAD):
            if not self._gradient:
                own = f"parameter {self.graph.name(self.leaf)!r}"
                require_second_derivatives(self.graph.roots, [self.leaf], lambda leaf: own, ASKED)
                with torch.enable_grad():
                    self._gradient += gradients_at(self.graph, [self.leaf], create_graph=True)
            gradient = self._gradient[0]
            gradient = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            (product,) = vjps([gradient], [self.leaf], [vectors])
        return torch.zeros_like(vectors) if product is None else product

    def faulty_node(self) -> Node | None:
        """Return the node whose second derivative is not finite."""
        return faulty_node(self.graph.roots, self.graph.root_gradients(), [self.leaf], [self.leaf])


@dataclass(eq=False)
class _GaussNewtonBlock:
    """The product ``sum_t J_t^T H_t J_t v`` over tensors t between the parameter and the root.

    Args:
        graph: The graph with the roots.
        leaf: The parameter.
        tensors: The edges of the tensors t.
        hessians: For each t the product with ``H_t``.
    """

    graph: Graph
    leaf: Tensor
    tensors: Sequence[GradientEdge]
    hessians: Sequence[Callable[[Tensor], Tensor]]
    _checked: bool = False

    def __call__(self, vectors: Tensor) -> Tensor:
        own = f"parameter {self.graph.name(self.leaf)!r}"
        if not self._checked:  # once is enough: the graph does not change
            require_second_derivatives(self.graph.roots, [self.leaf], lambda leaf: own, ASKED, linear=True)
            self._checked = True
        with differentiating_twice(own, ASKED, INSTEAD):
            at_tensors = jvps(self.tensors, [self.leaf], [vectors])
            curved = [hessian(each) for hessian, each in zip(self.hessians, at_tensors, strict=True)]
            (product,) = vjps(self.tensors, [self.leaf], curved)
        return torch.zeros_like(vectors) if product is None else product

    def faulty_node(self) -> Node | None:
        """Return the node whose second derivative is not finite."""
        own = faulty_node(self.graph.roots, self.graph.root_gradients(), self.tensors, self.tensors)
        return own or faulty_jacobian(self.tensors, [self.leaf])
