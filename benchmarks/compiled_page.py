"""What ``python -m benchmarks.compiled`` found, as a section of the page and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.run import Record

CONTESTANTS = {
    "plain_compiled": ("plain, compiled", "#7f7f7f", "|"),
    "backpack": ("BackPACK", "#e69f00", "o"),
    "eager": ("packprop", "#009e73", "*"),
    "replayed": ("packprop, replayed", "#56b4e9", "s"),
    "compiled": ("packprop, compiled", "#0072b2", "D"),
}
"""What each is called on the page, its colour and its marker."""


def title_of(record: Record) -> str:
    """A problem and what is asked of it."""
    return f"{record['problem']}: {', '.join(record['asked'])}"


def rows_of(records: Sequence[Record]) -> list[list[str]]:
    """Times over plain, and what it took to begin, a row for each record."""

    def ratio(record: Record, name: str) -> str:
        found = record.get(f"{name}_over_plain")
        return "" if found is None else f"{found['median']:.2f}"

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} s"

    return [
        [
            title_of(record),
            f"{1e3 * record['plain_seconds']['median']:.2f} ms",
            *(ratio(record, name) for name in CONTESTANTS),
            str(record["replayed_operations"] or ""),
            seconds(record["replayed_trace_seconds"]),
            seconds(record["compiled_compile_seconds"]),
        ]
        for record in records
    ]


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw times over plain, a row of marks for each record."""
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.42 * len(records)), layout="constrained")
    for name, (label, colour, marker) in CONTESTANTS.items():
        found = [
            (record[f"{name}_over_plain"]["median"], row)
            for row, record in enumerate(records)
            if f"{name}_over_plain" in record
        ]
        style: dict[str, Any] = dict(color=colour, marker=marker, linestyle="", label=label)
        axes.plot(
            *zip(*found, strict=True), markersize=11 if marker in "*|" else 7, markeredgewidth=1.5, **style
        )
    axes.axvline(1, color="#999999", linewidth=1, zorder=0)
    axes.set_yticks(range(len(records)), [title_of(record) for record in records])
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time over plain")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(CONTESTANTS), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
