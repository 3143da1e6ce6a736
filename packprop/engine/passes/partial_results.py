"""Results of leaves that are not complete yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from packprop.engine.algebra.factors import LARGEST_FACTOR
from packprop.engine.algebra.monoid import Partial
from packprop.engine.graph.graph import Graph
from packprop.engine.passes.request import Task
from packprop.engine.passes.sample_memory import factor_sizes
from packprop.engine.tensors.long_work import doing
from packprop.engine.tensors.nesting import tensors_in
from packprop.types import Extension

Begin = Callable[[], dict[tuple[Extension, int], Tensor]]
"""Called before the first value is kept; returns tensors that results may overwrite, by extension and leaf."""

Known = Callable[[Tensor, Extension], list[Any]]
"""Maps a leaf and an extension to the results of the first pass over all samples."""


class PartialResults:
    """One partial result for each task and leaf, until it is taken out.

    Args:
        begin: Called once, before the first value is kept.
        known: Returns results of earlier passes, in place of a first pass.
    """

    def __init__(self, begin: Begin, known: Known | None = None) -> None:
        self._begin, self._known = begin, known
        self._spare: dict[tuple[Extension, int], Tensor] | None = None
        self._partial: dict[tuple[int, int], dict[int, Partial]] = {}
        self._first_pass: dict[tuple[int, int], list[Any]] = {}

    def at(self, leaf: Tensor, task: Task) -> Partial:
        """Return the partial result of one task at one leaf; make it on the first call."""
        if self._spare is None:
            self._spare = self._begin()
        rows = self._partial.setdefault((id(task.extension), id(leaf)), {})
        if task.index not in rows:
            spare = self._spare.pop((task.extension, id(leaf)), None) if self._spare else None
            rows[task.index] = Partial(task.row.over_v, task.row.over_n, spare)
        return rows[task.index]

    def has(self, leaf: Tensor, task: Task) -> bool:
        """Tell whether there is a partial result of this task at this leaf."""
        return task.index in self._partial.get((id(task.extension), id(leaf)), {})

    def end_first_pass(self, leaf: Tensor, tasks: Sequence[Task]) -> None:
        """Replace the results of a first pass, once, by the results of ``after``; see NOTE [Second pass].

        ``after`` needs the same memory for chunks of any size.
        """
        if self._known is not None:
            return
        for task in tasks:
            after, key = task.row.after, (id(task.extension), id(leaf))
            if after is not None and key not in self._first_pass:
                results = self._take_rows(key, range(task.index))
                sizes = [len(tensor) for tensor in tensors_in(results) if tensor.dim() == 2]
                with doing("eigenvectors", sum(size**3 for size in sizes)):
                    self._first_pass[key] = after(results)

    def first_pass(self, leaf: Tensor, extension: Extension) -> list[Any]:
        """Return the results that ``end_first_pass`` made, or the results of earlier passes."""
        if self._known is not None:
            return self._known(leaf, extension)
        return self._first_pass[id(extension), id(leaf)]

    def take(self, leaf: Tensor, extension: Extension) -> list[Any] | None:
        """Take out the results of all rows at one leaf; ``None`` if there are none."""
        key = (id(extension), id(leaf))
        first = self._first_pass.pop(key, [])
        if key not in self._partial:
            return None
        return first + self._take_rows(key, range(len(first), len(extension.rows)))

    def _take_rows(self, key: tuple[int, int], rows: Sequence[int]) -> list[Any]:
        """Take out the results of some rows; ``None`` for each row without one."""
        partials = self._partial.pop(key, {})
        return [partials[index].result() if index in partials else None for index in rows]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of partial results."""
        for rows in self._partial.values():
            for partial in rows.values():
                yield from partial.tensors()
        yield from tensors_in([*self._first_pass.values()])


def cubes_of_factors(graph: Graph) -> float:
    """Sum the cubed sizes of all Kronecker factors; the time for their eigenvectors grows with this sum."""
    sizes = {id(site.leaf): factor_sizes(site) for use in graph.uses for site in use.sites}
    return float(sum(size**3 for each in sizes.values() for size in each if size <= LARGEST_FACTOR))
