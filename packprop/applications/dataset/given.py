"""Checks of the model and the loss of a call, before anything runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from packprop.applications.dataset.batches import described
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
    if not isinstance(model, nn.Module):
        raise BadInput(asked, f"model, {described(model)}", "it is not a torch.nn.Module", _instance_of(model))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(
            asked,
            f"model, {described(model)}",
            "none of its parameters requires gradients",
            f"set requires_grad=True on those that shall be {wanted}",
        )
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        raise BadInput(
            asked,
            f"loss, {described(loss)}",
            "it is not a function of outputs and targets",
            _instance_of(loss),
        )


def _instance_of(value: Any) -> str:
    if isinstance(value, type):
        return f"give an instance, {value.__name__}(...)"
    return "give a module such as torch.nn.Linear(3, 2) or torch.nn.CrossEntropyLoss()"
