"""The problem of a check: a model, a loss and a batch, copied in double precision."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.recording import extend, record
from packprop.engine.tensors import call, map_tensors, tensors_in
from packprop.errors import BadInput

Parts = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]
"""A model, a loss, inputs and targets."""


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Set double precision and a fixed random state inside; restore both afterwards."""
    before = torch.get_default_dtype()
    with fixed_random_state(), torch.enable_grad(), warnings.catch_warnings():
        # it warns of a cycle between parameters and gradients: these are copies, which die with the check
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def fixed_random_state(seed: int = 0) -> Iterator[None]:
    """Draw the same numbers whenever it is entered, and leave the random state alone."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Problem:
    """A model, a loss and a batch: copies of the user's, in double precision.

    Args:
        model: The model.
        loss: Maps the model's outputs and the targets to one number.
        inputs: The model's inputs.
        targets: The loss's arguments beside the outputs.
        samples: Number of samples in the batch.
        axis: The axis of the samples.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Any
    samples: int
    axis: int

    @classmethod
    def of(cls, parts: Parts, axis: int = 0) -> Problem:
        """Copy the user's arguments; ``axis`` is the axis of the samples."""
        model, loss, inputs, targets = parts
        # tensors that a hook computes before each call (old weight_norm, pruning) refuse to be copied
        computed = {
            id(value): value.detach().clone()
            for module in model.modules()
            for value in vars(module).values()
            if isinstance(value, Tensor) and not value.is_leaf
        }
        model = copy.deepcopy(model, computed).double()
        model.zero_grad()
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).double()
        sizes = [tensor.shape[axis] for tensor in tensors_in(inputs) if tensor.dim() > axis]
        if not sizes or sizes[0] == 0:
            raise BadInput(
                "A check of a model was asked for.",
                f"inputs of type {type(inputs).__name__}",
                f"they hold no tensor with samples on axis {axis}",
                "give a tensor, or a tuple or dictionary of arguments, with at least one sample",
            )
        return cls(model, loss, _widened(inputs), _widened(targets), sizes[0], axis)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters, each once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def take(self, start: int, stop: int) -> Any:
        """Return some samples of the inputs; pass tensors that do not hold all samples whole."""
        return _narrowed(self.inputs, self.axis, self.samples, start, stop)

    def batches(self, cut: int) -> list[tuple[Any, Any]] | None:
        """Cut the batch in two, if all tensors hold the samples on axis 0."""
        values = list(tensors_in((self.inputs, self.targets)))
        if self.axis != 0 or any(t.dim() == 0 or t.shape[0] != self.samples for t in values):
            return None
        both = (self.inputs, self.targets)
        spans = ((0, cut), (cut, self.samples))
        return [_narrowed(both, 0, self.samples, start, stop) for start, stop in spans]

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the model's outputs, recorded as users record them."""
        extend(self.model)
        is_module = isinstance(self.loss, nn.Module)
        if isinstance(self.loss, nn.Module):
            extend(self.loss)
        with contextlib.nullcontext() if is_module else record():
            outputs = call(self.model, self.inputs)
            value = self.loss(outputs, self.targets)
        return value, differentiable(outputs)


def _widened(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().double() if t.is_floating_point() else t, value)


def _narrowed(value: Any, axis: int, samples: int, start: int, stop: int) -> Any:
    def narrow(tensor: Tensor) -> Tensor:
        holds_samples = tensor.dim() > axis and tensor.shape[axis] == samples
        return tensor.narrow(axis, start, stop - start) if holds_samples else tensor

    return map_tensors(narrow, value)


def differentiable(value: Any) -> list[Tensor]:
    """Return the tensors in a value that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
