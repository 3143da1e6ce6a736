"""The problem of a check: a model, a loss and a batch, copied in double precision."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.recording import put_hooks, record
from packprop.engine.tensors import (
    apart,
    class_words,
    map_tensors,
    outputs_and_loss,
    require_graphs,
    tensors_in,
    together,
)
from packprop.errors import BadInput

Parts = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]
"""A model, a loss, inputs and targets."""


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Set double precision and a fixed random state inside; restore both afterwards."""
    require_graphs("A check was asked for.")
    before = torch.get_default_dtype()
    with fixed_random_state(), torch.enable_grad(), warnings.catch_warnings():
        # PyTorch warns of a cycle of parameters and gradients: these are copies, which die with the check
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def fixed_random_state(seed: int = 0) -> Iterator[None]:
    """Start from the same random state each time that this context is entered, and restore yours afterwards."""
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
        singles: The inputs of each sample alone; empty if the samples are rows of ``inputs``.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Any
    samples: int
    axis: int
    singles: Sequence[Any] = ()

    @classmethod
    def of(cls, parts: Parts, axis: int = 0, singles: Sequence[Any] = ()) -> Problem:
        """Copy the user's arguments; ``axis`` holds the samples of ``inputs`` unless ``singles`` are given."""
        model, loss = parts[:2]
        inputs, targets = _widened(parts[2:])
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
        samples = len(singles) or next(iter(sizes), 0)
        if not samples:
            raise BadInput(
                "A check of a model was asked for.",
                f"inputs of type {class_words(together(inputs))}",
                f"they hold no tensor with samples on axis {axis}",
                "give a tensor, or a tuple or dictionary of arguments, with at least one sample; or the inputs "
                "of each sample alone as singles=[...]",
            )
        return cls(model, loss, inputs, targets, samples, axis, [*map(_widened, singles)])

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters by name, each once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def take(self, start: int, stop: int) -> Any:
        """Return some samples of the inputs; tensors that do not hold all samples stay whole."""
        if self.singles and stop == start + 1:
            return self.singles[start]
        return _narrowed(self.inputs, self.axis, self.samples, start, stop)

    def batches(self, cut: int) -> list[tuple[Any, Any]] | None:
        """Cut the batch in two; return ``None`` if a tensor does not hold the samples on axis 0."""
        values = list(tensors_in((self.inputs, self.targets)))
        if self.singles or self.axis != 0 or any(t.dim() == 0 or t.shape[0] != self.samples for t in values):
            return None
        both = (self.inputs, self.targets)
        spans = ((0, cut), (cut, self.samples))
        return [_narrowed(both, 0, self.samples, start, stop) for start, stop in spans]

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the outputs that require a gradient, recorded as by ``extend`` or ``record``."""
        put_hooks(self.model)
        is_module = isinstance(self.loss, nn.Module)
        if isinstance(self.loss, nn.Module):
            put_hooks(self.loss)
        with contextlib.nullcontext() if is_module else record():
            outputs, value = self.outputs_and_loss()
        return value, differentiable(outputs)

    def outputs_and_loss(self) -> tuple[Any, Tensor]:
        """Return the model's outputs and their loss."""
        asked = "A check of a model was asked for."
        return outputs_and_loss(asked, self.model, self.loss, self.inputs, self.targets)


def _widened(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().double() if t.is_floating_point() else t, apart(value))


def _narrowed(value: Any, axis: int, samples: int, start: int, stop: int) -> Any:
    def narrow(tensor: Tensor) -> Tensor:
        holds_samples = tensor.dim() > axis and tensor.shape[axis] == samples
        return tensor.narrow(axis, start, stop - start) if holds_samples else tensor

    return map_tensors(narrow, value)


def differentiable(value: Any) -> list[Tensor]:
    """Return the tensors in a value that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
