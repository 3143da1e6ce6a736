"""Curvature matrices of a graph, given by their products with vectors, for many calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.curvature.linear import (
    ASKED,
    INSTEAD,
    LinearMap,
    Vectors,
    jvps,
    linearize,
    vjps,
    with_zeros,
)
from packprop.engine.curvature.second_order import (
    differentiating_twice,
    faulty_jacobian,
    faulty_node,
    require_second_derivatives,
    warn_unless_finite,
)
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.pull import derivatives
from packprop.engine.tensors.hooks import Hooks


@dataclass(eq=False)
class Hessian:
    """The Hessian of the roots in some parameters; it keeps the gradient.

    Args:
        roots: The roots of the graph.
        seeds: The gradient of each; ``None`` for 1.
        parameters: The parameters.
    """

    roots: Sequence[Tensor]
    seeds: Sequence[Tensor | None]
    parameters: Sequence[Tensor]

    @cached_property
    def gradients(self) -> list[Tensor | None]:
        """The gradient in each parameter, with its graph; ``None`` if the roots do not depend on it."""
        if not any(root.requires_grad for root in self.roots):
            return [None] * len(self.parameters)
        with torch.enable_grad():
            found = derivatives(self.roots, self.parameters, self.seeds, create_graph=True)
        return [each.to_dense() if each is not None and each.is_sparse else each for each in found]

    def multiply(self, vectors: Vectors) -> list[Tensor | None]:
        """Return ``H v``."""
        return vjps(self.gradients, self.parameters, vectors)

    def faulty_node(self) -> Node | None:
        """Return the node whose second derivative is not finite."""
        return faulty_node(self.roots, self.seeds, self.parameters, self.parameters)


@dataclass(eq=False)
class GaussNewton:
    """The matrix ``sum_t J_t^T H_t J_t``, over tensors t between some parameters and the roots.

    Args:
        roots: The roots of the graph.
        seeds: The gradient of each; ``None`` for 1.
        parameters: The parameters.
        tensors: The tensors t, or their edges.
        hessians: For each t the product with ``H_t``.
    """

    roots: Sequence[Tensor]
    seeds: Sequence[Tensor | None]
    parameters: Sequence[Tensor]
    tensors: Sequence[Any]
    hessians: Sequence[Callable[[Tensor], Tensor]]

    @cached_property
    def jacobian(self) -> LinearMap:
        """The product with J, whose graph stays."""
        return linearize(self.tensors, self.parameters)

    def multiply(self, vectors: Vectors) -> list[Tensor | None]:
        """Return ``J^T H J v``, by ``jacobian`` if that has been made."""
        known = "jacobian" in vars(self)
        at_tensors = self.jacobian(vectors) if known else jvps(self.tensors, self.parameters, vectors)
        curved = [hessian(each) for hessian, each in zip(self.hessians, at_tensors, strict=True)]
        return vjps(self.tensors, self.parameters, curved)

    def faulty_node(self) -> Node | None:
        """Return the node whose second derivative is not finite."""
        own = faulty_node(self.roots, self.seeds, self.tensors, self.tensors)
        return own or faulty_jacobian(self.tensors, self.parameters)


@dataclass(eq=False)
class CurvatureProduct:
    """Maps vectors ``[v, *p]`` for each parameter to products with a curvature matrix.

    Errors name the function that cannot be differentiated twice; a warning names one whose second derivative is
    not finite. The user's hooks do not run.

    Args:
        matrix: The matrix.
        called: Name of the product, for warnings.
        where: What is differentiated, for errors.
        name: Maps a parameter to its name, for errors.
        hooks: The user's hooks on the graph.
        kernels: A context in which checkpoints must run again.
        graph: The graph, if warnings shall name a layer nearby.
    """

    matrix: Hessian | GaussNewton
    called: str
    where: str
    name: Callable[[Tensor], str]
    hooks: Hooks
    kernels: Callable[[], AbstractContextManager[Any]] = nullcontext
    graph: Graph | None = None
    _is_checked: bool = False
    _is_looked_at: bool = False

    def prepare(self) -> CurvatureProduct:
        """Check the graph and differentiate it once, for many products.

        Raises:
            PackpropError: If a function in the graph is not twice differentiable.
        """
        self._check()
        with differentiating_twice(self.where, ASKED, INSTEAD), self.hooks.quiet(), self.kernels():
            _ = self.matrix.gradients if isinstance(self.matrix, Hessian) else self.matrix.jacobian
        return self

    def __call__(self, vectors: Vectors) -> list[Tensor]:
        """Return products of the shapes of the vectors.

        Raises:
            PackpropError: If a function in the graph is not twice differentiable.
        """
        self._check()
        with differentiating_twice(self.where, ASKED, INSTEAD), self.hooks.quiet(), self.kernels():
            products = with_zeros(self.matrix.multiply(vectors), self.matrix.parameters, len(vectors[0]))
            if not self._is_looked_at:  # once is enough, because it waits for the device
                self._is_looked_at = True
                warn_unless_finite(self.called, products, vectors, self.matrix.faulty_node, self.graph)
        return products

    def _check(self) -> None:
        if not self._is_checked:  # once is enough: the graph does not change
            linear = isinstance(self.matrix, GaussNewton)
            require_second_derivatives(self.matrix.roots, self.matrix.parameters, self.name, ASKED, linear)
            self._is_checked = True
