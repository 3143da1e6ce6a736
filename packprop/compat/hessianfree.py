"""BackPACK's names for products with the Hessian and the GGN of a whole model, and with Jacobians.

They compute the products of ``packprop.products`` for one vector, under other names and with other options. You
need not extend anything. Every function differentiates an existing graph, and keeps it by default.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from packprop.engine.curvature import (
    ASKED,
    INSTEAD,
    Hessian,
    differentiating_twice,
    faulty_jacobian,
    ggnvp,
    jvps,
    require_passable,
    require_second_derivatives,
    require_vectors,
    shown,
    vjps,
    warn_unless_finite,
    with_zeros,
)

Vectors = Tensor | Iterable[Tensor]

WHERE = "the graph of the forward pass"


def hessian_vector_product(
    f: Tensor,
    params: Vectors,
    v: Vectors,
    grad_params: Vectors | None = None,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """Return ``H v`` with H the Hessian of a scalar in all of ``params`` together (Pearlmutter 1994).

    Args:
        f: The scalar; its graph must not be freed yet.
        params: Tensors that ``f`` was computed from.
        v: One tensor for each of ``params``, of the same shape.
        grad_params: The gradient of ``f`` in ``params``, computed before with ``create_graph=True``. It saves
            the first of two backward passes.
        detach: Cut the result from the graph.

    Returns:
        One tensor for each of ``params``, of their shapes.

    Raises:
        BadInput: If shapes of ``v`` and ``params`` differ.
        PackpropError: If a function on the way cannot be differentiated twice.
    """
    inputs, vectors = _listed(params), _listed(v)
    require_vectors("hessian_vector_product(f, params, v)", inputs, vectors)
    require_second_derivatives([f], inputs, shown, ASKED)
    with differentiating_twice(WHERE, ASKED, INSTEAD):
        gradient: Sequence[Tensor | None] = [] if grad_params is None else _listed(grad_params)
        hessian = Hessian([f], [None], inputs)
        if not any(part is not None and part.requires_grad for part in gradient):  # made without a graph
            gradient = hessian.gradients
        product = vjps(gradient, inputs, vectors, batched=False, create_graph=not detach)
        warn_unless_finite("A product by hessian_vector_product", product, vectors, hessian.faulty_node)
    return _result(with_zeros(product, inputs, None), detach)


def ggn_vector_product(loss: Tensor, output: Tensor, model: nn.Module, v: Vectors) -> tuple[Tensor, ...]:
    """Return ``G v`` with ``G = J^T H J`` the generalized Gauss-Newton matrix of a model.

    Args:
        loss: The scalar loss; its graph must not be freed yet.
        output: The loss's input.
        model: The model; the parameters are those that require gradients, in the order of ``parameters()``.
        v: One tensor for each of these parameters, of the same shape.

    Returns:
        One tensor for each parameter, cut from the graph.

    Raises:
        BadInput: If shapes of ``v`` and the parameters differ.
        PackpropError: If a function on the way cannot be differentiated twice.
    """
    return ggn_vector_product_from_plist(loss, output, [p for p in model.parameters() if p.requires_grad], v)


def ggn_vector_product_from_plist(
    loss: Tensor, output: Tensor, plist: Vectors, v: Vectors
) -> tuple[Tensor, ...]:
    """Return ``G v`` with G the block of the generalized Gauss-Newton matrix that belongs to some parameters.

    Args:
        loss: The scalar loss; its graph must not be freed yet.
        output: The loss's input.
        plist: The parameters of the block.
        v: One tensor for each of these parameters, of the same shape.

    Returns:
        One tensor for each parameter, cut from the graph.

    Raises:
        BadInput: If shapes of ``v`` and the parameters differ.
        PackpropError: If a function on the way cannot be differentiated twice.
    """
    parameters, vectors = _listed(plist), _listed(v)
    require_vectors("ggn_vector_product_from_plist(loss, output, plist, v)", parameters, vectors)
    return _result(ggnvp((output, loss), parameters, vectors), detach=True)


def L_op(  # noqa: N802  # the name in the literature
    ys: Vectors, xs: Vectors, ws: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Return ``J^T w``, a vector-Jacobian product, with J the Jacobian of ``ys`` in ``xs``.

    Args:
        ys: Outputs.
        xs: Inputs that they were computed from.
        ws: One tensor for each output, of the same shape.
        retain_graph: Keep the graph afterwards.
        detach: Cut the result from the graph.

    Returns:
        One tensor for each of ``xs``, of the same shape; zeros if no output depends on that input.

    Raises:
        BadInput: If shapes of ``ws`` and ``ys`` differ.
        PackpropError: If ``ys`` are gradients through a function that cannot be differentiated twice.
    """
    outputs, inputs, vectors = _listed(ys), _listed(xs), _listed(ws)
    require_vectors("L_op(ys, xs, ws)", outputs, vectors)
    require_passable(outputs, ASKED)
    with differentiating_twice(WHERE, ASKED, INSTEAD):
        product = vjps(
            outputs, inputs, vectors, batched=False, create_graph=not detach, retain_graph=retain_graph
        )
    return _result(with_zeros(product, inputs, None), detach)


def R_op(  # noqa: N802  # the older library's name
    ys: Vectors, xs: Vectors, vs: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Return ``J v``, a Jacobian-vector product, with J the Jacobian of ``ys`` in ``xs``.

    Args:
        ys: Outputs.
        xs: Inputs that they were computed from.
        vs: One tensor for each input, of the same shape.
        retain_graph: Keep the graph afterwards.
        detach: Cut the result from the graph.

    Returns:
        One tensor for each of ``ys``, of the same shape; zeros if that output depends on no input.

    Raises:
        BadInput: If shapes of ``vs`` and ``xs`` differ.
        PackpropError: If a function on the way cannot be differentiated twice.
    """
    outputs, inputs, vectors = _listed(ys), _listed(xs), _listed(vs)
    require_vectors("R_op(ys, xs, vs)", inputs, vectors)
    require_second_derivatives(outputs, inputs, shown, ASKED, linear=True)
    with differentiating_twice(WHERE, ASKED, INSTEAD):
        product = jvps(
            outputs, inputs, vectors, batched=False, create_graph=not detach, retain_graph=retain_graph
        )
        if retain_graph:
            search = functools.partial(faulty_jacobian, outputs, inputs)
            warn_unless_finite("A product by R_op", product, vectors, search)
    return _result(product, detach)


def transposed_jacobian_vector_product(
    f: Vectors, x: Vectors, v: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Call ``L_op`` by its long name."""
    return L_op(f, x, v, retain_graph, detach)


def jacobian_vector_product(
    f: Vectors, x: Vectors, v: Vectors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Call ``R_op`` by its long name."""
    return R_op(f, x, v, retain_graph, detach)


def _listed(value: Vectors) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _result(tensors: list[Tensor], detach: bool) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in tensors) if detach else tuple(tensors)
