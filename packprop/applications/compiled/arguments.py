"""Checks of the arguments of ``packprop.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from packprop.errors import BadInput
from packprop.types import Extension

ASKED_FOR = "packprop.compile(...) was called."


def require_callable(model: Any, loss: Any, hook: Any) -> None:
    """Refuse a model that is no module, a loss or a hook that cannot be called.

    Raises:
        BadInput: With the first of them.
    """
    if not isinstance(model, nn.Module):
        what = f"class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise BadInput(
            ASKED_FOR,
            f"model of type {what}",
            "it is not an instance of torch.nn.Module",
            "pass a module; for other functions use backpack(...) around loss.backward()",
        )
    for name, value in (("loss", loss), ("extension_hook", hook)):
        if value is not None and (not callable(value) or isinstance(value, type)):
            raise BadInput(
                ASKED_FOR,
                f"{name} of type {type(value).__name__}",
                "it cannot be called on a batch" if name == "loss" else "it cannot be called",
                "pass a loss of outputs and targets (nn.CrossEntropyLoss()), or None if the model returns it"
                if name == "loss"
                else "give a function of one module",
            )


def require_finished(extensions: Sequence[Extension]) -> None:
    """Refuse extensions with values that are used after the pass.

    Raises:
        BadInput: With the first of them.
    """
    for extension in extensions:
        if extension.keeps_graph:
            raise BadInput(
                ASKED_FOR,
                f"extension {extension.name}",
                "its values are functions that hold the graph of a forward pass, and a replay has none",
                "use `with packprop.backpack(...)` around loss.backward(), or packprop.products",
            )
