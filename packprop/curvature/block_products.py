"""Products with the block of one parameter, which hold the graph of their forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.curvature.generic_loss import loss_hessian_products
from packprop.curvature.linear import ASKED, INSTEAD, pulled, pushed
from packprop.curvature.nonlinearities import residuals
from packprop.curvature.routes import Routes, choose_routes
from packprop.curvature.second_order import differentiating_twice, gradients_at, require_second_derivatives
from packprop.curvature.seeds import columns
from packprop.errors import BadInput, PackpropError
from packprop.graph.graph import Graph
from packprop.tensors.dry import has_fault, is_dry_run
from packprop.tensors.precision import result_dtype
from packprop.tensors.state import version
from packprop.types import EXACT

Matrix = Literal["hessian", "ggn", "positive"]


Modify = Literal["clip", "abs"]


@dataclass(eq=False)
class BlockProduct:
    """The product with one parameter's block of a curvature matrix, of ``[v, *p]`` or a bare ``[*p]``.

    Args:
        leaf: The parameter.
        product: From vectors ``[v, *p]`` to products.
        states: All parameters that the graph was made with, as they were then.
        name: Name of the parameter, for messages.

    It holds the graph of its forward pass: it stays valid, and holds memory, until it is dropped (``del
    parameter.hmp``) or overwritten by another backward pass; nothing is run again. That a parameter
    has changed is known from PyTorch's count of changes, from where its values are and, for what is written
    through ``.data``, from some of them.
    """

    leaf: Tensor
    product: Callable[[Tensor], Tensor]
    states: States
    name: str

    def __call__(self, vectors: Tensor) -> Tensor:
        """Products of the shape of ``vectors``.

        Raises:
            BadInput: If the vectors do not have the parameter's shape behind at most one axis.
            PackpropError: If a parameter of the graph was changed in place since.
        """
        shape = self.leaf.shape
        bare = vectors.shape == shape
        if not bare and vectors.shape[1:] != shape:
            raise BadInput(
                "A product with a curvature block was asked for.",
                f"vectors of shape {list(vectors.shape)}",
                f"parameter {self.name!r} has shape {list(shape)}",
                "give [v, *p] or [*p]",
            )
        if were_changed(self.states):
            raise PackpropError(
                "A product with a curvature block was asked for.",
                f"parameter {self.name!r}",
                "parameters were changed in place since the backward pass: the block is that of old values",
                "run a forward and a backward pass with the extension again",
            )
        given = vectors.detach().to(self.leaf.dtype)
        try:
            product = self.product(given[None] if bare else given)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise PackpropError(
                "A product with a curvature block was asked for.",
                f"parameter {self.name!r}",
                "inputs or other tensors of the forward pass were changed in place since",
                "run a forward and a backward pass with the extension again",
            ) from error
        return (product[0] if bare else product).to(result_dtype(vectors, product))


class State(NamedTuple):
    """A tensor as it was when something was computed from it.

    Args:
        tensor: The tensor.
        storage: Where its data were.
        version: How often it had been changed in place.
        sample: Some of its entries: changes through ``.data`` are not counted by the version.
    """

    tensor: Tensor
    storage: int
    version: int
    sample: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> State:
        """The tensor as it is now."""
        return cls(tensor, 0 if is_dry_run() else tensor.data_ptr(), version(tensor), _sample(tensor).clone())

    @property
    def is_past(self) -> bool:
        """Whether the tensor is another by now; waits for the device."""
        now = State.of(self.tensor)
        if (now.storage, now.version) != (self.storage, self.version):
            return True
        equal = (now.sample == self.sample) | (now.sample.isnan() & self.sample.isnan())
        return has_fault(~equal.all())


def _sample(tensor: Tensor, most: int = 64) -> Tensor:
    """Entries spread over a tensor ``[k]``; all of them if they are few."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // most)]


States = Sequence[State]


