"""Graphs in place of passes over batches: where it pays, and what it brought.

# NOTE [Where it pays]
To trace a pass takes as long as 5 to 50 ordinary ones, and up to a few seconds. What a replay saves is the time
between operations: half of a pass of a few milliseconds, next to nothing of a long one. So a kind of batches is
traced if a hundred or more are expected, of long passes if there are hundreds. A graph is compiled if the time
that this may save, a third of what the replays to come would take, is more than what it costs, which grows with
the number of operations. And a graph that is no faster than a pass is given up. All of it goes by times that
were measured, so that the last digits of values may differ from one run to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from packprop.compiled.replayer import Kind

MEASURED = 3
"""Passes, and replays, whose times are known before anything is decided by them."""

MANY = 100
"""Batches to come from which on a pass is traced."""

PASSES_TO_TRACE, TRACE_SECONDS = 50, 4.0
"""What tracing takes: so many passes, but no more than so long. ``benchmarks/results/compiled.json`` has 5 to
44 passes, and 0.05 to 3.2 s."""

BETWEEN_SECONDS, BETWEEN_SHARE = 0.005, 0.03
"""What a replay of a long pass is expected to save: the time between operations, and a share of the rest."""

FIXED_SECONDS, SECONDS_OF_OPERATION = 2.0, 0.035
"""What a compiler takes: ``benchmarks/results/compiled.json`` has 2 to 39 s for 32 to 1,478 operations."""

SAVED = 1 / 3
"""The share of a replay that a compiler is expected to save."""


class WhereItPays:
    """Says of each kind of batches whether it shall be traced and compiled; see NOTE [Where it pays].

    Args:
        left: How many batches are to come.
    """

    warns = False

    def __init__(self, left: Callable[[], int]) -> None:
        self._left = left

    def traces(self, kind: Kind) -> bool:
        """If many more are to come, and replays of them save more time than tracing takes."""
        if kind.passes <= MEASURED or self._left() < MANY:
            return False
        taken = kind.pass_seconds
        saved = min(taken / 2, BETWEEN_SECONDS + BETWEEN_SHARE * taken)
        return self._left() * saved >= min(PASSES_TO_TRACE * taken, TRACE_SECONDS)

    def compiles(self, kind: Kind) -> bool:
        """If it saves more time than it takes."""
        if kind.replays < MEASURED or kind.traced is None:
            return False
        costs = FIXED_SECONDS + SECONDS_OF_OPERATION * kind.traced.operations
        return self._left() * kind.replay_seconds * SAVED > costs

    def keeps(self, kind: Kind) -> bool:
        """If it is faster than passes are."""
        return kind.replays < MEASURED or kind.replay_seconds < kind.pass_seconds


def told(kinds: Sequence[Kind]) -> str | None:
    """What graphs have brought, in words; ``None`` if there was none."""
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
    return f"{passes:,} ordinary passes, {replays:,} replays of graphs, {made}: {_difference(net)}"


def _difference(seconds: float) -> str:
    return f"about {abs(seconds):.2g} s {'saved' if seconds >= 0 else 'lost'}"
