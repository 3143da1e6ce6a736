"""Comparison of a replay with an eager pass on the same values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packprop.applications.compiled.compiler import Runner
from packprop.applications.compiled.passes import Outcome, Pass
from packprop.applications.compiled.state import State
from packprop.applications.compiled.trace import Traced
from packprop.engine.tensors import tensors_in


def checked(
    step: Pass, traced: Traced, run: Runner, state: State, inputs: Any, targets: Any
) -> tuple[Outcome, str | None]:
    """Run an eager pass and a replay on the same values; return the pass's outcome, and how the replay differs.

    A graph holds as constants what Python code computed during the trace: random numbers of other libraries,
    arrays, counters of a module. The next pass shows that they change. Only the eager pass has lasting effects.
    """
    beside = replace(traced.effects, inputs=(), draws=True)
    apart = [
        tensor if tensor.requires_grad and place not in traced.effects.inputs else _copied(tensor.detach())
        for place, tensor in enumerate(state.tensors)
    ]
    before = beside.kept(())
    outcome = step.run_apart(state.parameters, inputs, targets)
    after = beside.kept(())
    try:
        before.put_back()
        try:
            outputs = run(apart)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return outcome, f"it fails: {str(error).strip().splitlines()[0]}"
        now = beside.kept(())
        if not now.draws_like(after):
            return outcome, "it draws more or fewer random numbers"
        pairs = [*_pairs(outcome, traced.outcome(outputs))]
        written = [(own, its) for (_, own), (_, its) in zip(after.tensors, now.tensors, strict=True)]
        written += zip(state.tensors, apart, strict=True)
        pairs += [("a tensor that it writes to", first, second) for first, second in written]
        fault = next((what for what, first, second in pairs if not alike(first, second)), None)
        if fault is None:
            run.settle(apart, step.budget)
        return outcome, fault
    finally:
        after.put_back()


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which compiled code requires; ``clone`` closes gaps."""
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return once.new_empty_strided(once.shape, once.stride()).copy_(once).expand(tensor.shape)


def _pairs(first: Outcome, second: Outcome) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield the tensors of two outcomes, each with its name."""
    yield "the loss", first.loss, second.loss
    for number in {**first.gradients, **second.gradients}:
        yield f"the gradient of tensor {number}", first.gradients.get(number), second.gradients.get(number)
    for number, name in {**first.results, **second.results}:
        results = (tensors_in(each.results.get((number, name))) for each in (first, second))
        for own, other in itertools.zip_longest(*results):
            yield f"{name} of tensor {number}", own, other


def alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Tell whether two tensors are equal up to rounding; NaN equals NaN."""
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    if not first.numel():
        return True
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return False
    first, second = torch.where(finite, first, 0).detach(), torch.where(finite, second, 0).detach()
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    return bool((first - second).abs().amax() <= tolerance * first.abs().amax())
