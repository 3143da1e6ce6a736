"""What is known of a loss function: which entries interact, weights, divisor, the root of its Hessian.

All of it refers to the canonical form of a loss's input, ``[n, t, c]``: samples, positions whose terms are
independent given the input, and the entries of one position (classes, or 1). A loss over N samples with T
positions of C entries has ``T * C`` columns: one for each position and entry, fed in for all samples at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.functions.losses.links import Link
from packprop.tensors.layout import Layout, layout_of_rows


@dataclass(frozen=True)
class Root:
    """Square root of the Hessian of a loss's terms.

    Args:
        columns: Number of columns of one position.
        position: ``(t, start, stop) -> [k, n, c]``, some columns at position ``t``.
        draw: ``(draws, generator) -> [m, n, t, c]``, gradients of the loss for drawn targets. The mean of their
            outer products is the Hessian; they are not yet divided by ``sqrt(draws)``.
        entrywise: A root with one column for each entry, if this one has fewer.
    """

    columns: int
    position: Callable[[int, int, int], Tensor]
    draw: Callable[[int, torch.Generator | None], Tensor]
    entrywise: Root | None = None


@dataclass(frozen=True)
class Loss:
    """What a loss rule says about one call.

    Args:
        class_axis: Axis of the input whose entries interact; ``None`` if every entry has its own term.
        weight: What multiplies each term before reduction, of the input's shape without ``class_axis``;
            a number if it is the same for all. Of the input's whole shape it is summed along ``class_axis``.
        divisor: What the sum of terms is divided by: 1 for ``sum`` and ``none``, ``None`` if unknown.
        root: From canonical input ``[n, t, c]`` and scale of each term ``[n, t]`` to the root;
            ``None`` if the loss is described by its own derivatives alone.
        refusal: Why the loss has no useful curvature, and what to use instead; with a link, where that is not
            there.
        sample_axis: The axis of the input that holds the samples and nothing else; ``None`` for the leading
            axis, which may hold positions, too.
        one_sample: Whether the input has no axis of samples.
        link: The function that must have made the input: the root is that in what it was given. If it takes
            rows, ``class_axis`` may be ``None``: they are found on the graph.
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
"""From the arguments of a loss function to what is known of this call."""


LOSSES: dict[Callable[..., Any], Rule] = {}
"""Loss function -> rule."""


INPUT_NAMES: dict[Callable[..., Any], str] = {}
"""Loss function -> name of its first argument, where that is not ``input``."""


NODES: dict[str, Callable[[Sequence[int]], Loss]] = {}
"""Name of an autograd node -> from the shape of a loss's input to what is known of a loss that was not seen."""


def of_node(name: str) -> Callable[[Sequence[int]], Loss] | None:
    """The rule of the loss that a node tells, if it is one whose samples are not where they usually are."""
    return NODES.get(name.rstrip("0123456789"))


def register_loss(*functions: Callable[..., Any], input_name: str = "input") -> Callable[[Rule], Rule]:
    """Say how a loss function curves.

    The decorated rule has the signature of the loss function and returns a ``Loss``. With ``root=None`` the
    Hessian of each sample is computed by double backward and factorised: right for any twice differentiable
    convex loss, slow for many outputs.

    Args:
        functions: The loss functions.
        input_name: Name of their first argument, which the model's output goes into.
    """

    def register(rule: Rule) -> Rule:
        LOSSES.update(dict.fromkeys(functions, rule))
        if input_name != "input":
            INPUT_NAMES.update(dict.fromkeys(functions, input_name))
        return rule

    return register


def canonical(tensor: Tensor, layout: Layout, class_axis: int | None, skip: int = 0) -> Tensor:
    """The canonical form ``[*skipped, n, t, c]`` of a loss's input, or of columns there, ``[*skipped, *f]``."""
    inner, rest = without_classes(layout, tensor.shape[skip:], class_axis)
    classes = 1
    if class_axis is not None:
        classes = tensor.shape[class_axis + skip]
        tensor = tensor.movedim(class_axis + skip, -1).reshape(*tensor.shape[:skip], *rest, classes)
    front = inner.to_front(tensor, skip)
    return front.reshape(*front.shape[: skip + 1], -1, classes)


def from_canonical(tensor: Tensor, shape: torch.Size, layout: Layout, class_axis: int | None) -> Tensor:
    """The inverse of ``canonical`` for columns ``[v, n, t, c] -> [v, *f]``."""
    inner, rest = without_classes(layout, shape, class_axis)
    classes = () if class_axis is None else (shape[class_axis],)
    front = tensor.reshape(tensor.shape[0], *inner.front_shape(rest), *classes)
    back = inner.from_front(front, 1)
    return back if class_axis is None else back.movedim(-1, class_axis + 1).reshape(-1, *shape)


def without_classes(layout: Layout, shape: torch.Size, class_axis: int | None) -> tuple[Layout, torch.Size]:
    """Layout and shape of a tensor whose axis of classes is taken away.

    One row of classes, which losses of single rows take in turn, becomes a row of one entry.
    """
    if class_axis is None:
        return layout, shape
    if layout.axis == class_axis and layout.rows is not None:
        return layout_of_rows(0, layout.rows.sample_of[:1], layout.samples), torch.Size([1])
    if layout.axis is not None and layout.axis > class_axis:
        layout = layout._replace(axis=layout.axis - 1)
    return layout, torch.Size([*shape[:class_axis], *shape[class_axis + 1 :]])


def weight_of_terms(loss: Loss, factor: Tensor, shape: Sequence[int]) -> Tensor:
    """What multiplies each term of a loss whose output is multiplied by ``factor``, without ``class_axis``."""
    weight = loss.weight * factor
    if loss.class_axis is None or weight.dim() < len(shape):
        return weight
    return weight.sum(loss.class_axis)


def input_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that the model's output went into: the first, by place or by name."""
    return args[0] if args else kwargs.get(INPUT_NAMES.get(function, "input"))


def describe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loss:
    """What is known of one call of a loss; for a function without a rule, only that it is differentiable."""
    rule = LOSSES.get(function)
    if rule is None:
        return Loss(None, 1.0, None, None)
    return rule(*args, **kwargs)


def divisors(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
    groups: Sequence[Sequence[int]],
) -> list[Tensor | float] | None:
    """The divisor of one call of a loss, and those of calls for each group of samples; ``None`` if unknown.

    Args:
        function: The loss function.
        args: Its arguments, by place; of the input the shape is enough.
        kwargs: Its arguments, by name.
        layout: Where its input holds the samples.
        groups: Indices of samples.
    """
    whole = describe(function, args, kwargs)
    if whole.divisor is None:
        return None
    if not isinstance(whole.divisor, Tensor) and whole.divisor == 1:  # a sum, or what is left to be reduced
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
        chosen, places = dict(given), torch.isin(owners, torch.tensor(list(group))).nonzero().flatten()
        for place, (name, value) in enumerate(given):
            if not isinstance(value, Tensor) or (name == "weight" and whole.class_axis is not None):
                continue
            own = places.to(value.device)
            if place == 0:  # its shape is all that is looked at, and its values may be gone
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
