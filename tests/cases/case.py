"""What a case is: a small model, a loss and N samples, and how one sample is cut out.

`Case.problem` turns it into the one-sample functions that the oracle works on. Nothing here knows packprop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.references.oracle import Problem
from tests.seeding import DEVICE, seed

Data = Callable[[int], tuple[Any, Any]]
Take = Callable[[Any, int], Any]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples and dictionaries."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {k: map_tensors(function, v) for k, v in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tensors(function, v) for v in tree)
    return tree


def along(axis: int) -> Take:
    """Cut sample n out of an axis, keeping the axis with length 1."""
    return lambda tree, n: map_tensors(lambda t: t.narrow(axis, n, 1), tree)


_LEADING = along(0)


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments or a dictionary of keyword arguments."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


class Functional:
    """A loss function with its options, called like a loss module."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        self.function, self.options, self.reduction = function, options, "mean"

    def __call__(self, output: Tensor, *target: Tensor) -> Tensor:
        return self.function(output, *target, reduction=self.reduction, **self.options)


def loss_parts(loss: Any) -> Iterator[Any]:
    """Every part of a loss that has a reduction of its own."""
    parts = loss.modules() if isinstance(loss, nn.Module) else [loss]
    return (part for part in parts if hasattr(part, "reduction"))


@dataclass(frozen=True)
class Case:
    """A model, a loss and data, and how samples are told apart.

    Attributes:
        name: unique; the test id.
        model: builds the model; called under a fixed seed.
        loss: builds the loss module (or `Functional`); its ``reduction`` is set afterwards.
        data: ``N -> (inputs, targets)``.
        sizes: the numbers of samples to test.
        order: 2 where curvature is defined, 1 where only gradients are.
        reductions: the reductions to test; ``None`` leaves the loss as it was built.
        output: ``(model, inputs) -> what the loss function receives``.
        score: ``(loss, output, targets) -> the whole loss``.
        total: ``(model, loss, inputs, targets) -> the whole loss`` where a user writes something
            else than ``score(loss, output(model, inputs), targets)``.
        term: ``(loss, f_n, targets, n) -> the share of sample n`` where a sum over the sample
            divided by the whole batch's divisor is not it.
        take_input: cuts sample n out of the inputs.
        take_target: cuts sample n out of the targets.
        record: the loss is a function, so the whole computation runs inside ``packprop.record()``.
        columns: whether a sample's loss input has as many columns as it has entries.
        dense: weights of linear layers that no sample goes into: they have no Kronecker factors.
        refuses: text parts of the error that is right instead of numbers, for every extension.
        refuses_curvature: the same, for second order extensions alone.
        tags: further groups that tests select by.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[], Any]
    data: Data
    sizes: tuple[int, ...] = (1, 3)
    order: int = 2
    reductions: tuple[str | None, ...] = ("mean", "sum")
    output: Callable[[nn.Module, Any], Tensor] = call
    score: Callable[[Any, Tensor, Any], Tensor] = lambda loss, output, target: loss(output, target)
    total: Callable[[nn.Module, Any, Any, Any], Tensor] | None = None
    term: Callable[[Any, Tensor, Any, int], Tensor] | None = None
    take_input: Take = _LEADING
    take_target: Take = _LEADING
    record: bool = False
    columns: bool = True
    dense: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    refuses_curvature: tuple[str, ...] = ()
    tags: frozenset[str] = field(default_factory=frozenset)

    def whole(self, model: nn.Module, loss: Any, inputs: Any, targets: Any) -> Tensor:
        """The whole loss, as a user writes it."""
        if self.total is not None:
            return self.total(model, loss, inputs, targets)
        return self.score(loss, self.output(model, inputs), targets)

    def problem(
        self,
        size: int,
        reduction: str | None = "mean",
        dtype: torch.dtype = torch.float64,
        device: torch.device = DEVICE,
    ) -> Problem:
        """Build everything afresh: the same numbers every time, rounded to ``dtype``, on ``device``."""
        with torch.random.fork_rng(devices=[]):
            seed(0)
            model = randomised(self.model().double().eval()).to(device, dtype)
            if device.type == "cuda":  # cuDNN's recurrent layers have a backward pass in training mode alone
                for layer in model.modules():
                    layer.train(isinstance(layer, nn.RNNBase))
            loss = self.loss()
            if isinstance(loss, nn.Module):
                loss = loss.double().to(device, dtype)
            elif isinstance(loss, Functional):
                loss.options = map_tensors(lambda t: t.to(device), loss.options)
            inputs, targets = map_tensors(
                lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype),
                _in_double(self.data, size),
            )
        if reduction is not None:
            for part in loss_parts(loss):
                part.reduction = reduction
        summed = copy.deepcopy(loss)
        for part in loss_parts(summed):
            part.reduction = "sum"

        def total() -> Tensor:
            return self.whole(model, loss, inputs, targets)

        def output(n: int) -> Tensor:
            return self.output(model, self.take_input(inputs, n))

        def share(f: Tensor, n: int) -> Tensor:
            if self.term is not None:
                return self.term(loss, f, targets, n)
            return self.score(summed, f, self.take_target(targets, n)) / divisor

        divisor = torch.ones((), dtype=dtype, device=device)
        if self.term is None and reduction == "mean":
            with torch.no_grad():
                f = self.output(model, inputs)
                divisor = self.score(summed, f, targets) / self.score(loss, f, targets)
        return Problem(model, loss, inputs, targets, size, total, output, share)


def _in_double(data: Data, size: int) -> tuple[Any, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        return data(size)
    finally:
        torch.set_default_dtype(torch.float32)


def randomised(model: nn.Module) -> nn.Module:
    """Move every parameter and running statistic off its special initial value (ones, zeros)."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model
