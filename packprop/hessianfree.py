"""Products with curvature matrices of the whole model, and with Jacobians, by autograd alone.

Nothing needs to be extended. Every function differentiates a graph that is already there, and keeps it. The
products are double backward passes (Pearlmutter 1994; Schraudolph 2002), which are right wherever PyTorch
differentiates twice: through LayerNorm, and through BatchNorm in training mode, where a GGN- or
Hessian-vector product is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from packprop.errors import BadInput, PackpropError

Vectors = Tensor | Iterable[Tensor]


def hessian_vector_product(
    f: Tensor,
    params: Vectors,
    v: Vectors,
    grad_params: Vectors | None = None,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """``H v`` with H the Hessian of a scalar in all of ``params`` together.

    Args:
        f: The scalar; its graph must still be there.
        params: Tensors that ``f`` was computed from.
        v: One tensor for each of them, of the same shapes.
        grad_params: The gradient of ``f`` in ``params``, if it was computed before with ``create_graph=True``:
            saves the first of two backward passes.
        detach: Whether the result shall be cut from the graph.

    Returns:
        One tensor for each of ``params``, of their shapes.

    Raises:
        BadInput: If shapes of ``v`` and ``params`` differ.
        PackpropError: If a function on the way cannot be differentiated twice.
    """
    inputs, vectors = _listed(params), _listed(v)
    _check_shapes("hessian_vector_product(f, params, v)", inputs, vectors)
    slope = _pull([f], inputs, None) if grad_params is None else _listed(grad_params)
    return _detached(_pull(slope, inputs, vectors, create_graph=not detach), detach)


def ggn_vector_product(loss: Tensor, output: Tensor, model: nn.Module, v: Vectors) -> tuple[Tensor, ...]:
    """``G v`` with ``G = J^T H J`` the generalized Gauss-Newton matrix in all trainable parameters of a model.

    Args:
        loss: The scalar loss; its graph must still be there.
        output: What the loss was computed from.
        model: Whose parameters are meant: those that require gradients, in the order of ``parameters()``.
        v: One tensor for each of them, of the same shapes.

    Returns:
        One tensor for each parameter, cut from the graph.
    """
    return ggn_vector_product_from_plist(loss, output, [p for p in model.parameters() if p.requires_grad], v)


def ggn_vector_product_from_plist(
    loss: Tensor, output: Tensor, plist: Vectors, v: Vectors
) -> tuple[Tensor, ...]:
    """``G v`` with G the block of the generalized Gauss-Newton matrix that belongs to some parameters.

    Args:
        loss: The scalar loss; its graph must still be there.
        output: What the loss was computed from.
        plist: The parameters.
        v: One tensor for each of them, of the same shapes.

    Returns:
        One tensor for each parameter, cut from the graph.
    """
    parameters, vectors = _listed(plist), _listed(v)
    _check_shapes("A product with the generalized Gauss-Newton matrix", parameters, vectors)
    curved = hessian_vector_product(loss, output, R_op(output, parameters, vectors))
    return L_op(output, parameters, curved)


def L_op(  # noqa: N802  # the name in the literature
    ys: Vectors, xs: Vectors, ws: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """``J^T w``, a vector-Jacobian product, with J the Jacobian of ``ys`` in ``xs``.

    Args:
        ys: Outputs.
        xs: Inputs that they were computed from.
        ws: One tensor for each output, of the same shapes.
        retain_graph: Whether the graph shall be there afterwards.
        detach: Whether the result shall be cut from the graph.

    Returns:
        One tensor for each of ``xs``, of their shapes; zeros where no output depends on it.
    """
    outputs, vectors = _listed(ys), _listed(ws)
    _check_shapes("L_op(ys, xs, ws)", outputs, vectors)
    return _detached(_pull(outputs, _listed(xs), vectors, retain_graph, create_graph=not detach), detach)


def R_op(  # noqa: N802
    ys: Vectors, xs: Vectors, vs: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """``J v``, a Jacobian-vector product, with J the Jacobian of ``ys`` in ``xs``.

    ``J^T w`` is linear in w, so that its own vector-Jacobian product in w is ``J v`` (Townsend 2017).

    Args:
        ys: Outputs.
        xs: Inputs that they were computed from.
        vs: One tensor for each input, of the same shapes.
        retain_graph: Whether the graph shall be there afterwards.
        detach: Whether the result shall be cut from the graph.

    Returns:
        One tensor for each of ``ys``, of their shapes; zeros where it depends on no input.
    """
    outputs, inputs, vectors = _listed(ys), _listed(xs), _listed(vs)
    _check_shapes("R_op(ys, xs, vs)", inputs, vectors)
    ws = [torch.zeros_like(y).requires_grad_(True) for y in outputs]
    pulled = _pull(outputs, inputs, ws, retain_graph)
    return _detached(_pull(pulled, ws, vectors, create_graph=not detach), detach)


def transposed_jacobian_vector_product(
    f: Vectors, x: Vectors, v: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """``L_op`` by its long name."""
    return L_op(f, x, v, retain_graph, detach)


def jacobian_vector_product(
    f: Vectors, x: Vectors, v: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """``R_op`` by its long name."""
    return R_op(f, x, v, retain_graph, detach)


def _listed(value: Vectors) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _detached(found: Sequence[Tensor], detach: bool) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in found) if detach else tuple(found)


def _pull(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    vectors: Sequence[Tensor] | None,
    retain_graph: bool = True,
    create_graph: bool = True,
) -> list[Tensor]:
    """Vector-Jacobian products; zeros for outputs that are constant."""
    places = [place for place, output in enumerate(outputs) if output.requires_grad]
    if not places:
        return [torch.zeros_like(tensor) for tensor in inputs]
    try:
        found = torch.autograd.grad(
            [outputs[place] for place in places],
            list(inputs),
            None if vectors is None else [vectors[place] for place in places],
            retain_graph=retain_graph,
            create_graph=create_graph,
            materialize_grads=True,
        )
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise PackpropError(
            "A product with a curvature matrix or a Jacobian was asked for.",
            "the graph of the forward pass",
            f"PyTorch cannot differentiate one of its functions twice: {error}",
            "run the forward pass with a twice differentiable one; for attention, inside `with "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):`",
        ) from error
    return list(found)


def _check_shapes(asked: str, tensors: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    shapes, given = ([tuple(tensor.shape) for tensor in each] for each in (tensors, vectors))
    if shapes != given:
        raise BadInput(
            f"{asked} was asked for." if "(" not in asked else f"{asked} was called.",
            f"vectors of shapes {given}",
            f"they do not match {shapes}",
            "give one tensor for each, of the same shape",
        )
