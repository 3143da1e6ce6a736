"""What autograd says of one sample at a time.

# NOTE [Loops over samples]
The model is evaluated on one sample at a time, and the loss on the whole batch: the loss's gradient
and Hessian at the model's outputs are cut into samples there, so that nothing needs to be known of
its reduction. What belongs to a sample is pulled back through that sample's own evaluation, entry
by entry, with plain autograd in double precision. That is slow, meant for small models and few
samples, and shares no shortcut with the engine.
"""

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

from packprop.errors import BadInput
from packprop.recording.switch import disable, extend, record
from packprop.tensors.layout import Layout, possible_layouts
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.testing.report import CheckFailed, Ledger

Parts = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]
"""A model, a loss, inputs and targets."""


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Double precision and a fixed random state inside, and no trace of either afterwards."""
    before = torch.get_default_dtype()
    with fixed_random_state(), torch.enable_grad(), warnings.catch_warnings():
        # the cycle that it warns of lies between copies, which live no longer than the check
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


def differentiable(value: Any) -> list[Tensor]:
    """The tensors in a value that require a gradient."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def strided(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients without sparse ones."""
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


@dataclass(frozen=True)
class Problem:
    """A model, a loss and a batch: copies of the user's, in double precision."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    inputs: Any
    targets: Any
    samples: int
    axis: int

    @classmethod
    def of(cls, parts: Parts, axis: int = 0) -> Problem:
        """Copy what the user gave; tensors with samples have them on ``axis``."""
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
        """Some samples of the inputs; tensors that do not hold all samples are passed whole."""
        return _narrowed(self.inputs, self.axis, self.samples, start, stop)

    def batches(self, cut: int) -> list[tuple[Any, Any]] | None:
        """The batch cut in two, if it is plain where to cut it."""
        values = list(tensors_in((self.inputs, self.targets)))
        if self.axis != 0 or any(t.dim() == 0 or t.shape[0] != self.samples for t in values):
            return None
        both = (self.inputs, self.targets)
        spans = ((0, cut), (cut, self.samples))
        return [_narrowed(both, 0, self.samples, start, stop) for start, stop in spans]

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """The loss and the model's outputs, recorded in the ways that users record them."""
        extend(self.model)
        own = isinstance(self.loss, nn.Module)
        if isinstance(self.loss, nn.Module):
            extend(self.loss)
        with contextlib.nullcontext() if own else record():
            outputs = call(self.model, self.inputs)
            value = self.loss(outputs, self.targets)
        return value, differentiable(outputs)


def _widened(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().double() if t.is_floating_point() else t, value)


def _narrowed(value: Any, axis: int, samples: int, start: int, stop: int) -> Any:
    def narrow(tensor: Tensor) -> Tensor:
        held = tensor.dim() > axis and tensor.shape[axis] == samples
        return tensor.narrow(axis, start, stop - start) if held else tensor

    return map_tensors(narrow, value)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on a tensor, or on a tuple or dictionary of arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def places(asked: str, wholes: Sequence[Tensor], singles: Sequence[Sequence[Tensor]]) -> list[Layout]:
    """Where outputs of the whole batch hold the outputs of single samples, by their values.

    Raises:
        CheckFailed: If an output of the batch holds other values than those of the samples alone.
    """
    found = []
    for index, whole in enumerate(wholes):
        own = [single[index].detach().flatten() for single in singles]
        place = next((way for way in possible_layouts(whole.shape, len(own)) if _holds(whole, way, own)), None)
        if place is None:
            raise CheckFailed(
                f"{asked}: outputs were compared.",
                f"output {index}, of shape {list(whole.shape)}",
                "a sample alone gives another output than in the batch: samples are mixed, or "
                "random numbers are drawn",
                "keep the samples apart; call eval() on layers that behave otherwise in training",
                float("inf"),
            )
        found.append(place)
    return found


def _holds(whole: Tensor, way: Layout, singles: Sequence[Tensor]) -> bool:
    front = way.to_front(whole.detach())
    return all(
        part.numel() == single.numel() and torch.allclose(part.flatten(), single, 1e-8, 1e-10)
        for part, single in zip(front, singles, strict=True)
    )


