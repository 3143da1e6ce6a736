"""Replays of traced graphs in place of passes over batches, if that saves time.

# NOTE [Where it pays]
Tracing a pass takes as long as 5 to 50 ordinary ones, and up to a few seconds. A replay saves the time between
operations: half of a pass of a few milliseconds, almost nothing of a long one. So packprop traces a kind of
batches if it expects a hundred or more of them, or hundreds if their passes are long. It compiles a graph if
this may save more time than it costs: it may save a third of the time of the replays to come, and the cost
grows with the number of operations. It drops a graph that is no faster than a pass. All of this follows
measured times, so the last digits of values may differ from one run to the next. A replay runs no Python code.
So packprop traces nothing if the model or the loss changes something around it, such as a global counter,
imports a module of the user as it runs, or calls ``globals()``. Before each replay, it compares the globals
that they read, and what they read of the user's classes and modules, with the values in the first trace; while
one differs, batches take ordinary passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from packprop.applications.compiled.replayer import Kind, Policy

MEASURED = 3
"""The number of passes, or replays, that packprop measures before it decides."""

MANY = 100
"""The least number of batches to come for which packprop traces a pass."""

PASSES_TO_TRACE, TRACE_SECONDS = 50, 4.0
"""The expected time of tracing, in passes, and its limit. ``benchmarks/results/compiled.json`` has 5 to 44
passes, and 0.05 to 3.2 s."""

BETWEEN_SECONDS, BETWEEN_SHARE = 0.005, 0.03
"""The expected savings of a replay of a long pass: the time between operations, and a share of the rest."""

FIXED_SECONDS, SECONDS_OF_OPERATION = 2.0, 0.035
"""The time of a compiler: ``benchmarks/results/compiled.json`` has 2 to 39 s for 32 to 1,478 operations."""

SAVED = 1 / 3
"""The expected share of a replay's time that a compiler saves."""


class WhereItPays(Policy):
    """Decides for each kind of batches whether to trace and compile it; see NOTE [Where it pays].

    Args:
        left: Returns the number of batches to come.
        changes: Tells whether code of model or loss changes something that does not belong to them.
        around: Describes the values that their code reads, and that do not belong to them.
    """

    warns = False

    def __init__(
        self, left: Callable[[], int], changes: Callable[[], bool], around: Callable[[], Any] = tuple
    ) -> None:
        self._left, self._changes, self._around = left, functools.cache(changes), around
        self._traced_around: Any = None

    def traces(self, kind: Kind) -> bool:
        """Tell whether many batches are to come, whose replays save more time than tracing takes."""
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
        """Tell whether the values around the code are those of the first trace."""
        return bool(self._around() == self._traced_around)

    def compiles(self, kind: Kind) -> bool:
        """Tell whether compiling saves more time than it takes."""
        if kind.replays < MEASURED or kind.traced is None:
            return False
        costs = FIXED_SECONDS + SECONDS_OF_OPERATION * kind.traced.operations
        return self._left() * kind.replay_seconds * SAVED > costs

    def keeps(self, kind: Kind) -> bool:
        """Tell whether to keep a graph: until its time is known, and then if it is faster than passes."""
        return kind.replays < MEASURED or kind.replay_seconds < kind.pass_seconds


def told(kinds: Sequence[Kind]) -> str | None:
    """Describe the effect of replayed graphs; return ``None`` if packprop traced none."""
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
