"""A page of what a GPU has shown; without results of one there is no page."""

from __future__ import annotations

from typing import Any

from benchmarks.matrix import written_anew
from benchmarks.run import Record


def outcome(record: Record) -> str:
    """Return ``"error"``, ``"skipped"``, ``"no"`` for a check that failed, or ``"done"``.

    >>> outcome({"agree": False}), outcome({"failed": 0}), outcome({"error": "out of memory"})
    ('no', 'done', 'error')
    """
    for key in ("error", "skipped"):
        if record.get(key) and not isinstance(record[key], int):
            return key
    checks = [record[key] for key in ("agree", "budgets_held", "planned_again") if key in record]
    return "done" if all(checks) and not record.get("failed") else "no"


BEGIN = "<!-- from benchmarks/results/gpu/ -->"


def page_with(text: str, found: dict[str, Record]) -> str:
    """Return a page with its tables written anew."""
    return written_anew(text, BEGIN, tables(found))


def tables(found: dict[str, Record]) -> str:
    """Return a table for each step, in Markdown.

    Args:
        found: The contents of the steps' files, by step.

    Raises:
        ValueError: If one of them comes from a CPU, or from small sizes.
    """
    places = [each["environment"] for each in found.values()]
    if not places or any(place["device"] == "cpu" or place["small"] for place in places):
        raise ValueError("a page is made of results of a GPU in full size; these are not")
    place = places[0]
    commit = f"commit {place['commit'][:8]}" if place["commit"] else "commits beside the rows"
    lines = [
        f"Measured on {place['gpu']}, CUDA {place['cuda']}, PyTorch {place['versions']['torch']} ({commit}).",
    ]
    for each in found.values():
        title = each["title"]
        lines += ["", f"### {title[0].upper()}{title[1:]}", "", *_table(each["cases"])]
    return "\n".join(lines)


def _table(cases: dict[str, Record]) -> list[str]:
    """Return rows for cases; a column for each figure that a case has, and for each part of one."""
    rows = {name: _figures(record) for name, record in cases.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return [
        f"| case | {' | '.join(columns)} |",
        f"| :-- |{' --: |' * len(columns)}",
        *(f"| {name} | {' | '.join(row.get(c, '') for c in columns)} |" for name, row in rows.items()),
    ]


SHOWN = (
    *("programs", "passed", "failed", "refused", "skipped", "agree", "tolerance", "largest_difference"),
    *("measured_over_predicted", "budgets_held", "planned_again", "plain_seconds", "time_over_plain"),
    *("device_over_plain", "peak_over_plain", "kernels", "copies", "synchronizations", "operations"),
    *("difference", "commit"),
)


def _figures(record: Record) -> dict[str, str]:
    found = {"outcome": outcome(record)}
    for key in SHOWN:
        value, title = record.get(key), key.replace("_", " ")
        if isinstance(value, dict) and key != "refused":
            found |= {f"{title}, {part}": _text(each) for part, each in value.items() if part != "plain"}
        elif value is not None and not isinstance(value, dict):
            found[title] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shown(value)


def shown(value: Any) -> str:
    """Format a figure, or several, to three digits."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
