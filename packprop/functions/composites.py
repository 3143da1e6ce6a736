"""Functions of torch that are written in Python, and that call a loss function."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

COMPOSITES: frozenset[Callable[..., Any]] = frozenset(
    getattr(F, name)
    for name in ("linear_cross_entropy",)  # new in PyTorch 2.13
    if hasattr(F, name)
)
"""Functions whose body calls a loss function: a head with its loss is a linear function and a loss."""


def has_parts(kwargs: dict[str, Any]) -> bool:
    """Whether a call of a composite function will call others: a head with ``options`` is one kernel."""
    return kwargs.get("options") is None


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without its first question, whether a mode or a tensor's class takes the call over.

    A mode that takes it over sees one call, and none of those in the body. The code is torch's own, with the
    names that it finds in its module now: so what is computed is the same to the last bit.
    """
    assert isinstance(function, FunctionType)
    nobody = dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *_: False)
    names = {**function.__globals__, **nobody}
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body
