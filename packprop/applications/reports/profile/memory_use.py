"""The memory of the pass over one batch, operation by operation, beside its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from packprop.applications.reports.profile.costs import (
    PATIENCE,
    Cost,
    Noted,
    OneBatch,
    Phase,
    costs_of,
    phases_of,
)
from packprop.engine.memory import Plan, plan_over_data, step_over_data
from packprop.engine.passes import ChunkSizes
from packprop.engine.tensors import LossFunction, moved
from packprop.errors import PackpropError
from packprop.types import Extension

POINTS = 400
"""The number of points of the timeline; each is the maximum of its operations."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of tensor storage in the pass over the first batch, and the plan for it.

    Args:
        samples: Samples in the batch.
        timeline: Bytes alive after each operation, at most ``POINTS`` of them: (operation, bytes).
        operations: The number of operations of the pass.
        forward: The last operation of the forward pass; ``None`` if it is not known.
        peak: The most bytes that were alive at once.
        budget: The budget; ``None`` without one.
        planned: The peak by the plan, with the results of the batches before; ``None`` if there is no plan.
        why_not: The reason why there is no plan.
        parts: The bytes of each kind of tensor at the planned peak.
        choices: The plan's choices for each parameter; the fields of ``Line``, and ``chunks``.
        phases: The parts of the pass, in their order: name, first operation, the one after the last; empty if
            the report cannot tell them apart.
        costs: The cost of each quantity in each layer; see NOTE [Costs of layers].
        why_no_costs: The reason why there are no costs.
    """

    samples: int
    timeline: list[tuple[int, int]]
    operations: int
    forward: int | None
    peak: int
    budget: int | None
    planned: int | None = None
    why_not: str | None = None
    parts: dict[str, int] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    why_no_costs: str | None = None

    @classmethod
    def read(cls, saved: dict[str, Any]) -> MemoryUse:
        """Restore the value from JSON."""
        read: dict[str, Any] = {
            "timeline": [(at, size) for at, size in saved["timeline"]],
            "phases": [(name, first, after) for name, first, after in saved.get("phases", [])],
            "costs": [Cost(**cost) for cost in saved.get("costs", [])],
        }
        return cls(**{**saved, **read})


def memory_use(
    model: nn.Module,
    loss: LossFunction | None,
    batch: tuple[Any, Any],
    extensions: Callable[[], Sequence[Extension]],
    chunk_sizes: ChunkSizes,
    memory: int | str | None,
    device: torch.device,
) -> MemoryUse:
    """Run the pass over one batch again, of all quantities and of each alone, and count.

    Random states are restored afterwards.

    Args:
        model: The model, in the mode of the pass.
        loss: As for ``compute``.
        batch: Inputs and targets.
        extensions: Makes the extensions of the pass, with draws of their own.
        chunk_sizes: The chunk sizes of the batch.
        memory: The budget.
        device: The device of the pass.
    """
    batch = moved(batch, device)
    planned, why_not = _planned(model, loss, batch, extensions(), chunk_sizes, memory, device)
    one = OneBatch(model, loss, batch, chunk_sizes, device)
    chosen = [*extensions()]
    noted = one.run(chosen, counted=True)
    seconds = noted.end[0] - noted.start[0]
    costs: list[Cost] = []
    alone: list[Noted] = []
    why_no_costs = None
    if seconds < PATIENCE:
        costs, alone = costs_of(one, extensions)
    else:
        why_no_costs = f"the pass over the first batch took {seconds:.0f} s, and was not run for each quantity"
    return MemoryUse(
        samples=noted.samples,
        timeline=thinned(noted.history),
        operations=len(noted.history),
        forward=None if noted.forward is None else noted.forward[1],
        peak=noted.peak,
        budget=None if planned is None else planned.memory,
        planned=None if planned is None else planned.peak,
        why_not=why_not,
        parts={} if planned is None else planned.parts,
        choices=[] if planned is None else [{**asdict(line), "chunks": line.chunks} for line in planned.lines],
        phases=phases_of(noted, chosen, alone) if alone else [],
        costs=costs,
        why_no_costs=why_no_costs,
    )


def thinned(history: Sequence[int], points: int = POINTS) -> list[tuple[int, int]]:
    """Return at most so many points of a timeline, each the highest of its stretch, at its own place.

    >>> thinned([1, 5, 2, 3, 9, 4], points=2)
    [(1, 5), (4, 9)]
    """
    step = -(-len(history) // points) if history else 1
    starts = range(0, len(history), step)
    highest = (max(range(at, min(at + step, len(history))), key=history.__getitem__) for at in starts)
    return [(at, history[at]) for at in highest]


def _planned(
    model: nn.Module,
    loss: LossFunction | None,
    batch: tuple[Any, Any],
    extensions: Sequence[Extension],
    chunk_sizes: ChunkSizes,
    memory: int | str | None,
    device: torch.device,
) -> tuple[Plan | None, str | None]:
    """Return the plan of the pass; or the reason why there is none."""
    try:
        step = step_over_data(model, loss, batch, extensions, device)
        return plan_over_data(step, chunk_sizes, memory), None
    except PackpropError as error:
        return None, f"{error.where}: {error.why}"
