"""Divisors of a loss over some of its samples alone."""

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
    """Return the divisor of one call of a loss, and those of calls for each group of samples.

    Return ``None`` if they are not known.

    Args:
        function: The loss function.
        args: Its arguments, by place; for the input, the shape is enough.
        kwargs: Its arguments, by name.
        layout: The place of samples in its input.
        groups: Indices of samples.
    """
    whole = describe(function, args, kwargs)
    if whole.divisor is None:
        return None
    if not isinstance(whole.divisor, Tensor) and whole.divisor == 1:  # a sum, or terms without a reduction
        return [1.0] * (1 + len(groups))
    if layout.axis in (None, whole.class_axis) or layout.joined:
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    given = list(bound.arguments.items())
    shape = given[0][1].shape
    inner, rest = without_classes(layout, shape, whole.class_axis)
    found: list[Tensor | float] = [whole.divisor]
    for group in groups:
        chosen = dict(given)
        for place, (name, value) in enumerate(given):
            if not isinstance(value, Tensor) or (name == "weight" and whole.class_axis is not None):
                continue
            if place == 0:  # only its shape matters, and its values may be freed
                chosen[name] = value.new_empty(()).expand(_shape(value.shape, layout, group))
            elif value.shape == shape:
                chosen[name] = _selected(value, layout, group)
            elif place == 1 and value.shape == rest:  # targets that are classes
                chosen[name] = _selected(value, inner, group)
            elif value.shape != shape[layout.behind :][-1:]:  # samples may be broadcast against it
                return None
        divisor = describe(function, (), chosen).divisor
        if divisor is None:
            return None
        found.append(divisor)
    return found


def _shape(shape: torch.Size, layout: Layout, group: Sequence[int]) -> list[int]:
    """Return the shape of the entries of some samples."""
    assert layout.axis is not None
    return [*shape[: layout.axis], len(_places(layout, group)), *shape[layout.axis + 1 :]]


def _selected(tensor: Tensor, layout: Layout, group: Sequence[int]) -> Tensor:
    """Select the entries of some samples, along the axis that holds them."""
    assert layout.axis is not None
    return tensor.index_select(layout.axis, _places(layout, group).to(tensor.device))


def _places(layout: Layout, group: Sequence[int]) -> Tensor:
    """Return the places of some samples along the axis that holds them."""
    index = torch.tensor(list(group))
    if layout.rows is not None:
        index = torch.isin(layout.rows.sample_of, index).nonzero().reshape(-1)
    elif layout.parts > 1:
        parts = torch.arange(layout.parts)
        index = (
            index[:, None] * layout.parts + parts if layout.major else index + parts[:, None] * layout.samples
        )
    return index.reshape(-1)
