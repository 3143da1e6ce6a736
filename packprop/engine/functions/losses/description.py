"""Descriptions of loss functions: interacting entries, weights, divisor, and the root of the Hessian.

Descriptions refer to the canonical form of a loss's input, ``[n, t, c]``: samples, positions whose terms are
independent given the input, and the entries of one position (classes, or 1). A loss over N samples with T
positions of C entries has ``T * C`` columns: one for each position and entry, for all samples at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.functions.losses.links import Link
from packprop.engine.functions.verdicts import Verdicts
from packprop.engine.tensors.layout import Layout, layout_of_rows
from packprop.errors import BadInput


@dataclass(frozen=True)
class Root:
    """The square root of the Hessian of a loss's terms.

    Args:
        columns: Number of columns of one position.
        position: ``(t, start, stop) -> [k, n, c]``, the columns from ``start`` to ``stop`` at position ``t``.
        draw: ``(draws, generator) -> [m, n, t, c]``, gradients of the loss for drawn targets. The expectation
            of their outer products is the Hessian. They are not divided by ``sqrt(draws)``.
        entrywise: A root with one column for each entry, if this root has fewer.
    """

    columns: int
    position: Callable[[int, int, int], Tensor]
    draw: Callable[[int, torch.Generator | None], Tensor]
    entrywise: Root | None = None


@dataclass(frozen=True)
class Loss:
    """The description of one call of a loss function.

    Args:
        class_axis: Axis of the input whose entries interact; ``None`` if every entry has its own term.
        weight: Factors on the terms before reduction, of the input's shape without ``class_axis``; a number if
            all are equal. A weight of the input's full shape is summed along ``class_axis``.
        divisor: The divisor of the sum of terms: 1 for ``sum`` and ``none``, ``None`` if unknown.
        root: Maps the canonical input ``[n, t, c]`` and the scale of each term ``[n, t]`` to the root; ``None``
            to compute the root from second derivatives of the loss.
        refusal: The reason why the loss has no useful curvature, and what to use instead. With a link, the
            refusal applies only if the link has not made the input.
        sample_axis: The axis of the input that holds the samples and nothing else; ``None`` for the leading
            axis, which may also hold positions.
        one_sample: Whether the input has no axis of samples.
        link: The function that must have made the input: the root refers to the input of this function. If the
            function takes rows, ``class_axis`` may be ``None``, and packprop finds the axis on the graph.
    """

    class_axis: int | None
    weight: Tensor | float
    divisor: Tensor | float | None
    root: Callable[[Tensor, Tensor], Root] | None
    refusal: tuple[str, str] | None = None
    sample_axis: int | None = None
    one_sample: bool = False
    link: Link | None = None


Rule = Callable[..., Loss]
"""Maps the arguments of a call of a loss function to the description of the call."""

LOSSES: dict[Callable[..., Any], Rule] = {}
"""Rules by loss function."""

INPUT_NAMES: dict[Callable[..., Any], str] = {}
"""Names of the first arguments of loss functions, if they are not ``input``."""

PROVEN: dict[Callable[..., Any], Verdicts] = {}
"""Loss functions with a user's rule -> calls, by shapes and options, for which its root was right."""


def register_loss(*functions: Callable[..., Any], input_name: str = "input") -> Callable[[Rule], Rule]:
    """Register a rule for the curvature of a loss function.

    The decorated rule has the signature of the loss function and returns a ``Loss``. With ``root=None``
    packprop computes the Hessian of each sample by double backward and factorises it. This is right for any
    twice differentiable convex loss, but slow for many outputs.

    A loss with a rule counts as a sum of one term for each sample. packprop does not check that. It compares
    your root with the second derivatives of the loss in the first pass of each shape and option, where these
    exist and the root has at most 2**24 entries. It does not check draws; ``packprop.testing.check_model``
    does.

    Args:
        functions: Loss functions, or classes of loss modules without parameters, whose ``forward`` has the
            signature. packprop sees calls of an extended module. It sees calls of a function inside
            ``record()`` if PyTorch dispatches them to modes, as ``torch.overrides.wrap_torch_function`` does.
        input_name: Name of the first argument of the functions, which takes the model's output.

    Raises:
        BadInput: If there is no argument, or one is neither, or a function that is not dispatched to modes.
    """
    for each in functions or (None,):
        _require_seen(each)

    def register(rule: Rule) -> Rule:
        PROVEN.update({function: Verdicts() for function in functions})
        return add_rule(rule, *functions, input_name=input_name)

    return register


