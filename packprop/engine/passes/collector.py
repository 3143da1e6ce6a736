"""Cotangents of one sweep, which packprop keeps until all uses of a leaf have theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from packprop.engine.algebra.monoid import ONE, Extent
from packprop.engine.algebra.statistics import OF_ROWS
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.passes.accumulator import Accumulator
from packprop.engine.passes.contributions import Build, Contribution, joint_structure, unreached
from packprop.engine.passes.request import Task


class Collector:
    """Collects the contributions of one sweep; once a leaf has all of them, adds them to the results.

    Args:
        results: Merges the statistics.
        uses: The uses that the sweep may reach.
        tasks: The tasks at every leaf.
        last: Whether all results are complete after this sweep.
        columns: The columns of the sweep.
        first_tasks: Tasks at some leaves, by identity, that come before ``tasks``.
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
        self._shows_in_results = any(task.shows_cotangents for task in tasks)
        self._seen = {key for key, own in first_tasks.items() if any(t.shows_cotangents for t in own)}

    def visit(self, use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        """Collect the cotangents at one use; take the statistics of leaves that are complete with it."""
        sites = use.take()
        if not self._shows_in_results:
            leaves = [site.leaf for site in sites if id(site.leaf) not in self._seen]
            self._results.finite_check.note(leaves, cotangents)
        for site in sites:
            key = id(site.leaf)
            contributions = self._contributions.setdefault(key, [])
            contributions.append((use, site, cotangents))
            if len(contributions) == self._expected[key]:
                self._hand_on(key)

    def flush(self) -> None:
        """End the sweep: account for leaves that it has reached only at some of their uses, or at none."""
        for key in list(self._contributions):
            if any(task.row.statistic not in OF_ROWS for task in self._tasks):
                self._contributions[key] += self._unreached(key)
            self._hand_on(key)
        for leaf in list(self._leaves.values()):
            self._results.add_zeros(leaf, self._columns, self._tasks, self._build)
            self._close(leaf)

    def _unreached(self, key: int) -> list[Contribution]:
        """Return zeros for the missing uses: in every sweep a factor covers all uses together."""
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
