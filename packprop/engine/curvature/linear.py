"""Jacobian-vector and vector-Jacobian products, the parts of products with curvature matrices.

# NOTE [Products by double backward]
All products are reverse over reverse. Forward over reverse is cheaper, but silently wrong through LayerNorm,
InstanceNorm and BatchNorm in training mode in torch 2.13. ``J v`` is the derivative of ``J^T u`` with respect
to u, along v, for any vector u (Townsend 2017). packprop takes random numbers for u: a formula that is linear
in u need not have a derivative at zero, such as that of ``logcumsumexp``, which takes logarithms of u. packprop
checks the result by ``<u, J v> = <J^T u, v>``, since it has both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.functions.nodes import made_by
from packprop.engine.graph.pull import pull_columns
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.errors import BadInput, PackpropError

Vectors = Sequence[Tensor]


ASKED = "A product with a curvature matrix or a Jacobian was asked for."


INSTEAD = (
    "use functions that are twice differentiable, or ask for diagonals or Kronecker factors of the GGN, "
    "which take no second derivative"
)


Product = Callable[[Vectors], list[Tensor]]
"""Maps vectors ``[v, *p]`` for each parameter to products."""


LinearMap = Callable[..., list[Tensor]]
"""Maps ``[v, *x]`` at each input to ``J v``, ``[v, *y]`` for each output; takes options of ``pull_columns``."""


def vjps(
    outputs: Sequence[Any], inputs: Sequence[Any], vectors: Vectors, **options: bool
) -> list[Tensor | None]:
    """Return ``J^T u`` for u ``[v, *y]`` at each output: ``[v, *x]`` for each input, ``None`` if not reached.

    Outputs that are ``None`` or constant are skipped.
    """
    pairs = [
        (output, vector)
        for output, vector in zip(outputs, vectors, strict=True)
        if output is not None and (not isinstance(output, Tensor) or output.requires_grad)
    ]
    if not pairs:
        return [None] * len(inputs)
    return pull_columns([output for output, _ in pairs], inputs, [vector for _, vector in pairs], **options)


def jvps(outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Vectors, **options: bool) -> list[Tensor]:
    """Return ``J v`` for v ``[v, *x]`` at each input: ``[v, *y]`` for each output.

    See NOTE [Products by double backward].
    """
    return linearize(outputs, inputs, options.get("retain_graph", True))(vectors, **options)


def linearize(outputs: Sequence[Any], inputs: Sequence[Tensor], retain_graph: bool = True) -> LinearMap:
    """Return the map from v to ``J v``, for many calls: it makes its graph once; the first call checks it."""
    looked_at: list[bool] = []
    with torch.enable_grad():
        arbitrary = [tensor.requires_grad_() for tensor in noise_like(outputs)]
        linear = vjps(outputs, inputs, arbitrary, batched=False, create_graph=True, retain_graph=retain_graph)

    def apply(vectors: Vectors, **options: bool) -> list[Tensor]:
        products = vjps(linear, arbitrary, vectors, **options)
        found = with_zeros(products, arbitrary, len(vectors[0]) if options.get("batched", True) else None)
        if not looked_at and not is_dry_run():  # once is enough, because it waits for the device
            looked_at.append(True)
            _require_adjoint(zip(arbitrary, found, strict=True), zip(linear, vectors, strict=True))
        return found

    return apply


def _require_adjoint(
    at_outputs: Iterable[tuple[Tensor | None, Tensor]], at_inputs: Iterable[tuple[Tensor | None, Tensor]]
) -> None:
    """Raise if ``<u, J v>`` is not ``<J^T u, v>`` for a map.

    The tolerance is relative to the sums of absolute products, and to ``|u| |v|``: where the map is zero, such
    as that from a bias through batch normalisation, both sides are nothing but rounding.

    Raises:
        PackpropError: If they differ by more than rounding.
    """
    sides, size, precision, norms = [], 0.0, 0.0, []
    for place, pairs in enumerate((at_outputs, at_inputs)):
        known = [(own.detach().conj(), other.detach()) for own, other in pairs if own is not None]
        norms.append(sum(float(pair[place].abs().square().sum()) for pair in known) ** 0.5)
        products = [(own * other).to(accumulation_dtype(other.dtype)) for own, other in known]
        sides.append(sum(float(product.sum().real) for product in products))
        size = max([size, *(float(product.abs().sum()) for product in products)])
        precision = max([precision, *(torch.finfo(other.dtype).eps for _, other in known)])
    if abs(sides[0] - sides[1]) > max(precision**0.5 * size, precision**0.75 * norms[0] * norms[1]):
        raise PackpropError(
            ASKED,
            "the part of the graph that the Jacobian is taken of",
            "the second derivative of a function there is wrong: a product with the Jacobian and one with its "
            "transpose contradict each other",
            "write that function in other operations (torch.logsumexp, exp, log), or ask for diagonals or "
            "Kronecker factors, which take no second derivative",
        )


def with_zeros(products: Sequence[Tensor | None], like: Sequence[Tensor], count: int | None) -> list[Tensor]:
    """Replace ``None`` among products by zeros: ``[v, *x]`` for ``count`` vectors, or ``[*x]``."""
    front = () if count is None else (count,)
    return [
        tensor.new_zeros((*front, *tensor.shape)) if product is None else product
        for product, tensor in zip(products, like, strict=True)
    ]


def noise_like(outputs: Sequence[Any]) -> list[Tensor]:
    """Return random numbers of the shape of each tensor, or of an edge's tensor: the same in each call."""
    generator = torch.Generator().manual_seed(0)
    like = [each if isinstance(each, Tensor) else made_by(each.node)[each.output_nr] for each in outputs]
    wide = [accumulation_dtype(each.dtype) for each in like]
    return [
        torch.randn(tuple(each.shape), dtype=dtype, generator=generator, device="cpu").to(
            each.device, each.dtype
        )
        for each, dtype in zip(like, wide, strict=True)
    ]


def require_vectors(call: str, like: Sequence[Tensor], vectors: Vectors, many: bool = False) -> None:
    """Raise if vectors do not fit some tensors.

    Args:
        call: The call of the function, for the message.
        like: The tensors.
        vectors: One for each tensor, of its shape; or, if ``many``, all with one more leading axis.
        many: Whether the vectors have that axis.

    Raises:
        BadInput: If numbers or shapes differ.
    """
    given, wanted = ([tuple(tensor.shape) for tensor in each] for each in (vectors, like))
    fits = given == wanted
    if many:
        leading = {shape[:1] for shape in given}
        fits = len(leading) == 1 and () not in leading and [shape[1:] for shape in given] == wanted
    if not fits:
        raise BadInput(
            f"{call} was called.",
            f"vectors of shapes {given}",
            f"they do not match {wanted}",
            "give one vector for each tensor, of its shape"
            + (", or all with one more leading axis" if many else ""),
        )
