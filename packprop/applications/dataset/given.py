"""Checks of the model and the loss of a call, before anything runs."""

from __future__ import annotations

from typing import Any

from packprop.engine.tensors import require_loss, require_model
from packprop.errors import BadInput


def require_model_and_loss(asked: str, model: Any, loss: Any, wanted: str) -> None:
    """Refuse anything that is no model with trained parameters, or no loss.

    Args:
        asked: The call of the user, for messages.
        model: The argument ``model``.
        loss: The argument ``loss``; ``None`` if the model computes it.
        wanted: The purpose of trained parameters, as a participle: ``"profiled"``.

    Raises:
        BadInput: With the first fault.
    """
    require_model(asked, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(
            asked,
            f"model, {type(model).__name__}",
            "none of its parameters requires gradients",
            f"set requires_grad=True on those that shall be {wanted}",
        )
    require_loss(asked, loss)