def states_of(tensors: Iterable[Tensor]) -> States:
    """Tensors as they are now."""
    return [State.of(tensor) for tensor in tensors]


def were_changed(states: States) -> bool:
    """Whether one of the tensors has been changed since, as far as ``State`` sees it."""
    return any(state.is_past for state in states)


def block_products(graph: Graph, matrix: Matrix, modify: Modify) -> Iterator[tuple[Tensor, BlockProduct]]:
    """The product with each leaf's block.

    Args:
        graph: With its samples located; kept alive by the products.
        matrix: The Hessian, the GGN, or the positive-curvature Hessian.
        modify: What the last one does with negative curvature of elementwise nonlinearities.

    Raises:
        PackpropError: If the losses have no curvature of use, or nonlinearities are not elementwise where only
            elementwise ones have a positive part.
    """
    leaves = graph.leaves()
    states = states_of(leaves)
    if matrix == "hessian":
        for leaf in leaves:
            yield leaf, BlockProduct(leaf, _HessianBlock(graph, leaf), states, graph.name(leaf))
        return
    columns(graph, EXACT, create_graph=False)  # refuses losses that have no GGN
    targets: list[GradientEdge] = [loss.call.edge for loss in graph.losses]
    shares: list[Callable[[Tensor], Tensor]] = [loss_hessian_products(graph, loss) for loss in graph.losses]
    if matrix == "positive":
        route = choose_routes(graph, known_losses=True, per_sample=True)
        _require_swept(graph, route)
        for (nonlinearity, _), weight in zip(route.nonlinearities, residuals(graph, route), strict=True):
            targets.append(nonlinearity.input)
            shares.append(_Scaling(weight.clamp(min=0) if modify == "clip" else weight.abs()))
    for leaf in leaves:
        yield leaf, BlockProduct(leaf, _RootBlock(graph, leaf, targets, shares), states, graph.name(leaf))


def _require_swept(graph: Graph, route: Routes) -> None:
    for leaf in graph.leaves():
        if route.route(leaf) != "swept":
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
    """``H v``: the gradient is kept once it was taken."""

    graph: Graph
    leaf: Tensor
    _slope: list[Tensor | None] = field(default_factory=list)

    def __call__(self, vectors: Tensor) -> Tensor:
        with differentiating_twice(f"parameter {self.graph.name(self.leaf)!r}", ASKED, INSTEAD):
            if not self._slope:
                own = f"parameter {self.graph.name(self.leaf)!r}"
                require_second_derivatives(self.graph.roots, [self.leaf], lambda leaf: own, ASKED)
                with torch.enable_grad():
                    self._slope += gradients_at(self.graph, [self.leaf], create_graph=True)
            slope = self._slope[0]
            slope = slope.to_dense() if slope is not None and slope.is_sparse else slope
            (found,) = pulled([slope], [self.leaf], [vectors])
        return torch.zeros_like(vectors) if found is None else found


@dataclass(eq=False)
class _RootBlock:
    """``sum_t J_t^T M_t J_t v`` over tensors t between the parameter and the root."""

    graph: Graph
    leaf: Tensor
    targets: Sequence[GradientEdge]
    shares: Sequence[Callable[[Tensor], Tensor]]
    _checked: bool = False

    def __call__(self, vectors: Tensor) -> Tensor:
        own = f"parameter {self.graph.name(self.leaf)!r}"
        if not self._checked:  # the graph stays what it is
            require_second_derivatives(self.graph.roots, [self.leaf], lambda leaf: own, ASKED, linear=True)
            self._checked = True
        with differentiating_twice(own, ASKED, INSTEAD):
            pushed_on = pushed(self.targets, [self.leaf], [vectors])
            curved = [share(each) for share, each in zip(self.shares, pushed_on, strict=True)]
            (found,) = pulled(self.targets, [self.leaf], curved)
        return torch.zeros_like(vectors) if found is None else found
