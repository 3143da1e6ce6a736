"""The search for the chunk sizes that a budget allows: the fastest of those that fit."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch

from packprop.engine.memory.bytes import byte_count, byte_text, enough_text
from packprop.engine.memory.dry_run import DryRun, PlannedStep
from packprop.engine.memory.plan import BudgetTooSmall, Plan
from packprop.engine.passes.chunks import ChunkSizes, default_chunk_sizes
from packprop.errors import BadInput, PackpropError


def choices(device: torch.device, freed: bool = False) -> list[ChunkSizes]:
    """Return the choices that the search tries: the fastest, which has the largest peak, comes first.

    Fewer samples at once cost more calls. Fewer columns at once cost more sweeps, and more time if the graph is
    small enough for vectorised sweeps: the search reduces columns late. Algorithms that hold less cost
    multiplications. Forming the results of a few parameters at a time costs all sweeps again; it helps only if
    these results are ``freed``.
    """
    scratch, cotangents, *_ = default_chunk_sizes(device)
    divisors = (1, 1), (1, 4), (1, 16), (4, 16), (4, 64), (16, 64)
    sizes = [ChunkSizes(scratch // samples, cotangents // columns) for samples, columns in divisors]
    sizes += [ChunkSizes(scratch // 16, 0), ChunkSizes(scratch // 16, 0, held=0), ChunkSizes(0, 0, held=0)]
    return sizes + [ChunkSizes(0, 0, 0, count) for count in (8, 1)] * freed


HELD = tuple(2**power for power in range(30, 9, -1))
"""Limits for bytes of a sample: at each lower limit, more uses change to algorithms that hold less."""


def looser(chunk_sizes: ChunkSizes, loosest: ChunkSizes, name: str) -> list[ChunkSizes]:
    """Return ``chunk_sizes`` with other values of one field, from that in ``loosest`` down to its own."""
    most, least = getattr(loosest, name), getattr(chunk_sizes, name)
    if most == least:
        return [chunk_sizes]
    between = HELD if most is None else tuple(most // 2**power for power in range(1, 19))
    values = (most, *(value for value in between if value > least), least)
    return [chunk_sizes._replace(**{name: value}) for value in values]


def budget_of(memory: float | str | None) -> int | None:
    """Return the bytes of a budget; ``None`` for ``None``.

    Raises:
        BadInput: If it is no positive number of bytes.
    """
    if memory is None:
        return None
    is_whole = isinstance(memory, Real) and math.isfinite(memory) and int(memory) == memory
    budget = byte_count(memory) if is_whole or isinstance(memory, str) else None
    if not budget:
        raise BadInput(
            "A budget of memory was given.",
            f"memory={memory!r}",
            "it is no positive number of bytes",
            "give a whole number, a text such as '600MiB' or '2GiB', or a Plan",
        )
    return budget


def choose_plan(
    step: PlannedStep, budget: int | None, whole: Callable[[Plan], Plan] = lambda plan: plan
) -> Plan:
    """Find the first choice that fits, then enlarge each kind of chunk as far as it still fits.

    If the smallest chunks do not fit, another choice may: see ``_least``. ``whole`` adds to a plan the memory
    besides the step: the budget is for both.

    A choice makes everything smaller, but often one layer alone sets the peak. Columns that take no memory need
    not be swept one by one because of that layer, and small layers need not take another algorithm with it.

    Raises:
        BudgetTooSmall: If no choice fits.
    """

    @functools.cache
    def tried(chunk_sizes: ChunkSizes) -> Plan:
        return whole(DryRun(step, chunk_sizes).run(budget))

    def fits(chunk_sizes: ChunkSizes) -> bool:
        return budget is None or tried(chunk_sizes).peak <= budget

    def first_fitting(candidates: Sequence[ChunkSizes]) -> ChunkSizes:
        """Find the first choice that fits, by bisection; the last one is known to fit."""
        if fits(candidates[0]):  # mostly the first one fits
            return candidates[0]
        return candidates[bisect.bisect_left(candidates, True, 0, len(candidates) - 1, key=fits)]

    candidates = choices(step.device, step.freed)
    if budget is None or fits(candidates[0]):
        return tried(candidates[0])
    if fits(candidates[-1]):
        best = first_fitting(candidates)
    else:
        best = _least(lambda chunk_sizes: tried(chunk_sizes).peak, candidates, budget)
        if not fits(best):
            floor = tried(best)
            raise _impossible(floor, budget, _fitting_samples(step, floor, budget, whole))
    for name in ("cotangents", "held", "scratch"):  # restored first: the one whose loss costs most time
        best = first_fitting(looser(best, candidates[0], name))
    return tried(best)


def _least(peak: Callable[[ChunkSizes], int], candidates: Sequence[ChunkSizes], enough: int) -> ChunkSizes:
    """Find the choice of the smallest peak, or one whose peak is at most ``enough``.

    The smallest chunks need not have the smallest peak: the sum of several chunks is in memory beside the value
    of the next, and an algorithm that holds less of a large use may hold more of a small one. So the search
    tries each field at its most, its least and in between, with the others at their best, until the peak falls
    no further.
    """
    first, last = candidates[0], candidates[-1]
    best, before = min(last, first, key=peak), None
    while before != best:
        before = best
        for name in ("held", "scratch", "cotangents"):
            tightest = best._replace(**{name: getattr(last, name)})
            best = min([best, *_worth_a_look(peak, looser(tightest, first, name))], key=peak)
            if peak(best) <= enough:
                return best
        best = min([best, *(best._replace(parameters=each.parameters) for each in candidates)], key=peak)
    return best


def _worth_a_look(peak: Callable[[ChunkSizes], int], line: Sequence[ChunkSizes]) -> list[ChunkSizes]:
    """Return choices on a line that include its smallest peak: its ends, and middles of stretches.

    It does not search a stretch whose ends have equal peaks, or whose middle has a peak between theirs.
    """
    first, middle, last = line[0], line[len(line) // 2], line[-1]
    ends = sorted([peak(first), peak(last)])
    if len(line) < 3 or ends[0] == ends[1] or ends[0] < peak(middle) < ends[1]:
        return [first, last]
    half = len(line) // 2
    return _worth_a_look(peak, line[: half + 1]) + _worth_a_look(peak, line[half:])


INSTEAD = {
    "BatchGrad": "BatchL2Grad or SumGradSquared",
    "BatchDotGrad": "BatchL2Grad",
    "BatchJacobian": "BatchJacobian(outputs=...) for some outputs",
    "SqrtGGNExact": "SqrtGGNMC",
    "SqrtGGNMC": "DiagGGNMC",
    "DiagGGNExact": "DiagGGNMC",
    "BatchDiagGGNExact": "DiagGGNExact",
    "BatchDiagGGNMC": "DiagGGNMC",
    "DiagHessian": "DiagHessianMC",
    "BatchDiagHessian": "DiagHessian",
    "EKFAC": "KFAC",
    "KFAC": "DiagGGNMC",
    "KFLR": "DiagGGNExact",
}
"""For each of these extensions, extensions that take less memory."""


def _fitting_samples(step: PlannedStep, floor: Plan, budget: int, whole: Callable[[Plan], Plan]) -> int:
    """Return the most samples that fit the budget with the same chunks; 0 if there may be none.

    It plans each number that it tries: much of a peak may be the same for any number of samples.
    """

    def is_too_much(samples: int) -> bool:
        try:
            return (
                whole(DryRun(step.of_fewer(floor.samples, samples), floor.chunk_sizes).run(budget)).peak
                > budget
            )
        except (PackpropError, RuntimeError):  # its samples are not on leading axes, or it needs some number
            return True

    return bisect.bisect_left(range(1, floor.samples), True, key=is_too_much)


def _impossible(floor: Plan, budget: int, fitting: int) -> BudgetTooSmall:
    largest = ", ".join(f"{kind} {byte_text(size)}" for kind, size in list(floor.parts.items())[:3])
    advice = []
    if fitting:
        advice.append(f"a batch of {fitting} sample{'s' * (fitting > 1)} instead of {floor.samples}")
    if any(name.startswith(("Batch", "Sqrt")) for name in floor.extensions):
        advice.append("an extension hook that reduces and deletes each parameter's value")
    advice += [f"{INSTEAD[name]} in place of {name}" for name in floor.extensions if name in INSTEAD]
    advice.append("requires_grad=False on parameters that do not matter, or checkpointing")
    error = BudgetTooSmall(
        "A budget of memory was given.",
        f"memory={byte_text(budget)} on {floor.device}",
        f"with the chunks that take least the step still takes {enough_text(floor.peak)}: {largest}",
        "; or ".join(advice),
    )
    error.floor = floor.peak
    return error
