"""The stream of batches through the model and the loss, which merges their results; chunk sizes of batches."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from packprop.applications.compiled.facts import facts_of
from packprop.applications.compiled.replayer import Replayer
from packprop.applications.dataset.batch_pass import BatchPass
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.identity import describer_of
from packprop.applications.dataset.parts import Part
from packprop.applications.dataset.replays import WhereItPays, told
from packprop.engine.passes import ChunkSizes
from packprop.engine.recording import SameForEachPass
from packprop.engine.tensors import moved, tensors_in


class ChunkSizesByBatch:
    """Chunk sizes for batches of different sizes: those of one batch serve all batches that are no larger.

    Args:
        plan: Returns the chunk sizes for one batch.
    """

    def __init__(self, plan: Callable[[tuple[Any, Any]], ChunkSizes]) -> None:
        self._plan = plan
        self._planned: list[tuple[list[tuple[int, ...]], ChunkSizes]] = []

    def of(self, batch: tuple[Any, Any]) -> ChunkSizes:
        """Return the chunk sizes for a batch; plan only if no earlier batch was as large in every axis."""
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        for known, chunk_sizes in reversed(self._planned):
            are_alike = [*map(len, known)] == [*map(len, shapes)]
            if are_alike and all(map(operator.le, chain(*shapes), chain(*known))):
                return chunk_sizes
        self._planned.append((shapes, self._plan(batch)))
        return self._planned[-1][1]

    @property
    def first(self) -> ChunkSizes | None:
        """Return the chunk sizes of the first batch; ``None`` before it."""
        return self._planned[0][1] if self._planned else None

    def saved(self) -> list[Any]:
        """Return the plans, in values that a file can hold; with other chunks, sums would round differently."""
        return [[[list(shape) for shape in shapes], list(sizes)] for shapes, sizes in self._planned]

    def restore(self, saved: list[Any]) -> None:
        """Restore the values of ``saved``."""
        self._planned = [([tuple(shape) for shape in shapes], ChunkSizes(*sizes)) for shapes, sizes in saved]


class BatchStream:
    """Runs batches through the model and the loss, and merges their results.

    Args:
        step: The pass over one batch.
        device: The device of batches.
        left: Returns the number of batches to come; ``None`` if packprop may not replay graphs.
    """

    def __init__(
        self, step: BatchPass, device: torch.device | str, left: Callable[[], int] | None = None
    ) -> None:
        self.step, self.device = step, device
        self._same = SameForEachPass(step.modules)
        self._replayer = None
        if left is not None:
            pays = WhereItPays(left, lambda: self._code.changes, self._facts_around)
            self._replayer = Replayer(step, "inductor", None, pays)

    @functools.cached_property
    def _code(self) -> Describer:
        """The description of the code of model and loss."""
        return describer_of(self.step.model, self.step.loss)

    def _facts_around(self) -> Any:
        """Describe the globals, and other values around their code, that model and loss read."""
        if not self._code.around:  # most code reads none: nothing to go through in each batch
            return []
        modules = {id(each) for root in self.step.modules for each in root.modules()}
        return facts_of([space.get(name) for (_, name), space in self._code.around.items()], modules)

    def add(
        self,
        batch: tuple[Any, Any],
        chunk_sizes: ChunkSizes,
        parts: Sequence[Part],
        second: bool,
        number: int,
        counts: bool = True,
    ) -> None:
        """Add the results of one batch: of the parts in the first or ``second`` reading.

        Args:
            batch: Inputs and targets.
            chunk_sizes: Its chunk sizes.
            parts: The parts of the reading.
            second: True in the second reading.
            number: The number of the batch among the batches of all ranks.
            counts: Add the results; if False, only run the pass, because other ranks need this one in it.
        """
        if is_empty(batch):
            return
        inputs, targets = moved(batch, self.device)
        step = self.step
        step.number, step.chunk_sizes = number, chunk_sizes
        step.parts, step.second = parts, second
        with self._same.around():
            if not counts:
                step.take_part(inputs, targets)
            elif second or self._replayer is None:  # a second reading needs more than a batch
                step.run(inputs, targets)
            else:
                self._replayer(inputs, targets)

    def told(self) -> str | None:
        """Describe the effect of replayed graphs; return ``None`` if packprop traced none."""
        return None if self._replayer is None else told(self._replayer.kinds)


def is_empty(batch: tuple[Any, Any]) -> bool:
    """Tell whether a batch holds no sample: its inputs are tensors, and none has an entry."""
    tensors = [*tensors_in(batch[0])]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)
