"""Products with curvature matrices and Jacobians: for the block of one parameter, and for all of them.

# NOTE [Products by double backward]
All products are reverse over reverse. Forward over reverse is cheaper, and silently wrong through LayerNorm,
InstanceNorm and BatchNorm in training mode in torch 2.13. ``J v`` is the derivative, along v, of ``J^T u`` in a
vector u that is otherwise arbitrary (Townsend 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

from packprop.errors import BadInput, PackpropError
from packprop.graph import Graph, made_by
from packprop.hessian import residuals
from packprop.memory import found_fault, is_dry, version
from packprop.second_order import require_second_derivatives, slopes_at, twice
from packprop.seeds import columns, loss_hessian_products
from packprop.sweep import pull_columns
from packprop.types import EXACT, precision
from packprop.ways import Ways, choose_ways

Matrix = Literal["hessian", "ggn", "positive"]
Modify = Literal["clip", "abs"]
Vectors = Sequence[Tensor]
ASKED = "A product with a curvature matrix or a Jacobian was asked for."
INSTEAD = "use functions that are twice differentiable"


# One parameter's block


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
        return (product[0] if bare else product).to(precision(vectors, product))


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
        return cls(tensor, 0 if is_dry() else tensor.data_ptr(), version(tensor), _sample(tensor).clone())

    @property
    def is_past(self) -> bool:
        """Whether the tensor is another by now; waits for the device."""
        now = State.of(self.tensor)
        if (now.storage, now.version) != (self.storage, self.version):
            return True
        equal = (now.sample == self.sample) | (now.sample.isnan() & self.sample.isnan())
        return found_fault(~equal.all())


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
        graph: With its samples settled; kept alive by the products.
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
        way = choose_ways(graph, known_losses=True, per_sample=True)
        _require_swept(graph, way)
        for (curve, _), weight in zip(way.curves, residuals(graph, way), strict=True):
            targets.append(curve.input)
            shares.append(_Scaling(weight.clamp(min=0) if modify == "clip" else weight.abs()))
    for leaf in leaves:
        yield leaf, BlockProduct(leaf, _RootBlock(graph, leaf, targets, shares), states, graph.name(leaf))


def _require_swept(graph: Graph, way: Ways) -> None:
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
        with twice(f"parameter {self.graph.name(self.leaf)!r}", ASKED, INSTEAD):
            if not self._slope:
                own = f"parameter {self.graph.name(self.leaf)!r}"
                require_second_derivatives(self.graph.roots, [self.leaf], lambda leaf: own, ASKED)
                with torch.enable_grad():
                    self._slope += slopes_at(self.graph, [self.leaf], create_graph=True)
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
        with twice(own, ASKED, INSTEAD):
            pushed_on = pushed(self.targets, [self.leaf], [vectors])
            curved = [share(each) for share, each in zip(self.shares, pushed_on, strict=True)]
            (found,) = pulled(self.targets, [self.leaf], curved)
        return torch.zeros_like(vectors) if found is None else found


# What all products are made of: at tensors or edges of a graph, for many vectors at once


class How(TypedDict, total=False):
    """Options of ``pull_columns``."""

    batched: bool
    create_graph: bool
    retain_graph: bool


class Push(Protocol):
    """``J v`` for vectors at some inputs."""

    def __call__(self, vectors: Vectors, **how: Unpack[How]) -> list[Tensor]:
        """From ``[v, *x]`` at each input to ``[v, *y]`` for each output."""


def slopes(value: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of a scalar, as functions of the inputs; ``None`` for those that it does not depend on."""
    if not value.requires_grad:
        return [None] * len(inputs)
    with torch.enable_grad():
        found: Any = torch.autograd.grad(value, list(inputs), create_graph=True, allow_unused=True)
    return list(found)


def pulled(
    outputs: Sequence[Any], inputs: Sequence[Any], vectors: Vectors, **how: Unpack[How]
) -> list[Tensor | None]:
    """``J^T u``, for u ``[v, *y]`` at each output: ``[v, *x]`` for each input, ``None`` where nothing arrives.

    Outputs that are ``None`` or constant are passed over.
    """
    pairs = [
        (output, vector)
        for output, vector in zip(outputs, vectors, strict=True)
        if output is not None and (not isinstance(output, Tensor) or output.requires_grad)
    ]
    if not pairs:
        return [None] * len(inputs)
    return pull_columns([output for output, _ in pairs], inputs, [vector for _, vector in pairs], **how)


def pushed(
    outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Vectors, **how: Unpack[How]
) -> list[Tensor]:
    """``J v``, for v ``[v, *x]`` at each input: ``[v, *y]`` for each output.

    See NOTE [Products by double backward].
    """
    return pushing(outputs, inputs, how.get("retain_graph", True))(vectors, **how)


def pushing(outputs: Sequence[Any], inputs: Sequence[Tensor], retain_graph: bool = True) -> Push:
    """``pushed`` with a graph that is made once."""
    with torch.enable_grad():
        arbitrary = [_zeros_at(output).requires_grad_() for output in outputs]
        linear = pulled(outputs, inputs, arbitrary, batched=False, create_graph=True, retain_graph=retain_graph)

    def push(vectors: Vectors, **how: Unpack[How]) -> list[Tensor]:
        found = pulled(linear, arbitrary, vectors, **how)
        return filled(found, arbitrary, len(vectors[0]) if how.get("batched", True) else None)

    return push


def filled(found: Sequence[Tensor | None], like: Sequence[Tensor], count: int | None) -> list[Tensor]:
    """Products, with zeros in place of ``None``: ``[v, *x]`` for ``count`` vectors, or ``[*x]``."""
    front = () if count is None else (count,)
    return [
        tensor.new_zeros(*front, *tensor.shape) if each is None else each
        for each, tensor in zip(found, like, strict=True)
    ]


