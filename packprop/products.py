"""Products with curvature matrices: with the block of one parameter, and with that of all of them.

# NOTE [Products by double backward]
All products are reverse over reverse. Forward over reverse is cheaper, and silently wrong through LayerNorm,
InstanceNorm and BatchNorm in training mode in torch 2.13. ``J v`` is the derivative, along v, of ``J^T u`` in a
vector u that is otherwise arbitrary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

from packprop.errors import BadInput, PackpropError
from packprop.graph import Graph, made_by
from packprop.hessian import Plan, not_twice, plan, residuals, slopes_at
from packprop.memory import version
from packprop.seeds import columns, loss_hessian_products
from packprop.sweep import pull_columns
from packprop.types import EXACT

Matrix = Literal["hessian", "ggn", "positive"]
Modify = Literal["clip", "abs"]
Vectors = Sequence[Tensor]


# One parameter's block


@dataclass(eq=False)
class BlockProduct:
    """The product with one parameter's block of a curvature matrix, of ``[v, *p]`` or a bare ``[*p]``.

    Args:
        leaf: The parameter.
        product: From vectors ``[v, *p]`` to products.
        versions: All parameters that the graph was made with, and their versions then.
        name: Name of the parameter, for messages.

    It holds the graph of its forward pass: it stays valid, and holds memory, until it is dropped (``del
    parameter.hmp``) or overwritten by another backward pass; nothing is run again.
    """

    leaf: Tensor
    product: Callable[[Tensor], Tensor]
    versions: list[tuple[Tensor, int]]
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
        if any(version(leaf) != before for leaf, before in self.versions):
            raise PackpropError(
                "A product with a curvature block was asked for.",
                f"parameter {self.name!r}",
                "parameters were changed in place since the backward pass: the block is that of old values",
                "run a forward and a backward pass with the extension again",
            )
        given = vectors.detach().to(self.leaf.dtype)
        product = self.product(given[None] if bare else given)
        return (product[0] if bare else product).to(vectors.dtype)


def block_products(graph: Graph, matrix: Matrix, modify: Modify) -> Iterator[tuple[Tensor, BlockProduct]]:
    """The product with each leaf's block.

    Args:
        graph: With its samples settled; kept alive by the products.
        matrix: The Hessian, the GGN, or the positive-curvature Hessian.
        modify: What the last one does with negative curvature of elementwise nonlinearities.

    Raises:
        PackpropError: If the losses have no curvature of use, or nonlinearities are not elementwise where only
            elementwise ones have a positive part.
    """
    leaves = graph.leaves()
    versions = [(leaf, version(leaf)) for leaf in leaves]
    if matrix == "hessian":
        for leaf in leaves:
            yield leaf, BlockProduct(leaf, _HessianBlock(graph, leaf), versions, graph.name(leaf))
        return
    columns(graph, EXACT, create_graph=False)  # refuses losses that have no GGN
    targets: list[GradientEdge] = [loss.call.edge for loss in graph.losses]
    shares: list[Callable[[Tensor], Tensor]] = [loss_hessian_products(graph, loss) for loss in graph.losses]
    if matrix == "positive":
        way = plan(graph, known_losses=True, per_sample=True)
        _require_swept(graph, way)
        for (curve, _), weight in zip(way.curves, residuals(graph, way), strict=True):
            targets.append(curve.input)
            shares.append(_Scaling(weight.clamp(min=0) if modify == "clip" else weight.abs()))
    for leaf in leaves:
        yield leaf, BlockProduct(leaf, _RootBlock(graph, leaf, targets, shares), versions, graph.name(leaf))


def _require_swept(graph: Graph, way: Plan) -> None:
    for leaf in graph.leaves():
        if way.way(leaf) != "swept":
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
        where = f"parameter {self.graph.name(self.leaf)!r}"
        with _explained(where):
            if not self._slope:
                with torch.enable_grad():
                    self._slope += slopes_at(self.graph, [self.leaf], create_graph=True)
            slope = self._slope[0]
            slope = slope.to_dense() if slope is not None and slope.is_sparse else slope
            found = None
            if slope is not None and slope.requires_grad:
                (found,) = pull_columns([slope], [self.leaf], [vectors])
        return torch.zeros_like(vectors) if found is None else found


@dataclass(eq=False)
class _RootBlock:
    """``sum_t J_t^T M_t J_t v`` over tensors t between the parameter and the root."""

    graph: Graph
    leaf: Tensor
    targets: Sequence[GradientEdge]
    shares: Sequence[Callable[[Tensor], Tensor]]

    def __call__(self, vectors: Tensor) -> Tensor:
        with _explained(f"parameter {self.graph.name(self.leaf)!r}"):
            pushed = _pushed(self.targets, [self.leaf], [vectors])
            curved = [share(each) for share, each in zip(self.shares, pushed, strict=True)]
            (found,) = pull_columns(self.targets, [self.leaf], curved)
        return torch.zeros_like(vectors) if found is None else found


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """What torch says of functions without second derivatives, in four parts."""
    try:
        yield
    except PackpropError:
        raise
    except RuntimeError as error:
        raise not_twice(where, error) from error


# Vector-Jacobian and Jacobian-vector products of many vectors at once


def _pushed(outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Vectors) -> list[Tensor]:
    """``J v`` for many v ``[v, *x]``: ``[v, *y]`` for each output. See NOTE [Products by double backward]."""
    with torch.enable_grad():
        arbitrary = [_zeros_at(output).requires_grad_() for output in outputs]
        pulled: Any = torch.autograd.grad(
            list(outputs), list(inputs), arbitrary, create_graph=True, allow_unused=True
        )
    pairs = [
        (slope, vector)
        for slope, vector in zip(pulled, vectors, strict=True)
        if slope is not None and slope.requires_grad
    ]
    count = len(vectors[0])
    found: list[Tensor | None] = [None] * len(arbitrary)
    if pairs:
        found = pull_columns([slope for slope, _ in pairs], arbitrary, [vector for _, vector in pairs])
    return [
        place.new_zeros(count, *place.shape) if each is None else each
        for place, each in zip(arbitrary, found, strict=True)
    ]


def _zeros_at(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return torch.zeros_like(output, requires_grad=False)
    made = made_by(output.node)[output.output_nr]
    return torch.zeros(tuple(made.shape), dtype=made.dtype, device=made.device)


# All parameters


def vjp(outputs: Tensor, parameters: Sequence[Tensor], vectors: Tensor) -> list[Tensor]:
    """Vector-Jacobian products ``J^T u`` with the Jacobian of ``outputs`` in some parameters.

    Args:
        outputs: A tensor with a graph, which is kept.
        parameters: Leaves or other tensors of the graph.
        vectors: ``[*y]`` or ``[v, *y]``.

    Returns:
        For each parameter ``[*p]`` or ``[v, *p]``; zeros where it is not reached.
    """
    bare = vectors.shape == outputs.shape
    _require_vectors("vjp", [outputs], [vectors], bare)
    found = pull_columns([outputs], parameters, [vectors[None] if bare else vectors])
    return _finished(found, parameters, 1 if bare else len(vectors), bare)


def jvp(outputs: Tensor, parameters: Sequence[Tensor], vectors: Vectors) -> Tensor:
    """Jacobian-vector products ``J v``, by reverse over reverse.

    Args:
        outputs: A tensor with a graph, which is kept and must be twice differentiable.
        parameters: Leaves or other tensors of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        ``[*y]`` or ``[v, *y]``.
    """
    bare = _is_bare("jvp", parameters, vectors)
    with _explained("the outputs given to jvp"):
        (found,) = _pushed([outputs], parameters, _many(vectors, bare))
    return found[0] if bare else found


def hvp(loss: Tensor | Callable[[], Tensor], parameters: Sequence[Tensor], vectors: Vectors) -> list[Tensor]:
    """Hessian-vector products of a scalar in some parameters (Pearlmutter 1994).

    Args:
        loss: A scalar with a graph, which is kept; or a function of no arguments that computes it, which is
            called once, with the kernels of scaled dot product attention that can be differentiated twice.
        parameters: Leaves of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        For each parameter, of the shape of its vectors.

    Raises:
        BadInput: If vectors do not fit, or the loss is no scalar.
        PackpropError: If something in the graph is not twice differentiable.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hvp(lambda: (w**3).sum(), [w], [torch.tensor([1.0, 0.0])])
        [tensor([6., 0.])]
    """
    bare = _is_bare("hvp", parameters, vectors)
    value = _evaluated(loss)
    if value.numel() != 1:
        raise BadInput(
            "hvp(...) was called.", f"loss of shape {list(value.shape)}", "it is no scalar", "reduce it"
        )
    with _explained("the loss given to hvp"):
        with torch.enable_grad():
            slopes: Any = torch.autograd.grad(value, list(parameters), create_graph=True, allow_unused=True)
        pairs = [
            (slope, vector)
            for slope, vector in zip(slopes, _many(vectors, bare), strict=True)
            if slope is not None and slope.requires_grad
        ]
        found: list[Tensor | None] = [None] * len(parameters)
        if pairs:
            found = pull_columns([slope for slope, _ in pairs], parameters, [vector for _, vector in pairs])
    return _finished(found, parameters, 1 if bare else len(vectors[0]), bare)


def ggnvp(
    graph: tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    vectors: Vectors,
) -> list[Tensor]:
    """GGN-vector products ``J^T H J v`` (Schraudolph 2002).

    Args:
        graph: The model's output and the loss computed from it, whose graph is kept; or a function of no
            arguments that computes both, called as that of ``hvp``.
        parameters: Leaves of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        For each parameter, of the shape of its vectors.

    Raises:
        BadInput: If vectors do not fit.
        PackpropError: If something in the graph is not twice differentiable.
    """
    bare = _is_bare("ggnvp", parameters, vectors)
    outputs, loss = _evaluated(graph)
    with _explained("the graph given to ggnvp"):
        pushed = _pushed([outputs], parameters, _many(vectors, bare))
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss, outputs, create_graph=True)
        curved = [torch.zeros_like(pushed[0])]
        if slope.requires_grad:
            (product,) = pull_columns([slope], [outputs], pushed)
            curved = curved if product is None else [product]
        found = pull_columns([outputs], parameters, curved)
    return _finished(found, parameters, 1 if bare else len(vectors[0]), bare)


def _evaluated(value: Any) -> Any:
    if not callable(value) or isinstance(value, Tensor):
        return value
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        return value()


def _is_bare(asked: str, parameters: Sequence[Tensor], vectors: Vectors) -> bool:
    bare = len(parameters) == len(vectors) and all(
        vector.shape == parameter.shape for vector, parameter in zip(vectors, parameters, strict=True)
    )
    _require_vectors(asked, parameters, vectors, bare)
    return bare


def _require_vectors(asked: str, like: Sequence[Tensor], vectors: Vectors, bare: bool) -> None:
    fits = len(like) == len(vectors) > 0
    if fits and not bare:
        sizes = {vector.shape[:1] for vector in vectors}
        pairs = zip(vectors, like, strict=True)
        fits = len(sizes) == 1 and all(vector.shape[1:] == own.shape and vector.dim() for vector, own in pairs)
    if not fits:
        raise BadInput(
            f"{asked}(...) was called.",
            f"vectors of shapes {', '.join(str(list(vector.shape)) for vector in vectors)}",
            f"they belong to tensors of shapes {', '.join(str(list(own.shape)) for own in like)}",
            "give one for each, of its shape, or all with one more leading axis",
        )


def _many(vectors: Vectors, bare: bool) -> list[Tensor]:
    return [vector.detach()[None] if bare else vector.detach() for vector in vectors]


def _finished(
    found: Sequence[Tensor | None], parameters: Sequence[Tensor], count: int, bare: bool
) -> list[Tensor]:
    filled = [
        torch.zeros_like(parameter, requires_grad=False).expand(count, *parameter.shape).clone()
        if each is None
        else each
        for each, parameter in zip(found, parameters, strict=True)
    ]
    return [each[0] if bare else each for each in filled]
