"""``docs/models.md``: what came of each family, from ``results/families-LIBRARY.json``."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.families.check import Outcome
from benchmarks.families.family import SAMPLES, Family
from benchmarks.measure import ROOT

RESULTS = ROOT / "benchmarks" / "results"

INTRODUCTION = f"""# Model families

Models as their libraries ship them, tiny and with random weights, in evaluation mode, {SAMPLES} samples each.
First order: `BatchGrad` and `BatchL2Grad` equal a loop over samples in plain autograd. Second order: each
column that `SqrtGGNMC` draws lies in the span of the sample's Jacobian, of all parameters together, and
`DiagGGNMC` and `KFAC` agree with these columns. Numbers are the largest relative error, in double
precision. Experts run as loops (`experts_implementation="eager"`), attention as it is written (`"eager"`).
Each refusal names its cause.

`python -m benchmarks.families` writes this page, with `pip install '.[models]'`. It leaves out models
that do not run by themselves.
"""

WORDS = {"right": "✓", "refused": "refused", "wrong": "**wrong**"}


def keep(found: Sequence[tuple[Family, Outcome, Outcome]]) -> None:
    """Write the results of each library down."""
    for library in {family.library for family, _, _ in found}:
        rows = [
            {"name": family.name, "first": [*first], "second": [*second]}
            for family, first, second in found
            if family.library == library and first.state != "fails"
        ]
        content = {"version": importlib.metadata.version(library), "rows": rows}
        path = RESULTS / f"families-{library}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")


def write() -> None:
    """Make the page from all results that are there."""
    results: dict[str, Any] = {
        path.stem.removeprefix("families-"): json.loads(path.read_text())
        for path in sorted(RESULTS.glob("families-*.json"))
    }
    every = [row for result in results.values() for row in result["rows"]]
    lines = [INTRODUCTION]
    lines.append("| | first order | second order |\n|---|---|---|")
    for state in WORDS:
        counts = [sum(row[order][0] == state for row in every) for order in ("first", "second")]
        lines.append(f"| {state} | {counts[0]} | {counts[1]} |")
    reasons: list[str] = []
    for library, result in results.items():
        lines.append(
            f"\n## {library} {result['version']}\n\n| family | first order | second order |\n|---|---|---|"
        )
        lines += [
            f"| {row['name']} | {_cell(row['first'], reasons)} | {_cell(row['second'], reasons)} |"
            for row in result["rows"]
        ]
    lines.append("")
    lines += [f"<sup>{place}</sup> {reason}\n" for place, reason in enumerate(reasons, 1)]
    (ROOT / "docs" / "models.md").write_text("\n".join(lines).rstrip("\n") + "\n")


def _cell(outcome: Sequence[str], reasons: list[str]) -> str:
    """A mark, with the error, or with the number of the reason."""
    state, detail = outcome
    if state == "right":
        return f"{WORDS[state]} {detail}"
    if detail not in reasons:
        reasons.append(detail)
    return f"{WORDS[state]}<sup>{reasons.index(detail) + 1}</sup>"
