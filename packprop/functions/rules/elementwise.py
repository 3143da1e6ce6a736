"""Functions that work entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.functions.building import SavedTensor, scaled
from packprop.functions.entry import Call, Entry
from packprop.functions.registry import register_use


def _family(*names: str) -> list[Callable[..., Any]]:
    """Function, method, in-place method and operators of elementwise functions."""
    spellings = [spelling for name in names for spelling in (name, f"{name}_", f"__{name}__")]
    spellings += [f"__{prefix}{name}__" for name in names for prefix in "ri"]
    owners = (torch, Tensor)
    found = [getattr(owner, spelling, None) for owner in owners for spelling in spellings]
    return [function for function in found if function is not None]


def _operand(call: Call, input: Any, other: Any) -> tuple[Tensor, Any, bool] | None:
    """Parameter, the other operand, and whether the parameter came first."""
    if call.consumes(input) and call.consumes(other):
        return None
    return (input, other, True) if call.consumes(input) else (other, input, False)


@register_use(*_family("add"))
def _add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> list[Entry] | None:
    if (pair := _operand(call, input, other)) is None:
        return None
    return [scaled(call, pair[0], 1.0 if pair[2] else float(alpha))]


@register_use(*_family("sub", "subtract"))
def _sub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> list[Entry] | None:
    if (pair := _operand(call, input, other)) is None or call.function is Tensor.__rsub__:
        return None
    return [scaled(call, pair[0], 1.0 if pair[2] else -float(alpha))]


@register_use(*_family("mul", "multiply"))
def _mul(call: Call, input: Any, other: Any) -> list[Entry] | None:
    if (pair := _operand(call, input, other)) is None:
        return None
    return [scaled(call, pair[0], SavedTensor(pair[1], "mul"))]


@register_use(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> list[Entry] | None:
    axis = dim % len(call.shape)
    found, offset = [], 0
    for tensor in tensors:
        if call.consumes(tensor):
            if sum(tensor is other for other in tensors) > 1:
                return None
            form = [*tensor.shape]
            source = call.unexpanded(tensor)
            if source is not tensor:
                form = [1] * (tensor.dim() - source.dim()) + [*source.shape]
                if form[axis] != tensor.shape[axis]:
                    return None
            found.append(scaled(call, tensor, aligned=form, window=(axis, offset)))
        offset += tensor.shape[axis]
    return found


@register_use(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(call: Call, input: Tensor, weight: Tensor) -> list[Entry] | None:
    if call.consumes(input) or (weight.numel() > 1 and input.dim() < 2):
        return None
    form = [1] * len(call.shape)
    if weight.numel() > 1:
        form[1] = weight.numel()
    saved = SavedTensor(input, "prelu")
    return [scaled(call, weight, lambda: saved().clamp(max=0), aligned=form, linear=True)]
