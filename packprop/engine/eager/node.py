"""The node that stands for a branch in the graph, and passes on its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.engine.eager.choices import ASKED, Hook, bad
from packprop.engine.eager.pieces import Job, freed
from packprop.engine.eager.reach import key_of, tensors_of
from packprop.engine.eager.sweep import Sweep
from packprop.engine.recording.marks import graph_is_kept
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.hooks import undisturbed
from packprop.engine.tensors.random import random_numbers_from, random_states
from packprop.engine.tensors.state import version
from packprop.errors import PackpropError


def attach(job: Job, leaves: list[Tensor]) -> Tensor:
    """Return the value of a job, with a node that holds the gradient if anything requires one."""
    choices = job.choices
    may_recompute = choices["keep"] == "recompute" or choices["memory"] is not None
    random = random_states({leaf.device for leaf in leaves}) if may_recompute else {}
    constants = _constants(job) if may_recompute else []
    sweep = Sweep(job, leaves)
    value = sweep.run()
    shared = [sweep.outside[key] for key in sweep.shared]
    sources = [leaves[number] for number in sweep.inputs] + shared
    if not sources:
        return value
    record = _Record(
        like=[(source.dtype, source.device) for source in sources],
        rows=[number in job.rows for number in sweep.inputs] + [False] * len(shared),
        inputs=sum(number != job.weights for number in sweep.inputs),
        owned=len(job.spans) > 1,
        hook=choices["hook"],
    )
    if sweep.keep == "recompute":
        again = _Recomputation(job, random, list(sweep.inputs), shared, constants, value.clone())
        record.recompute = again
        saved = leaves + shared
    else:
        saved = [*sweep.inputs.values(), *sweep.shared.values()]
    result: Tensor = Eager.apply(record, (value, saved), *sources)  # type: ignore[no-untyped-call]  # torch's own
    return result


def _constants(job: Job) -> list[tuple[str, weakref.ref[Tensor], int]]:
    """Return the names, versions and weak references of the constants that names in a function lead to.

    Whole numbers, such as counts of batches, do not count.
    """
    return [
        (name, weakref.ref(tensor), version(tensor))
        for name, tensor in tensors_of(job)
        if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    ]


@dataclass
class _Recomputation:
    """Evaluates a job once more, from saved tensors, and differentiates it."""

    job: Job
    random: dict[torch.device, Tensor]
    inputs: list[int]
    shared: list[Tensor]
    constants: list[tuple[str, weakref.ref[Tensor], int]]
    value: Tensor

    def __call__(self, saved: Sequence[Tensor], cotangent: Tensor, create_graph: bool) -> list[Tensor | None]:
        job = self.job
        leaves = [*saved[: len(job.axes)]]
        for leaf in leaves:
            if freed(leaf):
                raise PackpropError(
                    ASKED,
                    f"an input of {job.where}, of shape {list(leaf.shape)}",
                    "its memory was freed after the call, and keep='recompute' needs it again",
                    "free it after the backward pass; or leave out keep='recompute'",
                )
        for name, constant, before in self.constants:
            tensor = constant()
            if tensor is not None and version(tensor) != before:
                raise PackpropError(
                    ASKED,
                    f"{name}, a constant that names in {job.where} lead to",
                    "it was changed in place after the call, and keep='recompute' evaluates the function again",
                    "change it after the backward pass; or leave out keep='recompute'",
                )
        with random_numbers_from(self.random), torch.enable_grad():
            if create_graph:
                return self._differentiably(leaves, cotangent)
            known = {key_of(tensor): tensor for tensor in self.shared}
            sweep = Sweep(job, leaves, cotangent, known)
            value = sweep.run()
        if sweep.shared.keys() - known.keys():
            raise PackpropError(
                ASKED,
                f"{job.where}, evaluated again in the backward pass",
                "it reaches other tensors by closure than in the forward pass",
                "pass them as inputs, or leave out keep='recompute'",
            )
        self._require_same(value)
        own = [sweep.inputs.get(number) for number in self.inputs]
        return own + [sweep.shared.get(key) for key in known]

    def _differentiably(self, leaves: list[Tensor], cotangent: Tensor) -> list[Tensor | None]:
        job = self.job
        for number in self.inputs:
            # A view, so that hooks on the input run only in the outer pass.
            leaves[number] = leaves[number].view_as(leaves[number])
        value = job.join([job.evaluate(piece, length) for _, length, piece in job.split(leaves)])
        self._require_same(value.detach())
        targets = [leaves[number] for number in self.inputs] + self.shared
        with undisturbed(self.shared):
            return list(torch.autograd.grad(value, targets, cotangent, create_graph=True, allow_unused=True))

    def _require_same(self, value: Tensor) -> None:
        tolerance = torch.finfo(value.dtype).eps ** 0.5
        same = torch.isclose(value, self.value, tolerance, tolerance, equal_nan=True).all()
        if type(value) is Tensor and has_fault(~same):  # others may have no numbers
            raise PackpropError(
                ASKED,
                f"{self.job.where}, evaluated again in the backward pass",
                "its value is another one than in the forward pass: a name that it reads, such as the variable "
                "of a loop, stands for something else by now, or it draws numbers from Python or NumPy",
                "pass what it reads as inputs, and draw from PyTorch; or leave out keep='recompute'",
            )


@dataclass
class _Record:
    """The facts that the backward pass needs besides the saved tensors; lists are in the order of the sources.

    Args:
        like: Dtype and device of each gradient.
        rows: Says that the cotangent of each sample scales that sample's rows.
        inputs: The number of sources that the hook gets: the first ones.
        owned: Says that nobody else holds the kept gradients.
        hook: The user's hook.
        recompute: Evaluates the job once more, if `keep` is `"recompute"`.
    """

    like: list[tuple[torch.dtype, torch.device]]
    rows: list[bool]
    inputs: int
    owned: bool
    hook: Hook | None
    recompute: _Recomputation | None = None


class Eager(torch.autograd.Function):
    """Multiplies kept gradients by the gradient that arrives; in the graph its node is EagerBackward."""

    @staticmethod
    def forward(ctx: Any, record: _Record, result: tuple[Tensor, list[Tensor]], *sources: Tensor) -> Tensor:
        """Save the results of `attach`; return the value."""
        ctx.record = record
        value, saved = result
        ctx.save_for_backward(*saved)
        return value

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the gradients of the sources."""
        record: _Record = ctx.record
        saved = _unpack(ctx)
        create_graph = torch.is_grad_enabled()
        gradients: list[Tensor | None]
        if record.recompute is not None:
            gradients = record.recompute(saved, cotangent, create_graph)
        elif create_graph:
            raise PackpropError(
                ASKED,
                "a backward pass with create_graph=True",
                "packprop kept the gradient without its graph, so PyTorch cannot differentiate it",
                "eager_backward(..., keep='recompute')",
            )
        else:
            # the last pass may scale the kept gradient in place, which saves the memory of a second one; if a
            # hook fails, it is not the last
            consume = record.owned and record.hook is None and not graph_is_kept()
            entries = zip(saved, record.like, record.rows, strict=True)
            gradients = [_scaled(kept, like, cotangent, rows, consume) for kept, like, rows in entries]
        if record.hook is not None:
            own = gradients[: record.inputs]
            gradients[: record.inputs] = _hooked(record.hook, own)
        return None, None, *gradients


