"""Comparison of a replay with an eager pass on the same values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.applications.compiled.compiler import Runner
from packprop.applications.compiled.passes import Outcome, Pass
from packprop.applications.compiled.state import State
from packprop.applications.compiled.trace import Traced
from packprop.engine.tensors import random_states, set_random_states, tensors_in


def checked(
    step: Pass, traced: Traced, run: Runner, state: State, inputs: Any, targets: Any
) -> tuple[Outcome, str | None]:
    """Run an eager pass, and say how a replay on the same values differs.

    A trace may have kept results of Python: random numbers of other libraries, arrays, counters of a module.
    They show on the next values. The eager pass is the one that counts.
    """
    apart = [tensor if tensor.requires_grad else tensor.detach().clone() for tensor in state.tensors]
    generators = _generators(step)
    before, own_before = random_states(), [each.get_state() for each in generators]
    outcome = step.run_apart(state.parameters, inputs, targets)
    after, own_after = random_states(), [each.get_state() for each in generators]
    try:
        with keeping_generators(step):
            set_random_states(before)
            for generator, own in zip(generators, own_before, strict=True):
                generator.set_state(own)
            outputs = run(apart)
            drawn = [*random_states().values(), *(each.get_state() for each in generators)]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return outcome, f"it fails: {str(error).strip().splitlines()[0]}"
    finally:
        set_random_states(after)
    if not all(map(torch.equal, drawn, [*after.values(), *own_after])):
        return outcome, "it draws more or fewer random numbers"
    pairs = [*_pairs(outcome, traced.outcome(outputs))]
    pairs += [("a buffer", now, there) for now, there in zip(state.tensors, apart, strict=True)]
    fault = next((what for what, first, second in pairs if not alike(first, second)), None)
    if fault is None:
        before = random_states()
        run.settle(apart, step.budget)
        set_random_states(before)
    return outcome, fault


def _pairs(first: Outcome, second: Outcome) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield the tensors of two outcomes, each with its name."""
    yield "the loss", first.loss, second.loss
    for number in {**first.gradients, **second.gradients}:
        yield f"the gradient of tensor {number}", first.gradients.get(number), second.gradients.get(number)
    for key in {**first.results, **second.results}:
        number, name = key
        own, other = (list(tensors_in(each.results.get(key))) for each in (first, second))
        for a, b in zip(own, other, strict=True) if len(own) == len(other) else [(None, None)]:
            yield f"{name} of tensor {number}", a, b


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


@contextlib.contextmanager
def keeping_generators(step: Pass) -> Iterator[None]:
    """Put the generators of a pass back to where they are, after what is drawn from them inside."""
    kept = [(each, each.get_state()) for each in _generators(step)]
    try:
        yield
    finally:
        for generator, before in kept:
            generator.set_state(before)


def _generators(step: Pass) -> Sequence[torch.Generator]:
    """Return the generators that extensions draw from, and those that are attributes of modules, each once."""
    found = [getattr(extension, "generator", None) for extension in step.extensions]
    found += [value for root in step.modules for module in root.modules() for value in vars(module).values()]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
