"""What ``benchmarks.clipping`` and ``benchmarks.monitor`` found, as rows of tables."""

from __future__ import annotations

from typing import Any

from benchmarks.clipping import CONTESTANTS
from benchmarks.measure import MIB

Row = list[str]

CLIPPING = ["time over plain, and peak", *CONTESTANTS]
"""Heads of the table of clipped gradients."""

MOST = 1.01
"""The time that a loop with a monitor at every 100th step should take at most, over plain."""

MONITOR = ["time over plain", "plain step", "monitored step", "every 10th", "every 100th", f"at most {MOST}"]
"""Heads of the table of monitored steps."""


def rows_of_clipping(content: dict[str, Any]) -> list[Row]:
    """For each problem: how long each contestant's step takes, and what it allocates."""
    return [
        [record["problem"], *(_cell(record, name) for name in CONTESTANTS)] for record in content["records"]
    ]


def _cell(record: dict[str, Any], name: str) -> str:
    """One contestant on one problem; "gap" where it does not take the model."""
    if name not in record:
        return "gap"
    peak = record[name]["peak_bytes"]
    said = "" if peak is None else f", {peak / MIB:,.0f} MiB"
    return f"{record[name]['over_plain']['median']:.2f}{said}"


def rows_of_monitor(content: dict[str, Any]) -> list[Row]:
    """For each problem: what a monitored step takes, and loops with one at every 10th and 100th."""
    return [
        [
            problem["problem"],
            f"{1000 * problem['plain_seconds']:,.1f} ms",
            f"{problem['monitored_over_plain']:.2f}",
            *(f"{problem['every'][every]:.3f}" for every in ("10", "100")),
            "yes" if problem["every"]["100"] <= MOST else "**no**",
        ]
        for problem in content["problems"]
    ]