def add_rule(rule: Rule, *functions: Callable[..., Any], input_name: str = "input") -> Rule:
    """Enter a rule into the table; packprop's own rules need no proof."""
    LOSSES.update(dict.fromkeys(functions, rule))
    if input_name != "input":
        INPUT_NAMES.update(dict.fromkeys(functions, input_name))
    return rule


def _require_seen(function: Any) -> None:
    """Refuse a loss whose calls packprop could never see."""
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        return
    if isinstance(function, torch.nn.Module) or not callable(function) or isinstance(function, type):
        raise BadInput(
            "register_loss(...) was called.",
            "no function" if function is None else f"argument of type {type(function).__name__}",
            "a rule belongs to a loss function, or to a class of loss modules",
            "decorate the rule with @packprop.register_loss(MyLoss), where MyLoss is the class of a module "
            "without parameters that takes the model's output and the targets",
        )
    names = function.__code__.co_names if isinstance(function, FunctionType) else ("handle_torch_function",)
    if "handle_torch_function" not in names:
        raise BadInput(
            "register_loss(...) was called.",
            f"function {function.__name__}",
            "PyTorch does not dispatch its calls to modes, so packprop sees only the functions that it calls",
            "put it into the forward of a module without parameters, register the module's class, and extend "
            "the module that you call: @packprop.register_loss(MyLoss), loss = packprop.extend(MyLoss()); or "
            "decorate the function with @torch.overrides.wrap_torch_function(lambda input, target: (input, "
            "target)), and call it inside `with packprop.record():`",
        )


def canonical(tensor: Tensor, layout: Layout, class_axis: int | None, skip: int = 0) -> Tensor:
    """Return the canonical form ``[*skipped, n, t, c]`` of a loss's input, or of columns ``[*skipped, *f]``."""
    classes = 1 if class_axis is None else tensor.shape[class_axis + skip]
    if _is_in_order(layout, tensor.dim() - skip, class_axis):
        return tensor.reshape(*tensor.shape[: skip + 1], -1, classes)
    inner, rest = without_classes(layout, tensor.shape[skip:], class_axis)
    if class_axis is not None:
        tensor = tensor.movedim(class_axis + skip, -1).reshape(*tensor.shape[:skip], *rest, classes)
    front = inner.to_front(tensor, skip)
    return front.reshape(*front.shape[: skip + 1], -1, classes)


def from_canonical(tensor: Tensor, shape: torch.Size, layout: Layout, class_axis: int | None) -> Tensor:
    """Invert ``canonical`` for columns ``[v, n, t, c] -> [v, *f]``; columns at one position may lack axis t."""
    columns = tensor.shape[0]
    if _is_in_order(layout, len(shape), class_axis):
        return tensor if tensor.shape[1:] == shape else tensor.reshape(columns, *shape)
    inner, rest = without_classes(layout, shape, class_axis)
    classes = () if class_axis is None else (shape[class_axis],)
    front = tensor.reshape(columns, *inner.front_shape(rest), *classes)
    back = inner.from_front(front, 1)
    return back if class_axis is None else back.movedim(-1, class_axis + 1).reshape(-1, *shape)


def _is_in_order(layout: Layout, dims: int, class_axis: int | None) -> bool:
    """Tell whether samples come first in a loss's input, and classes last: a reshape joins the positions."""
    return (
        layout.axis == 0
        and layout.parts == 1
        and layout.rows is None
        and (class_axis is None or 0 < class_axis == dims - 1)
    )


def without_classes(layout: Layout, shape: torch.Size, class_axis: int | None) -> tuple[Layout, torch.Size]:
    """Return layout and shape without the axis of classes; if it holds the samples, one entry is left."""
    if class_axis is None:
        return layout, shape
    if layout.axis == class_axis and layout.rows is not None:
        return layout_of_rows(0, layout.rows.sample_of[:1], layout.samples), torch.Size([1])
    if layout.axis is not None and layout.axis > class_axis:
        layout = layout._replace(axis=layout.axis - 1)
    return layout, torch.Size([*shape[:class_axis], *shape[class_axis + 1 :]])


