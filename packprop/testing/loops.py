"""Autograd's values for one sample at a time.

# NOTE [Loops over samples]
These loops evaluate the model on one sample at a time, and the loss on the whole batch. They cut the loss's
gradient and Hessian at the model's outputs into samples, so they need not know its reduction. They pull each
sample's part back through that sample's own evaluation, entry by entry, with plain autograd in double
precision. That is slow, meant for small models and few samples, and shares no shortcut with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from packprop.engine.recording import disable
from packprop.engine.tensors import Layout, call, possible_layouts
from packprop.errors import BadInput
from packprop.testing.problem import Problem, differentiable
from packprop.testing.report import CheckFailed, Ledger


def layouts_of(asked: str, wholes: Sequence[Tensor], singles: Sequence[Sequence[Tensor]]) -> list[Layout]:
    """Find where outputs of the whole batch hold the outputs of single samples, by their values.

    Raises:
        CheckFailed: If an output of the batch differs from the outputs of the samples alone.
    """
    layouts = []
    for index, whole in enumerate(wholes):
        parts = [single[index].detach().flatten() for single in singles]
        candidates = possible_layouts(whole.shape, len(parts))
        layout = next((candidate for candidate in candidates if _holds(whole, candidate, parts)), None)
        if layout is None:
            raise CheckFailed(
                f"{asked}: outputs were compared.",
                f"output {index}, of shape {list(whole.shape)}",
                "a sample alone gives another output than in the batch: samples are mixed, or "
                "random numbers are drawn",
                "keep the samples apart; call eval() on layers that behave otherwise in training; if a tensor "
                "that holds no samples has as many rows as there are samples, give check_model singles=[...]",
            )
        layouts.append(layout)
    return layouts


def _holds(whole: Tensor, layout: Layout, singles: Sequence[Tensor]) -> bool:
    front = layout.to_front(whole.detach())
    return all(
        part.numel() == single.numel() and torch.allclose(part.flatten(), single, 1e-8, 1e-10)
        for part, single in zip(front, singles, strict=True)
    )


class Loops:
    """Quantities of single samples; see NOTE [Loops over samples].

    Args:
        problem: The model, loss and batch.
        ledger: The ledger whose subject errors name.
        create_graph: Make results differentiable.
    """

    def __init__(self, problem: Problem, ledger: Ledger, create_graph: bool = False) -> None:
        names, self.leaves = list(problem.parameters), list(problem.parameters.values())
        self.names, self.subject, self.create_graph = names, ledger.subject, create_graph
        with disable():
            outputs, loss = problem.outputs_and_loss()
            self.outputs = differentiable(outputs)
            samples = range(problem.samples)
            self.singles = [differentiable(call(problem.model, problem.take(n, n + 1))) for n in samples]
        if loss.numel() != 1:
            raise BadInput(
                f"{ledger.subject} was asked for.",
                f"the loss, of shape {list(loss.shape)}",
                "it is not one number",
                "give a loss that reduces by mean or sum",
            )
        self.layouts = layouts_of(ledger.subject, self.outputs, self.singles)
        self.slopes = gradients_in(self.outputs, [loss.sum()], create_graph=True)
        whole = torch.autograd.grad(loss.sum(), self.leaves, retain_graph=True, allow_unused=True)
        reached = {name: g for name, g in zip(names, whole, strict=True) if g is not None}
        self.gradient = dict(zip(reached, strided(list(reached.values())), strict=True))
        """The gradient of the loss in the parameters that it depends on ``[*p]``."""

    @property
    def used(self) -> list[str]:
        """Parameters that the loss depends on."""
        return list(self.gradient)

    def by_sample(self, tensors: Sequence[Tensor], skip: int = 0) -> Tensor:
        """Flatten tensors shaped like the outputs, and join them for each sample: ``[*skipped, n, c]``."""
        pairs = zip(self.layouts, tensors, strict=True)
        fronts = [layout.to_front(tensor, skip) for layout, tensor in pairs]
        return torch.cat([front.reshape(*front.shape[: skip + 1], -1) for front in fronts], skip + 1)

    def pull(self, sample: int, vector: Tensor) -> list[Tensor]:
        """Compute one vector-Jacobian product ``[c] -> [*p]`` through the evaluation of one sample."""
        single = self.singles[sample]
        pieces = vector.split([output.numel() for output in single])
        seeds = [piece.reshape(output.shape) for piece, output in zip(pieces, single, strict=True)]
        return gradients_in(self.leaves, single, seeds, self.create_graph)

    def pulled(self, columns: Tensor) -> dict[str, Tensor]:
        """Map columns at the outputs ``[v, n, c]`` to gradients of single samples ``[v, n, *p]``."""
        pulled = [self.pull(n, v[n]) for v in columns for n in range(len(self.singles))]
        return {
            name: torch.stack(pieces).unflatten(0, columns.shape[:2])
            for name, pieces in zip(self.names, zip(*pulled, strict=True), strict=True)
        }

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Return gradients of single samples ``[n, *p]``."""
        slopes = self.by_sample(self.slopes)[None]
        return {name: gradients[0] for name, gradients in self.pulled(slopes).items()}

    @cached_property
    def jacobians(self) -> list[dict[str, Tensor]]:
        """Return Jacobians of each sample's outputs ``[c, p]``, by parameter."""
        jacobians = []
        for n, single in enumerate(self.singles):
            entries = sum(output.numel() for output in single)
            unit = torch.eye(entries, dtype=single[0].dtype, device=single[0].device)
            pulled = [[g.flatten() for g in self.pull(n, row)] for row in unit]
            stacked = map(torch.stack, zip(*pulled, strict=True))
            jacobians.append(dict(zip(self.names, stacked, strict=True)))
        return jacobians

    @cached_property
    def hessians(self) -> Tensor:
        """Return Hessians of the loss in each sample's outputs, ``[n, c, c]``."""
        slopes = self.by_sample(self.slopes)
        samples, entries = slopes.shape
        whole = slopes.new_zeros(samples, entries, samples, entries)
        if not slopes.requires_grad:
            return whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        rows = [
            self.by_sample(gradients_in(self.outputs, [slope], create_graph=self.create_graph))
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
            )
        return own

    def diagonal(self, name: str) -> Tensor:
        """Return the diagonal of each sample's GGN, ``[n, p]``."""
        pairs = zip(self.jacobians, self.hessians, strict=True)
        return torch.stack([((h @ j[name]) * j[name]).sum(0) for j, h in pairs])

    def products(self, name: str, vectors: Tensor) -> Tensor:
        """Multiply each sample's GGN block by some vectors ``[p, k]``: ``[n, p, k]``."""
        pairs = zip(self.jacobians, self.hessians, strict=True)
        return torch.stack([j[name].T @ (h @ (j[name] @ vectors)) for j, h in pairs])


def gradients_in(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> list[Tensor]:
    """Return ``J^T u`` for seeds u at the outputs (default: 1); zeros for inputs that no output depends on."""
    gradients = torch.autograd.grad(
        outputs,
        inputs,
        seeds,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return strided(gradients)


def strided(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, the sparse ones made dense."""
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
