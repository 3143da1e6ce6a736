"""Products of gradients with the inverse of a damped curvature matrix, one parameter at a time.

# NOTE [Which inverse]
The matrix is block-diagonal, with one block F for each parameter, and gradients g become ``(F + damping I)^-1
g``, exactly. What EKFAC saves makes one block of a weight and its bias (NOTE [Weight and bias],
``engine/algebra/coupled.py``). A diagonal divides each entry. For EKFAC, and for two factors ``B kron A``,
packprop inverts in the eigenbasis, whose vectors are Kronecker products. This is the inverse of ``B kron A +
damping I`` itself, which is no Kronecker product. With ``factored``, two factors share the damping instead,
``(B + sqrt(d) / pi)^-1 kron (A + pi sqrt(d))^-1`` (Martens and Grosse 2015, 6.3): optimizers take this other
matrix because it is quick.

Eigenvalues that are negative by rounding count as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from packprop.applications.queries.blocks import Curvature, blocks_of
from packprop.engine.algebra import Coupled, Eigen, EntryOrder, coupled, kronecker
from packprop.engine.tensors import accumulation_dtype, map_tensors, outside_autocast
from packprop.errors import BadInput, naming

Inverse = Tensor | Eigen | list[Tensor] | Coupled
"""The inverse of a block: a diagonal ``[*p]``, eigenvectors, two factors, or one block of weight and bias."""


@dataclass(frozen=True)
class Preconditioner:
    """Multiplies gradients by inverse blocks; see NOTE [Which inverse].

    Args:
        name: The name of the curvature, for tables.
        damping: The damping of the blocks.
        inverses: The inverse block of each parameter; the one that a weight shares with its bias is under the
            weight.
        as_factors: Parameters whose blocks are two factors, which do not tell the order of entries.
        biases: The bias of each weight that shares its block with a bias.
    """

    name: str
    damping: float
    inverses: Mapping[str, Inverse]
    as_factors: frozenset[str]
    biases: Mapping[str, str]

    @outside_autocast
    def __call__(
        self, asked: str, rows: Mapping[str, Tensor], orders: Mapping[str, EntryOrder | None]
    ) -> dict[str, Tensor]:
        """Multiply rows ``[q, *p]`` of parameters that share a block by its inverse.

        Args:
            asked: The call of the user, for messages.
            rows: Gradients of the parameters in one list that ``together`` returns.
            orders: The order of each parameter's entries in the matrix ``[o, i]`` of two factors, if known.

        Raises:
            BadInput: For a parameter without a block; if two factors do not fit the parameter.
        """
        name = next(iter(rows))
        if name not in self.inverses:
            raise _without_block(asked, [name], self.name, self.inverses)
        inverse = map_tensors(lambda tensor: tensor.to(rows[name].device), self.inverses[name])
        if isinstance(inverse, Coupled):
            return dict(zip(rows, inverse.solve(*rows.values()), strict=True))
        return {name: self._product(asked, name, inverse, rows[name], orders.get(name))}

    def knows(self, name: str, orders: Mapping[str, EntryOrder | None]) -> bool:
        """Tell whether it has a block of a parameter, and the order of its entries if that takes one."""
        return name in self.inverses and (name not in self.as_factors or name in orders)

    def _product(self, asked: str, name: str, inverse: Any, rows: Tensor, order: EntryOrder | None) -> Tensor:
        """Multiply rows ``[q, *p]`` of a parameter by its own inverse block."""
        if isinstance(inverse, Tensor):
            return rows * inverse
        if name not in self.as_factors:
            return kronecker.multiply(inverse, rows)
        left, right = inverse.vectors if isinstance(inverse, Eigen) else inverse
        shape = rows.shape[1:]
        if order is None:
            sizes = shape[0], shape.numel() // max(1, shape[0])
        else:
            sizes = order.shape[0] * order.shape[1], order.shape[2]
        if sizes != (len(left), len(right)):
            what = f"its factors have {len(left)} and {len(right)} rows, where {sizes[0]} and {sizes[1]} belong"
            raise _unfit(asked, name, shape, what)
        matrices = rows.reshape(len(rows), *sizes) if order is None else order.to_matrices(rows)
        product = kronecker.multiply(inverse, matrices)
        return product.reshape(rows.shape) if order is None else order.to_parameter(product)


def together(preconditioner: Preconditioner | None, names: Iterable[str]) -> list[list[str]]:
    """Return lists of names that share a block, each weight before its bias."""
    biases = {} if preconditioner is None else preconditioner.biases
    joined = {*biases.values()}
    return [[name, biases[name]] if name in biases else [name] for name in names if name not in joined]


@outside_autocast
def preconditioner_of(
    asked: str, curvature: Curvature, damping: float | None, factored: bool, shapes: Mapping[str, torch.Size]
) -> Preconditioner:
    """Return the inverses of damped blocks, which packprop checks before it computes any gradient.

    Args:
        asked: The call of the user, for messages.
        curvature: A block for each parameter: a diagonal ``[*p]``, one or two factors, or an ``Eigen``; or a
            result that holds them.
        damping: The damping of the blocks.
        factored: Lets two factors share the damping.
        shapes: Shapes of the parameters that may have gradients. Those that no loss depends on need no block.

    Raises:
        BadInput: For no curvature, missing or negative damping, blocks of other parameters alone, or a block
            that does not fit, is not finite, or is not positive.
    """
    name, blocks = blocks_of(asked, curvature)
    added = require_damping(asked, damping, name)
    missing, shapes = [*shapes], {each: shape for each, shape in shapes.items() if each in blocks}
    if not shapes:
        raise _without_block(asked, missing, name, blocks)
    of_two = [
        parameter
        for parameter in shapes
        if isinstance(blocks[parameter], (list, tuple)) and len(blocks[parameter]) == 2
    ]
    if factored and not of_two:
        why = f"no block of {name} has two factors that could share the damping: its inverse is exact"
        raise BadInput(asked, "factored=True", why, "leave it out, or give what KFAC or KFLR computed")
    inverses: dict[str, Inverse] = {}
    decomposed: dict[str, Any] = {}
    for parameter, shape in shapes.items():
        with naming(parameter):
            block = blocks[parameter]
            found = _positive(asked, name, parameter, block, shape, added)
            if isinstance(found, Tensor):
                inverses[parameter] = 1 / (found + added)
            elif factored and added and parameter in of_two:
                inverses[parameter] = kronecker.inverse(list(block), added)
            else:
                inverses[parameter] = found._replace(values=1 / (found.values + added))
            if isinstance(block, Eigen):
                decomposed[parameter] = found
    biases: dict[str, str] = {}
    for parameter, eigen in decomposed.items():
        before, weight, after = parameter.rpartition("weight")
        bias = f"{before}bias{after}"
        both = coupled(eigen, decomposed[bias], added) if weight and bias in decomposed else None
        if both is not None:
            where = f"{name} of parameters {parameter!r} and {bias!r}"
            values = torch.cat([both.bias.values, both.complement - added])
            _require_positive(asked, where, values, added, torch.finfo(values.dtype).eps * float(values.max()))
            inverses[parameter], biases[parameter] = both, bias
    return Preconditioner(name, added, inverses, frozenset(of_two), biases)


def _without_block(asked: str, missing: Sequence[str], name: str, blocks: Mapping[str, Any]) -> BadInput:
    return BadInput(
        asked,
        f"parameter {missing[0]!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
        f"it has no block in {name}, which has one for {', '.join(map(repr, [*blocks][:5])) or 'nothing'}",
        "compute the curvature of the same model, with otherwise='diagonal' where factors are too large",
    )


def require_damping(asked: str, damping: float | None, name: str) -> float:
    """Return damping, if it is a number of at least 0.

    Raises:
        BadInput: With the value.
    """
    if not isinstance(damping, Real) or isinstance(damping, bool) or not 0 <= damping < float("inf"):
        raise BadInput(
            asked,
            f"damping={damping!r}",
            f"it is no number of at least 0 that packprop could add to {name} before inverting it",
            "give one in units of the curvature: 1e-3 of its largest eigenvalues, or the factor of an L2 "
            "penalty; 0 for none",
        )
    return float(damping)


def _positive(
    asked: str, name: str, parameter: str, block: Any, shape: torch.Size, damping: float
) -> Tensor | Eigen:
    """Return the diagonal or the eigendecomposition of a block, and refuse one not positive with its damping.

    Eigenvalues that are negative by rounding become zero.
    """
    where = f"{name} of parameter {parameter!r}"
    if isinstance(block, Tensor):
        if block.shape != shape:
            raise _unfit(asked, parameter, shape, f"its diagonal in {name} has {list(block.shape)}")
        diagonal = block.to(accumulation_dtype(block.dtype))
        _require_finite(asked, where, diagonal)
        _require_positive(asked, where, diagonal, damping, 0.0)
        return diagonal
    if not (isinstance(block, Eigen) or (isinstance(block, (list, tuple)) and len(block) in (1, 2))):
        raise BadInput(
            asked,
            where,
            f"it is of type {type(block).__name__}: neither a diagonal, nor one or two factors, nor an Eigen",
            "give what DiagGGNExact, DiagGGNMC, KFAC, KFLR or EKFAC computed",
        )
    for tensor in (block.values, *block.vectors) if isinstance(block, Eigen) else block:
        _require_finite(asked, where, tensor)
    decomposed = kronecker.eigen(block)
    if decomposed.values.numel() != shape.numel():
        raise _unfit(asked, parameter, shape, f"its block has {decomposed.values.numel()} rows")
    values = decomposed.values
    most = values.abs().max() if values.numel() else values.sum()
    digit = torch.finfo(values.dtype).eps * float(most)
    rounding = 10 * max(map(len, decomposed.vectors)) * digit
    values = torch.where((values < 0) & (values >= -rounding), 0.0, values)
    _require_positive(asked, where, values, damping, digit if damping else rounding)
    return decomposed._replace(values=values)


def _require_positive(asked: str, where: str, values: Tensor, damping: float, rounding: float) -> None:
    """Refuse a block whose smallest eigenvalue, with the damping, does not exceed ``rounding``.

    The inverse of a rounding error would be the largest part of a product.
    """
    least = float(values.min()) if values.numel() else 1.0
    if least + damping > rounding:
        return
    most = float(values.max())
    enough = max(1e-3 * most, -2 * least, 1e-8)
    raise BadInput(
        asked,
        where,
        f"it is not positive beyond rounding: beside {most:.3g}, the smallest of its eigenvalues is "
        f"{least:.3g}, and damping={damping:g} is added",
        f"give more damping, such as {enough:.1g}",
    )


def _require_finite(asked: str, where: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise BadInput(
            asked,
            where,
            "some of its entries are not finite",
            "compute the curvature again, and look for losses that are not finite",
        )


def _unfit(asked: str, parameter: str, shape: torch.Size, what: str) -> BadInput:
    return BadInput(
        asked,
        f"parameter {parameter!r} of shape {list(shape)}",
        f"its block does not belong to it: {what}",
        "give the curvature of the same model, as packprop.compute returned it or Result.load reads it",
    )
