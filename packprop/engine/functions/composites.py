"""Functions of torch that are written in Python and call a loss function."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

COMPOSITES = {getattr(F, "linear_cross_entropy", None)} - {None}  # new in PyTorch 2.13
"""Functions whose body calls a loss function, such as a head with its loss: a linear function and a loss."""


def has_parts(kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of a composite function calls others: a head with ``options`` is one kernel."""
    return kwargs.get("options") is None


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function without its first check, for a mode or a tensor's class that overrides it.

    A mode that overrides the function sees one call, but not the calls in its body. The code is torch's own,
    with the current names of its module, so the results are the same to the last bit.
    """
    assert isinstance(function, FunctionType)
    nobody = dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *_: False)
    names = {**function.__globals__, **nobody}
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body
