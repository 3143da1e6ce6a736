"""Graphs in place of passes over batches, if that pays.

# NOTE [Where it pays]
Tracing a pass takes as long as 5 to 50 ordinary ones, and up to a few seconds. A replay saves the time between
operations: half of a pass of a few milliseconds, almost nothing of a long one. So packprop traces a kind of
batches if it expects a hundred or more, or hundreds with long passes. It compiles a graph if this may save more
time than it costs: it may save a third of the time of the replays to come, and the cost grows with the number
of operations. It drops a graph that is no faster than a pass. All of this follows measured times, so the last
digits of values may differ from one run to the next. A replay runs no Python code: where model or loss change
something around them, such as a global counter, import a module of the user as they run, or call ``globals()``,
packprop traces nothing. Globals that they read, and what they read of classes and modules of the user, are
compared with those of the first trace before each replay; while one differs, batches take ordinary passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from packprop.applications.compiled.replayer import Kind, Policy

MEASURED = 3
"""Passes, and replays, with known times before any decision."""

MANY = 100
"""packprop traces a pass only if at least so many batches are still to come."""

PASSES_TO_TRACE, TRACE_SECONDS = 50, 4.0
"""The time of tracing: so many passes, but no more than so long. ``benchmarks/results/compiled.json`` has 5 to
44 passes, and 0.05 to 3.2 s."""

BETWEEN_SECONDS, BETWEEN_SHARE = 0.005, 0.03
"""The expected savings of a replay of a long pass: the time between operations, and a share of the rest."""

FIXED_SECONDS, SECONDS_OF_OPERATION = 2.0, 0.035
"""The time of a compiler: ``benchmarks/results/compiled.json`` has 2 to 39 s for 32 to 1,478 operations."""

SAVED = 1 / 3
"""The share of a replay that a compiler probably saves."""


class WhereItPays(Policy):
    """Decides for each kind of batches whether to trace and compile it; see NOTE [Where it pays].

    Args:
        left: The number of batches to come.
        changes: Tells whether code of model or loss changes something that does not belong to them.
        around: Describes what their code reads, and does not belong to them.
    """

    warns = False

    def __init__(
        self, left: Callable[[], int], changes: Callable[[], bool], around: Callable[[], Any] = tuple
    ) -> None:
        self._left, self._changes, self._around = left, functools.cache(changes), around
        self._traced_around: Any = None

    def traces(self, kind: Kind) -> bool:
        """Trace if many more are to come, and their replays save more time than tracing takes."""
        if kind.passes <= MEASURED or self._left() < MANY:
            return False
        taken = kind.pass_seconds
        saved = min(taken / 2, BETWEEN_SECONDS + BETWEEN_SHARE * taken)
        pays = self._left() * saved >= min(PASSES_TO_TRACE * taken, TRACE_SECONDS)
        if not pays or self._changes():
            return False
        if self._traced_around is None:
            self._traced_around = self._around()
        return self.holds()

    def holds(self) -> bool:
        """Tell whether all that is around is as it was in the first trace."""
        return bool(self._around() == self._traced_around)

    def compiles(self, kind: Kind) -> bool:
        """Compile if it saves more time than it takes."""
        if kind.replays < MEASURED or kind.traced is None:
            return False
        costs = FIXED_SECONDS + SECONDS_OF_OPERATION * kind.traced.operations
        return self._left() * kind.replay_seconds * SAVED > costs

    def keeps(self, kind: Kind) -> bool:
        """Keep a graph until its time is known, and then if it is faster than passes."""
        return kind.replays < MEASURED or kind.replay_seconds < kind.pass_seconds


def told(kinds: Sequence[Kind]) -> str | None:
    """Describe the effect of graphs; return ``None`` if there was none."""
    traced = [kind for kind in kinds if kind.traced is not None]
    if not traced:
        return None
    replays = sum(kind.replays for kind in traced)
    passes = sum(kind.passes for kind in kinds)
    begun = sum(kind.traced.seconds for kind in traced if kind.traced is not None)
    compiled = [kind.runner.seconds for kind in traced if kind.runner is not None and kind.runner.seconds]
    saved = sum(
        kind.replays * (kind.pass_seconds - kind.replay_seconds)
        for kind in traced
        if kind.replays and math.isfinite(kind.pass_seconds)
    )
    made = f"traced in {begun:.2g} s" + (f", compiled in {sum(compiled):.2g} s" if compiled else "")
    net = saved - begun - sum(compiled)
    pays = f"about {abs(net):.2g} s {'saved' if net >= 0 else 'lost'}"
    return f"{passes:,} ordinary passes, {replays:,} replays of graphs, {made}: {pays}"
