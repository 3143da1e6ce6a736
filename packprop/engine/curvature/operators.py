"""Curvature matrices as linear operators: ``@`` on tensors, and ``to_scipy()`` for SciPy's solvers.

The entries of all parameters form one vector, in the order of ``torch.nn.utils.parameters_to_vector``. All
operators are symmetric.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra import kronecker
from packprop.engine.algebra.kronecker import Block, Eigen
from packprop.engine.curvature.linear import Product, Vectors
from packprop.engine.curvature.products import ggn_product, hessian_product
from packprop.engine.curvature.snapshots import Snapshot, frozen_parameters, snapshots_of, were_changed
from packprop.engine.graph.search import leaves_above, nodes_above
from packprop.engine.tensors.precision import accumulation_dtype, result_dtype
from packprop.errors import BadInput, PackpropError, install


@dataclass(frozen=True, eq=False)
class Operator:
    """A symmetric matrix, given by its products with vectors, plus ``damping`` times the identity.

    Args:
        parameters: The parameters whose entries are its rows and columns, in this order.
        product: Maps vectors ``[v, *p]`` for each parameter to products.
        damping: The number to add to the diagonal, in units of the curvature.
        snapshots: Snapshots of the tensors that the product depends on, from the time it was made.

    Raises:
        BadInput: If the damping is not finite.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hessian(lambda: (w**3).sum(), [w]) @ torch.tensor([1.0, 1.0])
        tensor([ 6., 12.])
    """

    parameters: tuple[Tensor, ...]
    product: Product
    damping: float = 0.0
    snapshots: Sequence[Snapshot] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.damping):
            raise BadInput(
                "An operator of a curvature matrix was asked for.",
                f"damping={self.damping!r}",
                "every product with a vector would also be infinite or NaN",
                "give a finite number, in units of the curvature; 0 for none",
            )

    def __repr__(self) -> str:
        rows, columns = self.shape
        damping = f", damping={self.damping}" if self.damping else ""
        return f"Operator({rows} x {columns}, {self.dtype}, of {len(self.parameters)} parameters{damping})"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns: the number of entries of all parameters."""
        size = sum(parameter.numel() for parameter in self.parameters)
        return size, size

    @property
    def dtype(self) -> torch.dtype:
        """The precision of products: the highest among the parameters, and at least that of float32."""
        highest = functools.reduce(torch.promote_types, (parameter.dtype for parameter in self.parameters))
        return accumulation_dtype(highest)

    @property
    def readings(self) -> int:
        """The number of complete readings of the data, for an operator of a data set; 0 for other operators."""
        return int(getattr(self.product, "readings", 0))

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.parameters[0].device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Multiply with one vector ``[p]``, or the columns of a matrix ``[p, v]``; keep the shape.

        Raises:
            BadInput: If the vectors have another length.
            PackpropError: If a parameter of the graph was changed in place since the operator was made.
        """
        if vectors.dim() not in (1, 2) or len(vectors) != self.shape[1]:
            raise BadInput(
                "A product with a curvature operator was asked for.",
                f"vectors of shape {list(vectors.shape)}",
                f"the operator has {self.shape[1]} columns",
                "give [p] or [p, v], with the entries of all parameters side by side",
            )
        if were_changed(self.snapshots):
            raise PackpropError(
                "A product with a curvature operator was asked for.",
                "parameters that it depends on",
                "they were changed in place since the operator was made: its products are those of old values",
                "make the operator again",
            )
        columns = vectors.detach().reshape(len(vectors), -1).mT.to(self.device)
        if not columns.numel():
            return torch.zeros_like(vectors)
        pieces = columns.split([parameter.numel() for parameter in self.parameters], 1)
        given = [
            piece.reshape(len(columns), *parameter.shape).to(accumulation_dtype(parameter.dtype))
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]
        found = zip(self.product(given), pieces, strict=True)
        flat = [product.detach().reshape(piece.shape).to(self.dtype) for product, piece in found]
        products = torch.cat(flat, 1) + self.damping * columns.to(self.dtype)
        return products.mT.reshape(vectors.shape).to(vectors.device, result_dtype(vectors, products))

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.linalg.LinearOperator`` for arrays ``[p]`` or ``[p, v]`` on the CPU.

        Raises:
            PackpropError: If SciPy is not installed.
        """
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise PackpropError(
                "Operator.to_scipy() was called.",
                "the package scipy",
                "it is not installed",
                f"{install('scipy')}, or use the operator on tensors: operator @ vector",
            ) from error

        def product(array: Any) -> Any:
            return (self @ torch.tensor(array, dtype=self.dtype, device="cpu")).numpy()

        return LinearOperator(
            self.shape,
            matvec=product,
            rmatvec=product,
            matmat=product,
            rmatmat=product,
            dtype=torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype,
        )


def hessian(
    loss: Tensor | Callable[[], Tensor], parameters: Sequence[Tensor], damping: float = 0.0
) -> Operator:
    """Return the Hessian of a scalar in some parameters (Pearlmutter 1994).

    packprop evaluates the loss once, and the operator keeps its graph. All products therefore share the random
    draws of the forward pass, such as those of dropout.

    Args:
        loss: A scalar with a graph; or a function without arguments that computes it. packprop calls it once,
            with kernels of scaled dot product attention that are twice differentiable.
        parameters: Leaves of the graph, each once.
        damping: The number to add to the diagonal.

    Raises:
        BadInput: If a parameter occurs twice, is complex or does not require a gradient, or the loss is not a
            scalar.
        PackpropError: If a function in the graph is not twice differentiable. Products may also raise this.
    """
    chosen = chosen_parameters("operators.hessian(...) was called.", parameters)
    product, value = hessian_product("operators.hessian", loss, chosen)
    return _of_graph(chosen, product, damping, value)


