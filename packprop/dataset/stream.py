"""One batch after the other through the model and the loss; what comes out is merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packprop.compiled.replayer import Replayer
from packprop.dataset.batch_pass import BatchPass
from packprop.dataset.parts import Part
from packprop.dataset.replays import WhereItPays, told
from packprop.engine.chunks import ChunkSizes
from packprop.recording.unchanged import SameForEachPass
from packprop.tensors.nesting import map_tensors, tensors_in


class BatchStream:
    """Runs batches through the model and the loss, and merges their results.

    Args:
        step: The pass over one batch.
        device: Where batches are moved to.
        left: How many batches are to come, if graphs may take the place of passes; else ``None``.
    """

    def __init__(
        self, step: BatchPass, device: torch.device | str, left: Callable[[], int] | None = None
    ) -> None:
        self.step, self._device = step, device
        self._same = SameForEachPass(step.modules)
        self._replayer = None if left is None else Replayer(step, "inductor", None, WhereItPays(left))

    def add(
        self,
        batch: tuple[Any, Any],
        chunk_sizes: ChunkSizes,
        parts: Sequence[Part],
        second: bool,
        number: int,
        counts: bool = True,
    ) -> None:
        """Add the results of one batch: of the parts that the first or ``second`` reading asks for.

        Args:
            batch: Inputs and targets.
            chunk_sizes: How much of it is taken at once.
            parts: What the reading asks for.
            second: Whether it is the second reading.
            number: That of the batch among those of all ranks.
            counts: Whether results are added; else other ranks need this one in the pass.
        """
        if is_empty(batch):
            return
        inputs, targets = map_tensors(lambda tensor: tensor.to(self._device), batch)
        step = self.step
        step.batch, step.number, step.chunk_sizes = batch, number, chunk_sizes
        step.parts, step.second = parts, second
        with self._same.around():
            if not counts:
                step.take_part(inputs, targets)
            elif second or self._replayer is None:  # what a second reading is given belongs to no batch
                step.run(inputs, targets)
            else:
                self._replayer(inputs, targets)

    def told(self) -> str | None:
        """What graphs have brought, in words; ``None`` if there was none."""
        return None if self._replayer is None else told(self._replayer.kinds)


def is_empty(batch: tuple[Any, Any]) -> bool:
    """Whether no tensor of the inputs has an entry: there is no sample in the batch."""
    tensors = [*tensors_in(batch[0])]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)
