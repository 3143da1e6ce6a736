"""Functions that combine a parameter with data entry by entry, or that concatenate them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.functions.building import SavedTensor, scaled
from packprop.functions.entry import Call, Entry
from packprop.functions.registry import made_later, register_use


def _family(*names: str) -> list[Callable[..., Any]]:
    """Functions, methods, in-place methods and operators with these names."""
    spellings = [spelling for name in names for spelling in (name, f"{name}_", f"__{name}__")]
    spellings += [f"__{prefix}{name}__" for name in names for prefix in "ri"]
    owners = (torch, Tensor)
    functions = [getattr(owner, spelling, None) for owner in owners for spelling in spellings]
    return [function for function in functions if function is not None]


def _operands(call: Call, input: Any, other: Any) -> tuple[Tensor, Any, bool] | None:
    """Parameter, other operand, and whether the parameter came first; ``None`` if both are parameters."""
    if call.consumes(input) and call.consumes(other):
        return None
    return (input, other, True) if call.consumes(input) else (other, input, False)


@register_use(*_family("add"))
def _add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> list[Entry] | None:
    if (operands := _operands(call, input, other)) is None:
        return None
    parameter, _, is_first = operands
    return [scaled(call, parameter, 1.0 if is_first else float(alpha))]


@register_use(*_family("sub", "subtract"))
def _sub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> list[Entry] | None:
    if (operands := _operands(call, input, other)) is None or call.function is Tensor.__rsub__:
        return None
    parameter, _, is_first = operands
    return [scaled(call, parameter, 1.0 if is_first else -float(alpha))]


@register_use(*_family("mul", "multiply"))
@made_later()
def _mul(call: Call, input: Any, other: Any) -> list[Entry] | None:
    if (operands := _operands(call, input, other)) is None:
        return None
    parameter, factor, _ = operands
    return [scaled(call, parameter, SavedTensor(factor, "mul"))]


@register_use(*_family("div", "divide", "true_divide", "truediv"))
def _div(call: Call, input: Any, other: Any, *, rounding_mode: str | None = None) -> list[Entry] | None:
    reversed_operands = call.function in (Tensor.__rdiv__, Tensor.__rtruediv__)
    if (operands := _operands(call, input, other)) is None or rounding_mode is not None or reversed_operands:
        return None
    parameter, value, is_numerator = operands
    if not isinstance(value, Tensor):
        return None
    saved, divisor = SavedTensor(value, "div"), SavedTensor(parameter, "div")
    if is_numerator:
        return [scaled(call, parameter, lambda: saved().reciprocal(), linear=True)]
    return [scaled(call, parameter, lambda: -saved() / divisor().square())]


@register_use(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> list[Entry] | None:
    axis = dim % len(call.shape)
    entries, offset = [], 0
    for tensor in tensors:
        if call.consumes(tensor):
            if sum(tensor is other for other in tensors) > 1:
                return None
            aligned = [*tensor.shape]
            source = call.unexpanded(tensor)
            if source is not tensor:
                aligned = [1] * (tensor.dim() - source.dim()) + [*source.shape]
                if aligned[axis] != tensor.shape[axis]:
                    return None
            entries.append(scaled(call, tensor, aligned=aligned, window=(axis, offset)))
        offset += tensor.shape[axis]
    return entries


@register_use(F.prelu, torch.prelu, Tensor.prelu)
@made_later((1, "weight"))
def _prelu(call: Call, input: Tensor, weight: Tensor) -> list[Entry] | None:
    if call.consumes(input) or (weight.numel() > 1 and input.dim() < 2):
        return None
    aligned = [1] * len(call.shape)
    if weight.numel() > 1:
        aligned[1] = weight.numel()
    x = SavedTensor(input, "prelu")
    return [scaled(call, weight, lambda: x().clamp(max=0), aligned=aligned, linear=True)]
