"""Steps to plan, and copies of models without their data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.memory.mesh import Mesh
from packprop.engine.tensors.dry import TensorSpec
from packprop.engine.tensors.nesting import map_instances, tensors_in
from packprop.types import Extension

Forward = Callable[[nn.Module, Callable[[Any], Any]], Tensor]
"""Computes the loss, given a copy of the model and a function that turns ``TensorSpec`` into tensors.

Shapes that depend on the number of samples go through the function, too."""


@dataclass(frozen=True)
class PlannedStep:
    """One step of a training loop, for planning.

    Args:
        model: The model, which is copied without its data.
        forward: Computes the loss from the copy.
        extensions: The extensions of the step.
        device: The device of the step.
        gradients: Says that the step also computes ``.grad``.
        freed: Says that an extension hook takes the values of each parameter away as soon as they are there.
        accumulated: Says that ``.grad`` of an earlier pass is there when the step begins.
        mesh: The mesh that shards the model, if there is one.
    """

    model: nn.Module
    forward: Forward
    extensions: tuple[Extension, ...]
    device: torch.device
    gradients: bool
    freed: bool = False
    accumulated: bool = False
    mesh: Mesh | None = None

    def of_fewer(self, samples: int, number: int) -> PlannedStep:
        """Return the step for ``number`` of ``samples`` samples, which lie on the leading axes of its inputs.

        An axis may also hold as many positions of each sample, as in a loss over all tokens.
        """

        def fewer(shape: torch.Size) -> torch.Size:
            positions, rest = divmod(shape[0], samples) if shape else (0, 0)
            return torch.Size((positions * number, *shape[1:])) if positions and not rest else shape

        def made(value: Any) -> Any:
            if isinstance(value, torch.Size):
                return fewer(value)
            return map_instances(TensorSpec, lambda spec: spec._replace(shape=fewer(spec.shape)), value)

        def forward(model: nn.Module, fake: Callable[[Any], Any]) -> Tensor:
            return self.forward(model, lambda value: fake(made(value)))

        return replace(self, forward=forward)


def copy_without_data(model: nn.Module, fake: Callable[[Any], Any]) -> nn.Module:
    """Return a copy of a module whose tensors have no data."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in tensors_in(list(vars(module).values())):
            made = fake(TensorSpec.of(tensor))
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if parameter else made
    return copy.deepcopy(model, memo)