class Loops:
    """Quantities of single samples; see NOTE [Loops over samples].

    Args:
        problem: What they are taken of.
        ledger: Whose subject errors name.
        create_graph: Whether results shall be differentiable.
    """

    def __init__(self, problem: Problem, ledger: Ledger, create_graph: bool = False) -> None:
        names, self.leaves = list(problem.parameters), list(problem.parameters.values())
        self.names, self.subject, self.create_graph = names, ledger.subject, create_graph
        with disable():
            outputs = call(problem.model, problem.inputs)
            self.outputs = differentiable(outputs)
            loss = problem.loss(outputs, problem.targets)
            samples = range(problem.samples)
            self.singles = [differentiable(call(problem.model, problem.take(n, n + 1))) for n in samples]
        if loss.numel() != 1:
            raise BadInput(
                f"{ledger.subject} was asked for.",
                f"the loss, of shape {list(loss.shape)}",
                "it is not one number",
                "give a loss that reduces by mean or sum",
            )
        self.places = places(ledger.subject, self.outputs, self.singles)
        self.slopes = torch.autograd.grad(
            loss.sum(), self.outputs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        whole = torch.autograd.grad(loss.sum(), self.leaves, retain_graph=True, allow_unused=True)
        reached = {name: g for name, g in zip(names, whole, strict=True) if g is not None}
        self.gradient = dict(zip(reached, strided(list(reached.values())), strict=True))
        """Of the loss, in the parameters that it depends on ``[*p]``."""

    @property
    def used(self) -> list[str]:
        """Parameters that the loss depends on."""
        return list(self.gradient)

    def by_sample(self, tensors: Sequence[Tensor], skip: int = 0) -> Tensor:
        """Tensors like the outputs side by side, ``[*skipped, n, c]``."""
        fronts = [p.to_front(t, skip) for p, t in zip(self.places, tensors, strict=True)]
        return torch.cat([f.reshape(*f.shape[: skip + 1], -1) for f in fronts], skip + 1)

    def pull(self, sample: int, vector: Tensor) -> list[Tensor]:
        """One vector-Jacobian product ``[c] -> [*p]`` through the evaluation of one sample."""
        single = self.singles[sample]
        pieces = vector.split([output.numel() for output in single])
        gradients = torch.autograd.grad(
            single,
            self.leaves,
            [piece.reshape(output.shape) for piece, output in zip(pieces, single, strict=True)],
            retain_graph=True,
            create_graph=self.create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        return strided(gradients)

    def pulled(self, columns: Tensor) -> dict[str, Tensor]:
        """Columns at the outputs ``[v, n, c]`` -> gradients of single samples ``[v, n, *p]``."""
        pulled = [self.pull(n, v[n]) for v in columns for n in range(len(self.singles))]
        return {
            name: torch.stack(pieces).unflatten(0, columns.shape[:2])
            for name, pieces in zip(self.names, zip(*pulled, strict=True), strict=True)
        }

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Gradients of single samples ``[n, *p]``."""
        slopes = self.by_sample(self.slopes)[None]
        return {name: gradients[0] for name, gradients in self.pulled(slopes).items()}

    @cached_property
    def jacobians(self) -> list[dict[str, Tensor]]:
        """Of each sample's outputs ``[c, p]``, by parameter."""
        found = []
        for n, single in enumerate(self.singles):
            unit = torch.eye(sum(output.numel() for output in single)).to(single[0])
            pulled = [[g.flatten() for g in self.pull(n, row)] for row in unit]
            stacked = map(torch.stack, zip(*pulled, strict=True))
            found.append(dict(zip(self.names, stacked, strict=True)))
        return found

    @cached_property
    def hessians(self) -> Tensor:
        """Of the loss in each sample's outputs, ``[n, c, c]``."""
        slopes = self.by_sample(self.slopes)
        samples, entries = slopes.shape
        whole = slopes.new_zeros(samples, entries, samples, entries)
        if not slopes.requires_grad:
            return whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        rows = [
            self.by_sample(
                torch.autograd.grad(
                    slope,
                    self.outputs,
                    retain_graph=True,
                    create_graph=self.create_graph,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
            for slope in slopes.flatten()
        ]
        whole = torch.stack(rows).unflatten(0, (samples, entries))
        own: Tensor = whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        between = whole.detach().clone()
        between.diagonal(dim1=0, dim2=2).zero_()
        if between.abs().amax() > 1e-8 * own.detach().abs().amax():
            raise CheckFailed(
                f"{self.subject}: the Hessian of the loss was computed.",
                "the loss",
                "it couples the outputs of different samples",
                "use a loss that is a sum or mean of one term for each sample",
                float("inf"),
            )
        return own

    def diagonal(self, name: str) -> Tensor:
        """Of each sample's GGN, ``[n, p]``."""
        pairs = zip(self.jacobians, self.hessians, strict=True)
        return torch.stack([((h @ j[name]) * j[name]).sum(0) for j, h in pairs])

    def products(self, name: str, vectors: Tensor) -> Tensor:
        """Each sample's GGN block times some vectors ``[p, k]``: ``[n, p, k]``."""
        pairs = zip(self.jacobians, self.hessians, strict=True)
        return torch.stack([j[name].T @ (h @ (j[name] @ vectors)) for j, h in pairs])
