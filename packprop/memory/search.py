"""The chunk sizes that a budget allows: the fastest of those that fit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from packprop.engine.chunks import ChunkSizes, default_chunk_sizes
from packprop.errors import BadInput
from packprop.memory.bytes import byte_count, byte_text
from packprop.memory.dry_run import DryRun
from packprop.memory.plan import BudgetTooSmall, Plan, Step
from packprop.types import Extension


def choices(device: torch.device, freed: bool = False) -> list[ChunkSizes]:
    """What is tried until the peak fits, least time and largest peak first.

    Smaller chunks cost calls, fewer columns at once sweeps, which is dearer where a graph is small enough for
    vectorised ones: they are given up late. Algorithms that hold less cost multiplications; parameters in turn,
    which help only where their results are ``freed``, cost all sweeps again.
    """
    scratch, cotangents, *_ = default_chunk_sizes(device)
    parts = (1, 1), (1, 4), (1, 16), (4, 16), (4, 64), (16, 64)
    found = [ChunkSizes(scratch // samples, cotangents // columns) for samples, columns in parts]
    found += [ChunkSizes(scratch // 16, 0), ChunkSizes(scratch // 16, 0, held=0), ChunkSizes(0, 0, held=0)]
    return found + [ChunkSizes(0, 0, 0, count) for count in (8, 1)] * freed


HELD = tuple(2**power for power in range(30, 9, -1))
"""Bytes of a sample: at each step those uses that hold most take algorithms that hold less."""


def looser(chunk_sizes: ChunkSizes, loosest: ChunkSizes, name: str) -> list[ChunkSizes]:
    """``chunk_sizes`` with more of one kind: as in ``loosest``, then less and less, down to what it is."""
    most, least = getattr(loosest, name), getattr(chunk_sizes, name)
    if most == least:
        return [chunk_sizes]
    between = HELD if most is None else tuple(most // 2**power for power in range(1, 19))
    values = (most, *(value for value in between if value > least), least)
    return [chunk_sizes._replace(**{name: value}) for value in values]


def budget_of(memory: int | str | None) -> int | None:
    """Bytes of a budget.

    Raises:
        BadInput: If it is no positive number of bytes.
    """
    if memory is None:
        return None
    budget = byte_count(memory) if isinstance(memory, (int, str)) else None
    if not budget:
        raise BadInput(
            "A budget of memory was given.",
            f"memory={memory!r}",
            "it is no positive number of bytes",
            "give a number, a text such as '600MiB' or '2GiB', or a Plan",
        )
    return budget


def choose_plan(
    model: nn.Module,
    step: Step,
    extensions: tuple[Extension, ...],
    budget: int | None,
    device: torch.device,
    gradients: bool,
    freed: bool = False,
    accumulated: bool = False,
) -> Plan:
    """The first of the choices that fits, and of each kind of chunk as much as still fits.

    The choices make everything smaller where one thing may be what sets the peak: columns that take no memory
    need not be swept one by one because of a large layer, nor small layers take another algorithm with it.

    Raises:
        BadInput: If none does.
    """

    @functools.cache
    def tried(chunk_sizes: ChunkSizes) -> Plan:
        return DryRun(model, extensions, device, chunk_sizes, freed, accumulated).plan(step, budget, gradients)

    def first(candidates: Sequence[ChunkSizes]) -> ChunkSizes:
        """The first that fits; the peak falls along them, and that of the last does."""
        assert budget is not None
        low, high = -1, len(candidates) - 1
        middle = 0  # mostly it is this one
        while high - low > 1:
            if tried(candidates[middle]).peak <= budget:
                high = middle
            else:
                low = middle
            middle = (low + high) // 2
        return candidates[high]

    chunk_sizes = choices(device, freed)
    if budget is None or tried(chunk_sizes[0]).peak <= budget:
        return tried(chunk_sizes[0])
    if tried(chunk_sizes[-1]).peak > budget:
        raise _impossible(tried(chunk_sizes[-1]), budget)
    best = first(chunk_sizes)
    for name in ("cotangents", "held", "scratch"):  # what is dearest to go without comes first
        best = first(looser(best, chunk_sizes[0], name))
    return tried(best)


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
    "KFRA": "DiagGGNMC",
    "HBP": "DiagGGNMC",
}
"""What takes less."""


def _impossible(floor: Plan, budget: int) -> BudgetTooSmall:
    largest = ", ".join(f"{kind} {byte_text(size)}" for kind, size in list(floor.parts.items())[:3])
    fixed = sum(floor.parts.get(kind, 0) for kind in ("parameters", "buffers", "gradients"))
    fitting = int((budget - fixed) / (floor.peak - fixed) * floor.samples) if floor.peak > fixed else 0
    advice = []
    if 0 < fitting < floor.samples:
        advice.append(f"a batch of {fitting} samples instead of {floor.samples}")
    if any(name.startswith(("Batch", "Sqrt")) for name in floor.extensions):
        advice.append("an extension hook that reduces and deletes each parameter's value")
    advice += [f"{INSTEAD[name]} in place of {name}" for name in floor.extensions if name in INSTEAD]
    advice.append("requires_grad=False on parameters that do not matter, or checkpointing")
    error = BudgetTooSmall(
        "A budget of memory was given.",
        f"memory={byte_text(budget)} on {floor.device}",
        f"with the smallest chunks the step still takes {byte_text(floor.peak)}: {largest}",
        "; or ".join(advice),
    )
    error.floor = floor.peak
    return error