def weight_of_terms(loss: Loss, factor: Tensor | None, shape: Sequence[int]) -> Tensor | float:
    """Return factors on the terms of a loss, without an axis of classes; ``factor`` multiplies its output."""
    weight = loss.weight if factor is None else loss.weight * factor
    if loss.class_axis is None or not isinstance(weight, Tensor) or weight.dim() < len(shape):
        return weight
    return weight.sum(loss.class_axis)


SYMMETRIC = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
"""Loss functions whose first two arguments you may swap."""


def output_first(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a loss with the model's output first; those of ``SYMMETRIC`` may be swapped."""
    if function not in SYMMETRIC:
        return args, kwargs
    named = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
    pair = named.pop("input", None), named.pop("target", None)
    if not all(isinstance(each, Tensor) for each in pair):
        return args, kwargs
    turned = pair[1].requires_grad and not pair[0].requires_grad
    return ((pair[1], pair[0], *args[2:]), named) if turned else (args, kwargs)


def input_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument with the model's output: the first one, by place or by name."""
    return args[0] if args else kwargs.get(INPUT_NAMES.get(function, "input"))


def registered(function: Callable[..., Any]) -> Any:
    """Return the key of a loss's rule in ``LOSSES``: the function, or the class of a loss module."""
    return function if function in LOSSES else getattr(function, "module_class", function)


def describe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loss:
    """Describe one call of a loss; a function without a rule gets a description that knows nothing.

    Raises:
        BadInput: If a rule returns something else.
    """
    rule = LOSSES.get(registered(function))
    if rule is None:
        return Loss(None, 1.0, None, None)
    loss = rule(*args, **kwargs)
    if not isinstance(loss, Loss):
        raise BadInput(
            "A quantity beyond the gradient was asked for.",
            f"the rule {getattr(rule, '__name__', rule)} that is registered for {function.__name__}",
            f"it returned {type(loss).__name__}; packprop expects a packprop.functions.Loss",
            "return packprop.functions.Loss(class_axis, weight, divisor, root), where divisor divides the sum "
            "of terms; with root=None, packprop computes the root from second derivatives",
        )
    return loss


def told_axes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the axes that a user's rule declares, which may depend on options; empty for packprop's rules."""
    if registered(function) not in PROVEN:
        return ()
    loss = describe(function, args, kwargs)
    return loss.class_axis, loss.sample_axis, loss.one_sample


def divisors(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
    groups: Sequence[Sequence[int]],
) -> list[Tensor | float] | None:
    """Return the divisor of one call of a loss, and then its divisor for each group of samples, by index.

    Return ``None`` if they are not known. packprop uses only the shape of the loss's input, not its values.
    """
    whole = describe(function, args, kwargs)
    if whole.divisor is None:
        return None
    if not isinstance(whole.divisor, Tensor) and whole.divisor == 1:  # a sum, or terms without a reduction
        return [1.0] * (1 + len(groups))
    if layout.axis is None or layout.axis == whole.class_axis or layout.joined:
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    given = list(bound.arguments.items())
    shape = given[0][1].shape
    inner, rest = without_classes(layout, shape, whole.class_axis)
    found: list[Tensor | float] = [whole.divisor]
    owners = layout.sample_of(torch.device("cpu"))
    for group in groups:
        chosen = dict(given)
        places = torch.isin(owners, torch.tensor(list(group), device="cpu")).nonzero().flatten()
        for place, (name, value) in enumerate(given):
            if not isinstance(value, Tensor) or (name == "weight" and whole.class_axis is not None):
                continue
            own = places.to(value.device)
            if place == 0:  # only its shape matters, and its values may be freed
                sizes = [*shape[: layout.axis], len(own), *shape[layout.behind :]]
                chosen[name] = value.new_empty(()).expand(sizes)
            elif value.shape == shape:
                chosen[name] = value.index_select(layout.axis, own)
            elif place == 1 and value.shape == rest:  # targets that are classes
                assert inner.axis is not None
                chosen[name] = value.index_select(inner.axis, own)
            elif value.shape != shape[layout.behind :][-1:]:  # samples may be broadcast against it
                return None
        divisor = describe(function, (), chosen).divisor
        if divisor is None:
            return None
        found.append(divisor)
    return found