def ggn(
    graph: tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    damping: float = 0.0,
) -> Operator:
    """Return the generalized Gauss-Newton matrix ``J^T H J`` in some parameters (Schraudolph 2002).

    Args:
        graph: The model's output and the loss computed from it; or a function without arguments that computes
            both. packprop calls it like that of ``hessian``.
        parameters: Leaves of the graph, each once.
        damping: The number to add to the diagonal.

    Raises:
        BadInput: If a parameter occurs twice, is complex or does not require a gradient, or ``graph`` gives no
            pair of tensors.
        PackpropError: If a function in the graph is not twice differentiable. Products may also raise this.
    """
    chosen = chosen_parameters("operators.ggn(...) was called.", parameters)
    product, loss = ggn_product("operators.ggn", graph, chosen)
    return _of_graph(chosen, product, damping, loss)


def block_diagonal(parameters: Sequence[Tensor], blocks: Sequence[Block], damping: float = 0.0) -> Operator:
    """Return a matrix with one block for each parameter, and zeros between the blocks.

    For a damped inverse, give inverses of the blocks: ``[kronecker.inverse(p.ekfac, damping) for p in ...]``.

    Args:
        parameters: The parameters, each once.
        blocks: For each parameter the value that an extension saved on it, or the result of a function of
            ``packprop.kronecker``. Lists of factors must belong to a parameter with entries ``[o, i]``.
        damping: The number to add to the diagonal.

    Raises:
        BadInput: If a parameter occurs twice, or a block does not fit its parameter.
    """
    chosen = chosen_parameters("operators.block_diagonal(...) was called.", parameters, leaves=False)
    wrong = [parameter for parameter, block in zip(chosen, blocks, strict=False) if not _fits(parameter, block)]
    if wrong or len(blocks) != len(chosen):
        raise BadInput(
            "operators.block_diagonal(parameters, blocks) was called.",
            f"a parameter of shape {list(wrong[0].shape)}" if wrong else f"{len(blocks)} blocks",
            "its block does not belong to it, or it keeps its entries in another order than [o, i]"
            if wrong
            else f"there are {len(chosen)} parameters",
            "give one block for each parameter, in the same order; blocks of EKFAC fit any order of entries",
        )

    def product(vectors: Vectors) -> list[Tensor]:
        return [kronecker.multiply(block, v) for block, v in zip(blocks, vectors, strict=True)]

    return Operator(chosen, product, damping)


def _of_graph(parameters: tuple[Tensor, ...], product: Product, damping: float, loss: Tensor) -> Operator:
    """Return the operator of a product that autograd computes in the parameters' own precision."""

    def cast(vectors: Vectors) -> list[Tensor]:
        return product([v.to(p.dtype) for v, p in zip(vectors, parameters, strict=True)])

    read = *leaves_above([loss.grad_fn]), *frozen_parameters(nodes_above([loss.grad_fn]))
    return Operator(parameters, cast, damping, snapshots_of(read))


def _fits(parameter: Tensor, block: Block) -> bool:
    if isinstance(block, Eigen):
        size = block.values.numel()
        return size == parameter.numel() and (block.order is None or block.order.parameter == parameter.shape)
    if len(block) == 1:
        return len(block[0]) == parameter.numel()
    return (len(block[0]), len(block[1])) == (len(parameter), parameter.numel() // max(1, len(parameter)))


def chosen_parameters(
    asked: str, parameters: Iterable[Tensor], *, leaves: bool = True, own: Iterable[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Return the parameters whose entries are rows and columns of a matrix.

    Args:
        asked: The request, for the message.
        parameters: The parameters that the user chose.
        leaves: Whether they must require gradients.
        own: All parameters of the model that they must belong to; ``None`` for parameters of any origin.

    Raises:
        BadInput: If there is none, or one occurs twice, is complex, requires no gradient or comes from outside
            the model.
    """
    chosen = tuple(parameters)
    known = None if own is None else {id(parameter) for parameter in own}
    wrong = None
    if not chosen:
        wrong = "no parameters", "the matrix would have no rows"
    elif len({id(parameter) for parameter in chosen}) != len(chosen):
        wrong = "a parameter that occurs twice", "its entries would be counted twice"
    elif known is not None and not all(id(parameter) in known for parameter in chosen):
        wrong = "a parameter that is not in the model", "the matrix has rows for the model's parameters only"
    elif leaves and not all(parameter.requires_grad for parameter in chosen):
        wrong = "a parameter with requires_grad=False", "packprop does not differentiate with respect to it"
    elif any(parameter.is_complex() for parameter in chosen):
        why = "real and imaginary parts have separate curvature, which no complex matrix describes"
        instead = "keep the real numbers as parameters, and make the complex ones by torch.view_as_complex"
        raise BadInput(asked, "a complex parameter", why, instead)
    if wrong is not None:
        instead = "give each trainable parameter once, as [p for p in model.parameters() if p.requires_grad]"
        raise BadInput(asked, *wrong, instead)
    return chosen
