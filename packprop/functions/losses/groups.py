"""What a loss would be divided by if it were taken over some of its samples alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.functions.losses.description import describe, without_classes
from packprop.tensors.layout import Layout


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