def _unpack(ctx: Any) -> tuple[Tensor, ...]:
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "second time" in str(error):
            raise PackpropError(
                ASKED,
                "a second backward pass through the value",
                "the first one released the kept gradient",
                "retain_graph=True in the first backward pass, or call eager_backward again",
            ) from error
        if "inplace operation" in str(error):
            raise PackpropError(
                ASKED,
                "the backward pass through the value",
                "a tensor that it needs was changed in place after the call; with keep='recompute', these "
                "are all tensors that the function uses",
                "change a clone of it; or leave out keep='recompute'",
            ) from error
        raise
    return saved


def _scaled(
    kept: Tensor,
    like: tuple[torch.dtype, torch.device],
    cotangent: Tensor,
    rows: bool,
    consume: bool,
) -> Tensor:
    dtype, device = like
    gradient = kept.to(device, non_blocking=True).to(dtype)  # a CPU that converts does not wait for copies
    factor = cotangent.reshape([-1] + [1] * (gradient.ndim - 1)) if rows else cotangent
    if (consume or gradient is not kept) and gradient.layout is torch.strided:
        return gradient.mul_(factor)
    return gradient * factor


def _hooked(hook: Hook, gradients: list[Tensor | None]) -> list[Tensor | None]:
    changed = hook(*gradients)
    if changed is None:
        return gradients
    got = [changed] if isinstance(changed, Tensor) else list(changed)
    shapes = [None if gradient is None else list(gradient.shape) for gradient in gradients]
    given = [list(entry.shape) if isinstance(entry, Tensor) else None for entry in got]
    if given != shapes:
        why = f"it got gradients of the shapes {shapes} and returned {given}"
        raise bad("hook", why, "return one gradient for each, of its shape, or None for no change")
    return list(got)
