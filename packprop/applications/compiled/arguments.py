"""Checks of the arguments of ``packprop.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packprop.engine.tensors import require_loss, require_model
from packprop.errors import BadInput
from packprop.types import Extension

ASKED_FOR = "packprop.compile(...) was called."


def require_callable(model: Any, loss: Any, hook: Any) -> None:
    """Refuse a model that is no module, a loss or a hook that cannot be called.

    Raises:
        BadInput: With the first of them.
    """
    require_model(ASKED_FOR, model)
    require_loss(ASKED_FOR, loss)
    if hook is not None and (not callable(hook) or isinstance(hook, type)):
        where, instead = f"extension_hook of type {type(hook).__name__}", "give a function of one module"
        raise BadInput(ASKED_FOR, where, "it cannot be called", instead)


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
