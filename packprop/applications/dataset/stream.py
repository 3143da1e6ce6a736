"""The stream of batches through the model and the loss; it merges the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packprop.applications.compiled.replayer import Replayer
from packprop.applications.dataset.batch_pass import BatchPass
from packprop.applications.dataset.identity import changes_around
from packprop.applications.dataset.parts import Part
from packprop.applications.dataset.replays import WhereItPays, told
from packprop.engine.passes import ChunkSizes
from packprop.engine.recording import SameForEachPass
from packprop.engine.tensors import moved, tensors_in


class BatchStream:
    """Runs batches through the model and the loss, and merges their results.

    Args:
        step: The pass over one batch.
        device: The device of batches.
        left: The number of batches to come, if graphs may replace passes; else ``None``.
    """

    def __init__(
        self, step: BatchPass, device: torch.device | str, left: Callable[[], int] | None = None
    ) -> None:
        self.step, self.device = step, device
        self._same = SameForEachPass(step.modules)
        self._replayer = None
        if left is not None:
            pays = WhereItPays(left, lambda: changes_around(step.model, step.loss))
            self._replayer = Replayer(step, "inductor", None, pays)

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
            second: Says that it is the second reading.
            number: Its number among those of all ranks.
            counts: Add results; else other ranks only need this one in the pass.
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
            elif second or self._replayer is None:  # what a second reading is given belongs to no batch
                step.run(inputs, targets)
            else:
                self._replayer(inputs, targets)

    def told(self) -> str | None:
        """Describe the effect of graphs; return ``None`` if there was none."""
        return None if self._replayer is None else told(self._replayer.kinds)


def is_empty(batch: tuple[Any, Any]) -> bool:
    """Tell whether no tensor of the inputs has an entry: there is no sample in the batch."""
    tensors = [*tensors_in(batch[0])]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)
