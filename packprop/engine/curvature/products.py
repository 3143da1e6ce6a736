"""Curvature matrices of a graph, given by their products with vectors; products with Jacobians."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from packprop.engine.curvature.linear import (
    ASKED,
    INSTEAD,
    LinearMap,
    Product,
    Vectors,
    jvps,
    linearize,
    require_vectors,
    vjps,
    with_zeros,
)
from packprop.engine.curvature.second_order import (
    differentiating_twice,
    faulty_jacobian,
    faulty_node,
    named,
    require_passable,
    require_second_derivatives,
    warn_unless_finite,
)
from packprop.engine.curvature.seeds import loss_hessians
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.hooks import hooks_below
from packprop.engine.graph.pull import as_dense, derivatives
from packprop.engine.graph.search import nodes_above
from packprop.engine.tensors.hooks import Hooks
from packprop.errors import BadInput

Matrix = Literal["ggn", "hessian"]


@dataclass(eq=False)
class _OfRoots:
    """A matrix of second derivatives of the roots of a graph in some parameters.

    Args:
        roots: The roots of the graph.
        seeds: The gradient of each; ``None`` for 1.
        parameters: The parameters.
    """

    roots: Sequence[Tensor]
    seeds: Sequence[Tensor | None]
    parameters: Sequence[Tensor]


@dataclass(eq=False)
class Hessian(_OfRoots):
    """The Hessian of the roots in some parameters; it keeps the gradient."""

    @functools.cached_property
    def gradients(self) -> list[Tensor | None]:
        """The gradient in each parameter, with its graph; ``None`` if the roots do not depend on it."""
        if not any(root.requires_grad for root in self.roots):
            return [None] * len(self.parameters)
        with torch.enable_grad():
            return as_dense(derivatives(self.roots, self.parameters, self.seeds, create_graph=True))

    def multiply(self, vectors: Vectors) -> list[Tensor | None]:
        """Return ``H v``."""
        return vjps(self.gradients, self.parameters, vectors)

    def faulty_node(self) -> Node | None:
        """Return the node whose second derivative is not finite."""
        return faulty_node(self.roots, self.seeds, self.parameters, self.parameters)


@dataclass(eq=False)
class GaussNewton(_OfRoots):
    """The matrix ``sum_t J_t^T H_t J_t``, over tensors t between some parameters and the roots.

    Args:
        tensors: The tensors t, or their edges.
        hessians: For each t the product with ``H_t``.
    """

    tensors: Sequence[Any]
    hessians: Sequence[Callable[[Tensor], Tensor]]

    @functools.cached_property
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


def vjp(outputs: Tensor, parameters: Sequence[Tensor], vectors: Tensor) -> list[Tensor]:
    """Return vector-Jacobian products ``J^T u`` with the Jacobian of ``outputs`` in some parameters.

    Args:
        outputs: A tensor with a graph, which is not freed.
        parameters: Leaves or other tensors of the graph.
        vectors: ``[*y]`` or ``[v, *y]``.

    Returns:
        For each parameter ``[*p]`` or ``[v, *p]``; zeros if ``outputs`` do not depend on it.

    Raises:
        BadInput: If the vectors do not fit.
        PackpropError: If a checkpoint in the graph is reentrant, or a backward function is not linear.
    """
    parameters = _differentiable("vjp", parameters)
    columns, back = _as_columns("vjp(outputs, parameters, vectors)", [outputs], [vectors])
    require_passable([outputs], ASKED)
    quiet = hooks_below([outputs], parameters).quiet()
    with differentiating_twice("the outputs given to vjp", ASKED, INSTEAD), quiet:
        products = vjps([outputs], parameters, columns)
    return back(with_zeros(products, parameters, len(columns[0])))


def jvp(outputs: Tensor, parameters: Sequence[Tensor], vectors: Vectors) -> Tensor:
    """Return Jacobian-vector products ``J v``, by reverse over reverse.

    Args:
        outputs: A tensor with a graph, which is not freed and must be twice differentiable.
        parameters: Leaves or other tensors of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        ``[*y]`` or ``[v, *y]``.

    Raises:
        BadInput: If the vectors do not fit.
        PackpropError: If a function in the graph is not twice differentiable.
    """
    parameters = _differentiable("jvp", parameters)
    columns, back = _as_columns("jvp(outputs, parameters, vectors)", parameters, vectors)
    require_second_derivatives([outputs], parameters, shown, ASKED, linear=True)
    quiet = hooks_below([outputs], parameters).quiet()
    with differentiating_twice("the outputs given to jvp", ASKED, INSTEAD), quiet:
        products = jvps([outputs], parameters, columns)
        search = functools.partial(faulty_jacobian, [outputs], parameters)
        warn_unless_finite("A product by jvp", products, vectors, search)
    return back(products)[0]


def hvp(loss: Tensor | Callable[[], Tensor], parameters: Sequence[Tensor], vectors: Vectors) -> list[Tensor]:
    """Return Hessian-vector products of a scalar in some parameters (Pearlmutter 1994).

    Args:
        loss: A scalar with a graph, which is not freed; or a function without arguments that computes it.
            packprop calls it once, with kernels of scaled dot product attention that are twice differentiable.
        parameters: Leaves of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        For each parameter, of the shape of its vectors.

    Raises:
        BadInput: If vectors do not fit, or the loss is not a scalar.
        PackpropError: If a function in the graph is not twice differentiable.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hvp(lambda: (w**3).sum(), [w], [torch.tensor([1.0, 0.0])])
        [tensor([6., 0.])]
    """
    parameters = _differentiable("hvp", parameters)
    columns, back = _as_columns("hvp(loss, parameters, vectors)", parameters, vectors)
    product, _ = hessian_product("hvp", loss, parameters)
    return back(product(columns))


def hessian_product(
    asked: str, loss: Tensor | Callable[[], Tensor], parameters: Sequence[Tensor]
) -> tuple[Product, Tensor]:
    """Return ``hvp`` as a function for many calls, which keeps the gradient; and the loss.

    Raises:
        BadInput: If the loss is not a scalar.
        PackpropError: If a function in the graph is not twice differentiable. The product may also raise this.
    """
    value, kernels = _evaluated(loss)
    if value.numel() != 1:
        raise BadInput(
            f"{asked}(...) was called.", f"loss of shape {list(value.shape)}", "it is no scalar", "reduce it"
        )
    matrix, hooks = Hessian([value], [None], parameters), hooks_below([value], parameters)
    where = f"the loss given to {asked}"
    return CurvatureProduct(matrix, f"A product by {asked}", where, shown, hooks, kernels).prepare(), value


def ggnvp(
    graph: tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    vectors: Vectors,
) -> list[Tensor]:
    """Return GGN-vector products ``J^T H J v`` (Schraudolph 2002).

    Args:
        graph: The model's output and the loss computed from it, whose graph is not freed; or a function without
            arguments that computes both. packprop calls it like that of ``hvp``.
        parameters: Leaves of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        For each parameter, of the shape of its vectors.

    Raises:
        BadInput: If vectors do not fit, or ``graph`` gives no pair of tensors.
        PackpropError: If a function in the graph is not twice differentiable.
    """
    parameters = _differentiable("ggnvp", parameters)
    columns, back = _as_columns("ggnvp(graph, parameters, vectors)", parameters, vectors)
    product, _ = ggn_product("ggnvp", graph, parameters)
    return back(product(columns))


def ggn_product(
    asked: str,
    graph: tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
) -> tuple[Product, Tensor]:
    """Return ``ggnvp`` as a function for many calls, which keeps its graphs; and the loss.

    Raises:
        BadInput: If ``graph`` gives no pair of tensors.
        PackpropError: If a function in the graph is not twice differentiable. The product may also raise this.
    """
    found, kernels = _evaluated(graph)
    if not isinstance(found, (tuple, list)) or [isinstance(each, Tensor) for each in found] != [True, True]:
        raise BadInput(
            f"{asked}(...) was called.",
            "graph, or what it returned",
            "it is no pair of tensors: the GGN needs the model's output and the loss that is computed from it",
            f"{asked}(lambda: (outputs := model(x), loss(outputs, y)), parameters)",
        )
    outputs, loss = found
    edges = {edge for node in nodes_above([loss.grad_fn]) for edge in node.next_functions}
    if not outputs.requires_grad or get_gradient_edge(outputs)[:2] not in {
        (loss.grad_fn, loss.output_nr),
        *edges,
    }:
        raise BadInput(
            f"{asked}(...) was called.",
            f"outputs of shape {list(outputs.shape)}",
            "the loss does not depend on them, as if it were computed from another forward pass",
            f"{asked}(lambda: (outputs := model(x), loss(outputs, y)), parameters)",
        )
    gradient = Hessian([loss], [None], [outputs])

    def hessian(vectors: Tensor) -> Tensor:
        return with_zeros(gradient.multiply([vectors]), [outputs], len(vectors))[0]

    matrix = GaussNewton([loss], [None], parameters, [outputs], [hessian])
    where, hooks = f"the graph given to {asked}", hooks_below([loss, outputs], parameters)
    return CurvatureProduct(matrix, f"A product by {asked}", where, shown, hooks, kernels).prepare(), loss


def graph_product(graph: Graph, matrix: Matrix, parameters: Sequence[Tensor]) -> Product:
    """Return the product with the GGN, or the Hessian, of a recorded loss.

    The product maps vectors ``[v, *p]`` for each parameter to products. The GGN linearises everything before
    the loss function, as for the extensions: operations between the model's output and the loss function belong
    to the model.

    Args:
        graph: The graph, with its samples located; the product keeps it alive.
        matrix: The GGN or the Hessian.
        parameters: Leaves; products are zero for a leaf that the graph does not reach.

    Raises:
        PackpropError: If a function in the graph is not twice differentiable, or a loss has no GGN. The product
            may also raise this.
    """
    if matrix == "hessian":
        return hessian_product("operators.of_data", graph.roots[0], parameters)[0]
    gauss_newton = GaussNewton(graph.roots, graph.root_gradients(), parameters, *loss_hessians(graph))
    called, where = "A product with the GGN of a batch", "the loss of a batch"
    return CurvatureProduct(gauss_newton, called, where, named(graph), graph.hooks, graph=graph).prepare()


def _evaluated(value: Any) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
    """Call a function; return its value and its context, in which checkpoints must run again in products."""
    if not callable(value) or isinstance(value, Tensor):
        return value, nullcontext
    kernels = functools.partial(sdpa_kernel, SDPBackend.MATH)
    with torch.inference_mode(False), torch.enable_grad(), kernels():
        return value(), kernels


def shown(tensor: Tensor) -> str:
    """Return the words for a tensor without a name, for messages."""
    return f"the tensor of shape {list(tensor.shape)}"


def _as_columns(
    call: str, like: Sequence[Tensor], vectors: Vectors
) -> tuple[list[Tensor], Callable[[list[Tensor]], list[Tensor]]]:
    """Return vectors with a leading axis, and the function that removes this axis from products if it is new.

    Raises:
        BadInput: If vectors have neither the shapes of some tensors nor one more leading axis.
    """
    columns = [vector.detach() for vector in vectors]
    if [column.shape for column in columns] == [tensor.shape for tensor in like]:
        return [column[None] for column in columns], lambda products: [product[0] for product in products]
    require_vectors(call, like, columns, many=True)
    return columns, lambda products: products


def _differentiable(call: str, parameters: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors in which something is differentiated; refuse none, and frozen ones."""
    chosen = tuple(parameters)
    frozen = [each for each in chosen if not each.requires_grad]
    if frozen or not chosen:
        where = shown(frozen[0]) if frozen else "no parameters"
        why = "PyTorch differentiates in tensors that require gradients"
        raise BadInput(f"{call}(...) was called.", where, why, "give the trainable parameters alone")
    return chosen
