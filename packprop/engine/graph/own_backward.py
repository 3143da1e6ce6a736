"""A check that vectors can be pulled back through the user's backward functions, which may compute anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from packprop.engine.functions.nodes import is_identity, made_by
from packprop.engine.graph.graph import EAGER
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.unrecorded import is_compiled_region
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.random import Draws
from packprop.engine.tensors.traced import is_traced
from packprop.errors import PackpropError

FACTORS = (1.0, 2.0**10, 2.0**-10)
"""Factors that scale the vectors of the check: bounds and thresholds show at some of them."""


def require_linear_backward(asked: str, starts: Iterable[Node | None]) -> None:
    """Refuse the user's own functions if their backward function is not linear in the gradient that it gets.

    A backward pass is linear. So packprop can pull rows of samples, columns of curvature and other vectors back
    through it in place of the gradient. A backward function that clips, normalises or rounds is no derivative.
    packprop also refuses functions that run a backward pass of their own.
    """
    starts, draws = list(starts), Draws()
    types = {each.dtype for node in nodes_above(starts) for each in made_by(node)}
    # functions may compute in any of them, as under autocast
    coarsest = max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point), default=0.0)
    for node in _own_nodes(starts):
        if not _is_linear(asked, node, coarsest, draws):
            raise PackpropError(
                asked,
                _backward_function(node),
                "it is not linear in the gradient that it is given (it clips, normalises, rounds or draws), "
                "so no vector but the gradient itself can be pulled back through it",
                "clip or normalise gradients after backward(), in a hook or in .grad; or let the backward "
                "function multiply only by factors that do not depend on the gradient",
            )


def require_no_nested_backward(asked: str, starts: Iterable[Node | None]) -> None:
    """Refuse the user's own functions if their backward function runs a backward pass of its own.

    Such a pass adds to the ``.grad`` of parameters that this graph does not show, whatever is pulled back.
    """
    for node in _own_nodes(starts):
        made = made_by(node)
        if _can_be_tried(made):
            ones = [torch.ones(each.shape, dtype=each.dtype, device=each.device) for each in made]
            _products(asked, node, ones, Draws())


class _Nested(Exception):
    """Raised if a backward pass is started inside a backward function."""


class _NoNestedBackward(TorchFunctionMode):
    """A mode that raises ``_Nested`` if a backward pass is started."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.autograd.backward, Tensor.backward):
            raise _Nested
        return func(*args, **(kwargs or {}))


def starts_of(outputs: Sequence[Tensor | GradientEdge]) -> list[Node | None]:
    """Return the nodes that made some tensors, or that edges belong to."""
    return [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]


def _own_nodes(starts: Iterable[Node | None]) -> Iterator[Any]:
    """Yield the nodes of the user's own functions; none in dry runs and traces, which have no values."""
    for node in () if is_dry_run() or is_traced() else nodes_above(starts):
        is_own = isinstance(node, BackwardCFunction) and node.name() != EAGER
        if is_own and not is_identity(node) and not is_compiled_region(node):
            yield node


def _backward_function(node: Node) -> str:
    return f"the backward function of {node.name().removesuffix('Backward')} (torch.autograd.Function)"


def _can_be_tried(made: Sequence[Any]) -> bool:
    return bool(made) and all(each.dtype.is_floating_point for each in made)


def _products(asked: str, node: Any, given: Sequence[Tensor], draws: Draws) -> list[Tensor]:
    """Return the tensors that a node's backward function returns for vectors; none if it raises an exception.

    Raises:
        PackpropError: If it runs a backward pass of its own.
    """
    try:
        with torch.no_grad(), _NoNestedBackward():
            products = draws.call(node.apply, *given)
    except _Nested as nested:
        raise PackpropError(
            asked,
            _backward_function(node),
            "it calls backward() itself, on parameters that autograd's graph does not show",
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); or return gradients by "
            "torch.autograd.grad, with the parameters among the arguments of the function",
        ) from nested
    except Exception:  # the user's code may raise anything, and its saved tensors may be freed
        return []
    products = products if isinstance(products, tuple) else (products,)
    return [each for each in products if isinstance(each, Tensor)]


def _is_linear(asked: str, node: Any, coarsest: float, draws: Draws) -> bool:
    """Tell whether a node's backward function is linear; true if packprop cannot try it.

    ``coarsest`` is the lowest relative precision that it may compute in.
    """
    made = made_by(node)
    if not _can_be_tried(made):
        return True
    generator = torch.Generator().manual_seed(len(made))
    shapes = [tuple(each.shape) for each in made]
    first, second = (
        [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
        for _ in range(2)
    )

    def run(fed: Sequence[Tensor]) -> list[Tensor]:
        given = [each.to(like.device, like.dtype) for each, like in zip(fed, made, strict=True)]
        return [each.to(torch.float64) for each in _products(asked, node, given, draws)]

    tolerance = max(max(torch.finfo(each.dtype).eps for each in made) ** 0.5, 4 * coarsest)
    one, other = run(first), run(second)
    for factor in FACTORS:
        both = run([factor * (a + b) for a, b in zip(first, second, strict=True)])
        if not [each.shape for each in one] == [each.shape for each in other] == [each.shape for each in both]:
            return True  # it raised an exception, or left out a result that is zero
        for a, b, ab in zip(one, other, both, strict=True):
            wanted = factor * (a + b)
            bound = tolerance * factor * (a.abs().amax() + b.abs().amax()) if a.numel() else 0.0
            if a.numel() and bool(((ab - wanted).abs() > bound).any()):
                return False
    return True
