"""The memory of the pass over one batch, operation by operation, beside its plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from packprop.dataset.batch_pass import BatchPass
from packprop.dataset.parts import readings_of
from packprop.dataset.state import MergedResults
from packprop.dataset.stream import BatchStream
from packprop.engine.chunks import ChunkSizes
from packprop.errors import PackpropError
from packprop.memory.live import LiveBytes
from packprop.memory.plan import Plan
from packprop.memory.planning import plan_over_data
from packprop.recording.switch import extended
from packprop.tensors.calling import LossFunction
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.random import random_numbers_from, random_states
from packprop.types import Extension

ASKED = "The memory of a pass was to be noted."

POINTS = 400
"""The number of points of the timeline; each is the maximum of its operations."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of tensor storage in the pass over the first batch, and the plan for it.

    Args:
        samples: Samples in the batch, by its leading axis.
        timeline: Bytes alive after each operation, at most ``POINTS`` of them: (operation, bytes).
        operations: The number of operations of the pass.
        forward: The last operation of the forward pass; ``None`` if the model computes the loss.
        peak: The most bytes that were alive at once.
        budget: The budget; ``None`` without one.
        planned: The peak by the plan, with the results of the batches before; ``None`` if there is no plan.
        why_not: The reason why there is no plan.
        parts: The bytes of each kind of tensor at the planned peak.
        choices: The plan's choices for each parameter; the fields of ``Line``, and ``chunks``.
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

    @classmethod
    def read(cls, saved: dict[str, Any]) -> MemoryUse:
        """Restore the value from JSON."""
        return cls(**{**saved, "timeline": [(at, size) for at, size in saved["timeline"]]})


def memory_use(
    model: nn.Module,
    loss: LossFunction | None,
    batch: tuple[Any, Any],
    extensions: Callable[[], Sequence[Extension]],
    chunk_sizes: ChunkSizes,
    memory: int | str | None,
    device: torch.device,
) -> MemoryUse:
    """Run the pass over one batch again, and count; restore random states afterwards.

    Args:
        model: The model, in the mode of the pass.
        loss: As for ``compute``.
        batch: Inputs and targets.
        extensions: Makes the extensions of the pass, with draws of their own.
        chunk_sizes: The chunk sizes of the batch.
        memory: The budget.
        device: The device of the pass.
    """
    inputs, targets = map_tensors(lambda tensor: tensor.to(device), batch)
    planned, why_not = _planned(model, loss, (inputs, targets), extensions(), chunk_sizes, memory, device)
    ends: list[int] = []

    def marked(outputs: Any, target: Any) -> Tensor:
        assert loss is not None
        value = loss(outputs, target)
        ends.append(len(live.history))
        return value

    chosen = tuple(extensions())
    merged = MergedResults(chosen)
    step = BatchPass(ASKED, model, None if loss is None else marked, merged, chosen, None)
    with contextlib.ExitStack() as stack:
        for module in (model, loss):
            if isinstance(module, nn.Module):
                stack.enter_context(extended(module))
        stack.enter_context(random_numbers_from(random_states([device])))
        live = stack.enter_context(LiveBytes())
        live.own([*model.parameters(), *model.buffers(), *tensors_in((inputs, targets))], "before")
        live.restart()
        BatchStream(step, device).add((inputs, targets), chunk_sizes, readings_of(chosen)[0], False, 0)
    first = next(tensors_in(inputs))
    return MemoryUse(
        samples=len(first) if first.dim() else 1,
        timeline=thinned(live.history),
        operations=len(live.history),
        forward=ends[0] if ends else None,
        peak=live.peak,
        budget=None if planned is None else planned.memory,
        planned=None if planned is None else planned.peak,
        why_not=why_not,
        parts={} if planned is None else planned.parts,
        choices=[] if planned is None else [{**asdict(line), "chunks": line.chunks} for line in planned.lines],
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
        return plan_over_data(model, loss, batch, extensions, chunk_sizes, memory, device), None
    except PackpropError as error:
        return None, f"{error.where}: {error.why}"
