"""Calls that read values of tensors; the tracer does not see some of them, since they are no operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from packprop.engine.tensors import tensors_in


class ReadsValue(Exception):
    """Raised in a trace where Python, or another library, reads a value that a replay computes anew."""


OF_TENSORS = frozenset(
    getattr(Tensor, name)
    for name in (
        *("tolist", "numpy", "__array__", "__dlpack__", "item", "apply_", "map_"),
        *("__bool__", "__int__", "__index__", "__float__", "__complex__"),
    )
)
"""Methods that read the tensor they belong to."""

OF_PLACES = frozenset({torch.tensor_split, Tensor.tensor_split})
"""Functions that read the tensor of places at which they split."""

OF_LISTS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
"""Functions that read the tensors in a list of numbers."""


def values_read(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors whose values a call reads."""
    if function in OF_TENSORS:
        yield from tensors_in(args[:1])
    elif function in OF_PLACES:
        yield from tensors_in((args[1:], kwargs.get("tensor_indices_or_sections")))
    elif function in OF_LISTS:
        yield from tensors_in([each for each in (*args, *kwargs.values()) if not isinstance(each, Tensor)])


class Calls(TorchFunctionMode):
    """Shows each call of a PyTorch function, before it runs.

    Args:
        show: Called with each function and its arguments.
    """

    def __init__(self, show: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self._show = show

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._show(func, args, kwargs)
        return func(*args, **kwargs)
