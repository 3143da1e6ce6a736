"""Cotangents of one sweep wait until those of all uses of a leaf are there; then statistics are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from packprop.algebra.formation import OF_ROWS
from packprop.algebra.partial import ONE, Extent
from packprop.engine.accumulator import Accumulator
from packprop.engine.contributions import Build, Contribution, joint_structure, unreached
from packprop.engine.request import Task
from packprop.graph.graph import ReachedUse


class Collector:
    """The contributions of one sweep to leaves that still wait for more of them.

    Args:
        results: What statistics are merged into.
        uses: The uses that the sweep may reach.
        tasks: What is asked of every leaf.
        last: Whether all results are complete after this sweep.
        columns: The columns that are swept.
        first_tasks: What is asked of some leaves, by identity, before ``tasks``.
        build: Makes the structure that statistics are taken of; by default that of all uses of a leaf.
        keep: Called with each leaf and its contributions, before statistics are taken.
    """

    def __init__(
        self,
        results: Accumulator,
        uses: Sequence[ReachedUse],
        tasks: list[Task],
        *,
        last: bool = False,
        columns: Extent = ONE,
        first_tasks: Mapping[int, list[Task]] = MappingProxyType({}),
        build: Build = joint_structure,
        keep: Callable[[Tensor, list[Contribution]], None] = lambda leaf, contributions: None,
    ) -> None:
        self._results, self._tasks, self._first_tasks = results, tasks, first_tasks
        self._last, self._columns, self._build = last, columns, build
        self._uses, self._keep = uses, keep
        self._contributions: dict[int, list[Contribution]] = {}
        self._leaves = {id(site.leaf): site.leaf for use in uses for site in use.sites}
        self._expected = Counter(id(site.leaf) for use in uses for site in use.sites)
        self._sums = any(task.row.sums or task.row.condenses for task in tasks)

    def visit(self, use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        """Note the cotangents at one use."""
        for site in use.take():
            key = id(site.leaf)
            if not self._sums and key not in self._first_tasks:
                self._results.finite_check.note(site.leaf, cotangents)
            contributions = self._contributions.setdefault(key, [])
            contributions.append((use, site, cotangents))
            if len(contributions) == self._expected[key]:
                self._hand_on(key)

    def flush(self) -> None:
        """End the sweep: account for leaves that it has reached at some of their uses only, or at none."""
        for key in list(self._contributions):
            if any(task.row.statistic not in OF_ROWS for task in self._tasks):
                self._contributions[key] += self._unreached(key)
            self._hand_on(key)
        for leaf in list(self._leaves.values()):
            self._results.add_zeros(leaf, self._columns, self._tasks, self._build)
            self._close(leaf)

    def _unreached(self, key: int) -> list[Contribution]:
        """Zeros for the uses that are missing: in every sweep a factor covers all uses together."""
        reached = {use for use, _, _ in self._contributions[key]}
        like = next(
            cotangent
            for _, _, cotangents in self._contributions[key]
            for cotangent in cotangents
            if cotangent is not None
        )
        return [
            unreached(use, site, like, len(like))
            for use in self._uses
            if use not in reached and any(id(site.leaf) == key for site in use.sites)
            for site in use.take()
            if id(site.leaf) == key
        ]

    def _hand_on(self, key: int) -> None:
        leaf = self._leaves[key]
        tasks = [*self._first_tasks.get(key, ()), *self._tasks]
        self._keep(leaf, self._contributions[key])
        self._results.add_contributions(leaf, self._contributions.pop(key), tasks, self._columns, self._build)
        self._close(leaf)

    def _close(self, leaf: Tensor) -> None:
        del self._leaves[id(leaf)]
        if self._last:
            self._results.finish(leaf)
