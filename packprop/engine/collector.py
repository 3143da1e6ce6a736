"""Cotangents of one sweep wait until those of all uses of a leaf are there; then statistics are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from packprop.algebra.formation import OF_ROWS
from packprop.algebra.partial import Extent
from packprop.engine.accumulator import Accumulator, Task
from packprop.engine.contributions import Build, Contribution, joint_structure, unreached
from packprop.graph.graph import ReachedUse


class Collector:
    """What has arrived in one sweep at leaves that wait for more.

    Args:
        results: What statistics are merged into.
        found: The uses.
        tasks: What is asked of every leaf.
        last: Whether all results are there after this sweep.
        columns: The columns that are swept.
        more: What is asked of some leaves before that.
        build: What statistics are taken of; by default the structure of all uses of a leaf.
    """

    def __init__(
        self,
        results: Accumulator,
        found: Sequence[ReachedUse],
        tasks: list[Task],
        last: bool,
        columns: Extent,
        more: Mapping[int, list[Task]] = MappingProxyType({}),
        build: Build = joint_structure,
    ) -> None:
        self._results, self._tasks, self._more = results, tasks, more
        self._last, self._columns, self._build = last, columns, build
        self._found = found
        self._parts: dict[int, list[Contribution]] = {}
        self._leaves = {id(site.leaf): site.leaf for f in found for site in f.sites}
        self._expected = Counter(id(site.leaf) for f in found for site in f.sites)
        self._sums = any(task.row.sums for task in tasks)

    def visit(self, found: ReachedUse, cotangents: list[Tensor | None]) -> None:
        """One use with its cotangents."""
        for site in found.take():
            key = id(site.leaf)
            if not self._sums and key not in self._more:
                self._results.finite_check.note(site.leaf, cotangents)
            parts = self._parts.setdefault(key, [])
            parts.append((found, site, cotangents))
            if len(parts) == self._expected[key]:
                self._take(key)

    def flush(self) -> None:
        """End of the sweep: leaves that it has reached at some of their uses only, or at none."""
        for key in list(self._parts):
            if any(task.row.statistic not in OF_ROWS for task in self._tasks):
                self._parts[key] += self._unreached(key)
            self._take(key)
        for leaf in list(self._leaves.values()):
            self._results.add_zeros(leaf, self._columns, self._tasks)
            self._done(leaf)

    def _unreached(self, key: int) -> list[Contribution]:
        """Zeros for the uses that are missing: a factor is that of all uses together, in every sweep."""
        there = {found for found, _, _ in self._parts[key]}
        given = next(
            cotangent
            for _, _, cotangents in self._parts[key]
            for cotangent in cotangents
            if cotangent is not None
        )
        return [
            unreached(found, site, given, len(given))
            for found in self._found
            if found not in there and any(id(site.leaf) == key for site in found.sites)
            for site in found.take()
            if id(site.leaf) == key
        ]

    def _take(self, key: int) -> None:
        leaf = self._leaves[key]
        tasks = [*self._more.get(key, ()), *self._tasks]
        self._results.take(leaf, self._parts.pop(key), tasks, self._columns, self._build)
        self._done(leaf)

    def _done(self, leaf: Tensor) -> None:
        del self._leaves[id(leaf)]
        if self._last:
            self._results.finish(leaf)