def _zeros_at(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return torch.zeros_like(output, requires_grad=False)
    made = made_by(output.node)[output.output_nr]
    return torch.zeros(tuple(made.shape), dtype=made.dtype, device=made.device)


def require_vectors(call: str, like: Sequence[Tensor], vectors: Vectors, many: bool = False) -> None:
    """Refuse vectors that do not belong to some tensors.

    Args:
        call: How the function was called, for the message.
        like: The tensors.
        vectors: One for each, of its shape; or, if ``many``, all with one more leading axis.
        many: Whether there is that axis.

    Raises:
        BadInput: If numbers or shapes differ.
    """
    fits = len(like) == len(vectors)
    if fits and many:
        fits = len({vector.shape[:1] for vector in vectors}) == 1 and all(vector.dim() for vector in vectors)
    if fits:
        pairs = zip(vectors, like, strict=True)
        fits = all((vector.shape[1:] if many else vector.shape) == own.shape for vector, own in pairs)
    if not fits:
        given, wanted = ([tuple(tensor.shape) for tensor in each] for each in (vectors, like))
        raise BadInput(
            f"{call} was called.",
            f"vectors of shapes {given}",
            f"they do not match {wanted}",
            "give one for each, of its shape" + (", or all with one more leading axis" if many else ""),
        )


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
    bare = _is_bare("vjp(outputs, parameters, vectors)", [outputs], [vectors])
    found = pulled([outputs], parameters, _many([vectors], bare))
    return _finished(found, parameters, [vectors], bare)


def jvp(outputs: Tensor, parameters: Sequence[Tensor], vectors: Vectors) -> Tensor:
    """Jacobian-vector products ``J v``, by reverse over reverse.

    Args:
        outputs: A tensor with a graph, which is kept and must be twice differentiable.
        parameters: Leaves or other tensors of the graph.
        vectors: For each parameter ``[*p]`` or ``[v, *p]``.

    Returns:
        ``[*y]`` or ``[v, *y]``.
    """
    bare = _is_bare("jvp(outputs, parameters, vectors)", parameters, vectors)
    require_second_derivatives([outputs], parameters, shown, ASKED, linear=True)
    with twice("the outputs given to jvp", ASKED, INSTEAD):
        (found,) = pushed([outputs], parameters, _many(vectors, bare))
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
    bare = _is_bare("hvp(loss, parameters, vectors)", parameters, vectors)
    product, _ = hessian_product("hvp", loss, parameters)
    return _finished(product(_many(vectors, bare)), parameters, vectors, bare)


Product = Callable[[Vectors], list[Tensor]]
"""From vectors ``[v, *p]`` for each parameter to their products."""


def hessian_product(
    asked: str, loss: Tensor | Callable[[], Tensor], parameters: Sequence[Tensor]
) -> tuple[Product, Tensor]:
    """``hvp`` with a gradient that is taken once and kept, and the loss.

    Raises:
        BadInput: If the loss is no scalar.
        PackpropError: If something in the graph is not twice differentiable; the product raises it, too.
    """
    value = _evaluated(loss)
    if value.numel() != 1:
        raise BadInput(
            f"{asked}(...) was called.", f"loss of shape {list(value.shape)}", "it is no scalar", "reduce it"
        )
    require_second_derivatives([value], parameters, shown, ASKED)
    where = f"the loss given to {asked}"
    with twice(where, ASKED, INSTEAD):
        slope = slopes(value, parameters)

    def product(vectors: Vectors) -> list[Tensor]:
        with twice(where, ASKED, INSTEAD):
            return filled(pulled(slope, parameters, vectors), parameters, len(vectors[0]))

    return product, value


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
    bare = _is_bare("ggnvp(graph, parameters, vectors)", parameters, vectors)
    product, _ = ggn_product("ggnvp", graph, parameters)
    return _finished(product(_many(vectors, bare)), parameters, vectors, bare)


def ggn_product(
    asked: str,
    graph: tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
) -> tuple[Product, Tensor]:
    """``ggnvp`` with graphs that are made once and kept, and the loss.

    Raises:
        PackpropError: If something in the graph is not twice differentiable; the product raises it, too.
    """
    outputs, loss = _evaluated(graph)
    require_second_derivatives([loss], parameters, shown, ASKED, linear=True)
    where = f"the graph given to {asked}"
    with twice(where, ASKED, INSTEAD):
        push, slope = pushing([outputs], parameters), slopes(loss, [outputs])

    def product(vectors: Vectors) -> list[Tensor]:
        with twice(where, ASKED, INSTEAD):
            forward = push(vectors)
            curved = filled(pulled(slope, [outputs], forward), [outputs], len(forward[0]))
            return filled(pulled([outputs], parameters, curved), parameters, len(vectors[0]))

    return product, loss


def _evaluated(value: Any) -> Any:
    if not callable(value) or isinstance(value, Tensor):
        return value
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        return value()


def shown(tensor: Tensor) -> str:
    """What a tensor without a name is called in messages."""
    return f"the tensor of shape {list(tensor.shape)}"


def _is_bare(call: str, like: Sequence[Tensor], vectors: Vectors) -> bool:
    bare = [vector.shape for vector in vectors] == [tensor.shape for tensor in like]
    if not bare:
        require_vectors(call, like, vectors, many=True)
    return bare


def _many(vectors: Vectors, bare: bool) -> list[Tensor]:
    return [vector.detach()[None] if bare else vector.detach() for vector in vectors]


def _finished(
    found: Sequence[Tensor | None], parameters: Sequence[Tensor], vectors: Vectors, bare: bool
) -> list[Tensor]:
    products = filled(found, parameters, 1 if bare else len(vectors[0]))
    return [product[0] if bare else product for product in products]
