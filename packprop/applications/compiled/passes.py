"""Ordinary passes that run again and again, and that a trace follows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from packprop.engine.context import backpack
from packprop.engine.memory import Plan
from packprop.engine.passes import Hook, save_of_pass, set_aside
from packprop.engine.recording import extended, record
from packprop.engine.tensors import LossFunction, outputs_and_loss
from packprop.types import Extension

ASKED = "A compiled step was called."


@dataclass(frozen=True)
class Outcome:
    """The results of a pass.

    Args:
        loss: The loss.
        gradients: Gradients by the number of the parameter.
        results: Values of extensions by the number of the parameter and the attribute.
        finished: The modules that the hook was called with, in order.
    """

    loss: Tensor
    gradients: dict[int, Tensor]
    results: dict[tuple[int, str], Any]
    finished: list[nn.Module]


class Pass(Protocol):
    """A pass that a graph can replace."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the pass."""

    @property
    def loss(self) -> LossFunction | None:
        """The loss, a module or a function; ``None`` if the model computes it."""

    @property
    def extensions(self) -> Sequence[Extension]:
        """The extensions of the pass."""

    @property
    def budget(self) -> int | None:
        """The most bytes of tensor storage that may be alive at once, if there is a limit."""

    def run(self, inputs: Any, targets: Any) -> Tensor:
        """Run the pass; return the loss, cut from its graph."""

    def run_apart(self, parameters: Sequence[Tensor], inputs: Any, targets: Any) -> Outcome:
        """Run the pass, and leave everything as if it had not run."""

    def deliver(self, parameters: Sequence[Tensor], outcome: Outcome) -> Tensor:
        """Apply the results of a pass; return the loss."""

    def clear(self, parameters: Sequence[Tensor], outcome: Outcome) -> None:
        """Drop results of the previous pass that this pass replaces."""


@dataclass(frozen=True)
class TrainingPass:
    """The pass of each call of a step: it accumulates gradients, and saves results on parameters.

    Args:
        model: The model.
        loss: Called as ``loss(outputs, targets)``; ``None`` if the model computes it.
        extensions: The extensions of the step.
        hook: The user's extension hook.
        memory: The budget in bytes, or a plan.
    """

    model: nn.Module
    loss: LossFunction | None
    extensions: tuple[Extension, ...]
    hook: Hook | None
    memory: int | Plan | None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the pass."""
        return [each for each in (self.model, self.loss) if isinstance(each, nn.Module)]

    @property
    def budget(self) -> int | None:
        """The most bytes of tensor storage that may be alive at once, if there is a limit."""
        return self.memory.memory if isinstance(self.memory, Plan) else self.memory

    def run(self, inputs: Any, targets: Any) -> Tensor:
        """Run forward and backward pass; return the loss, cut from its graph."""
        return self._run(inputs, targets, self.hook)

    def run_apart(self, parameters: Sequence[Tensor], inputs: Any, targets: Any) -> Outcome:
        """Run the pass, and leave gradients, results and the user's hook as if it had not run."""
        finished: list[nn.Module] = []
        with set_aside(self.extensions, parameters):
            loss = self._run(inputs, targets, finished.append if self.hook is not None else None)
            gradients = {
                n: each.grad for n, each in enumerate(parameters) if each.is_leaf and each.grad is not None
            }
            results = {
                (number, extension.savefield): vars(tensor)[extension.savefield]
                for number, tensor in enumerate(parameters)
                for extension in self.extensions
                if extension.savefield in vars(tensor)
            }
        return Outcome(loss, gradients, results, finished)

    def deliver(self, parameters: Sequence[Tensor], outcome: Outcome) -> Tensor:
        """Put the results of a pass on the parameters, and call the hook."""
        for number, gradient in outcome.gradients.items():
            parameter = parameters[number]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():  # in place, as autograd does it
                    parameter.grad.add_(gradient)
        moment = time.monotonic_ns()
        for (number, name), value in outcome.results.items():
            save_of_pass(parameters[number], name, value, moment)
        if self.hook is not None:
            for module in outcome.finished:
                self.hook(module)
        return outcome.loss

    def clear(self, parameters: Sequence[Tensor], outcome: Outcome) -> None:
        """Remove results that the pass will replace from the parameters."""
        for number, name in outcome.results:
            vars(parameters[number]).pop(name, None)

    def _run(self, inputs: Any, targets: Any, hook: Hook | None) -> Tensor:
        with extended(*self.modules):
            with record():
                _, loss = outputs_and_loss(ASKED, self.model, self.loss, inputs, targets)
            with backpack(*self.extensions, extension_hook=hook, memory=self.memory):
                loss.backward()
        return loss.detach()
