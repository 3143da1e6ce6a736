"""The model and the loss of a call: checked before anything runs, then one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.sharded import require_whole_parameters
from packprop.engine.tensors import LossFunction, named_parameters, require_graphs, require_loss, require_model
from packprop.errors import BadInput


@dataclass(frozen=True, eq=False)
class Objective:
    """The model and the loss of a call, and the device of its batches.

    Args:
        asked: The call of the user, for messages.
        model: The model, which is extended while batches go through it.
        loss: Called as ``loss(outputs, targets)``; ``None`` if the model computes it.
        device: The device of batches.
    """

    asked: str
    model: nn.Module
    loss: LossFunction | None
    device: torch.device | str

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are called."""
        return [each for each in (self.model, self.loss) if isinstance(each, nn.Module)]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require gradients, by name."""
        return {name: p for name, p in named_parameters(self.model) if p.requires_grad}

    def batches(self, data: Any, batch_size: int | None) -> Batches:
        """Return the batches of data of any form."""
        return Batches(self.asked, data, batch_size, whole=self.loss is None)


def objective_of(asked: str, model: Any, loss: Any, device: torch.device | str | None) -> Objective:
    """Return the model and the loss of a call that multiplies gradients of whole parameters.

    Raises:
        BadInput: If the model is no module with trained parameters, or has parameters that are divided between
            processes; if the loss cannot be called.
    """
    require_graphs(asked)
    require_model_and_loss(asked, model, loss, "multiplied")
    require_whole_parameters(asked, model)
    return Objective(asked, model, loss, device_of(model, device))


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device | str:
    """Return the device of batches: the given one, or that of the model's parameters."""
    return device or next((p.device for p in model.parameters()), torch.device("cpu"))


def require_model_and_loss(asked: str, model: Any, loss: Any, wanted: str) -> None:
    """Refuse a model that is no module with trained parameters, and a loss that cannot be called.

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
            f"set requires_grad=True on the parameters to be {wanted}",
        )
    require_loss(asked, loss)
