"""Results of a pass whose statistics are all taken of all samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import Extent, whole
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.passes.accumulator import Accumulator, Done
from packprop.engine.passes.contributions import Build, Contribution, joint_structure
from packprop.engine.passes.partial_results import Begin
from packprop.engine.passes.request import Request, Task
from packprop.errors import naming
from packprop.types import Extension


class WholeResults(Accumulator):
    """The results of a pass of internal extensions; there is nothing to split or to merge.

    An earlier pass has taken the same statistics of all samples in one chunk; see NOTE [Direct passes].

    Args:
        request: The request of the pass.
        done: As for ``Accumulator``.
        begin: As for ``Accumulator``.
    """

    def __init__(self, request: Request, done: Done, begin: Begin) -> None:
        super().__init__(request, done, None, begin)
        self._whole: dict[tuple[int, int], list[Any]] = {}

    def add_contributions(
        self,
        leaf: Tensor,
        contributions: list[Contribution],
        tasks: Sequence[Task],
        columns: Extent,
        build: Build = joint_structure,
    ) -> None:
        """Take the statistics of one leaf; in chunks if the memory does not suffice this time."""
        try:
            with naming(lambda: self._graph.name(leaf)):
                structure = build(contributions, slice(None), self._chunk_sizes.held)
                values = evaluate_together(structure, [task.row.statistic for task in tasks])
        except torch.OutOfMemoryError:
            return super().add_contributions(leaf, contributions, tasks, columns, build)
        for task, value in zip(tasks, values, strict=True):
            found = whole(value, task.row.over_v, task.row.over_n)
            self._whole[id(task.extension), id(leaf)] = [found]
        return None

    def take(self, leaf: Tensor, extension: Extension) -> list[Any] | None:
        """Take out the results of an internal extension; ``None`` if there are none."""
        found = self._whole.pop((id(extension), id(leaf)), None)
        return super().take(leaf, extension) if found is None else found

    def finish(self, leaf: Tensor) -> None:
        """Tell that a leaf has no more results: none of them is for the user."""
        self._done(leaf, {})
