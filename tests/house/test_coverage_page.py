"""docs/coverage.md is what the code says, and a pair that nobody tests is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cases import BY_NAME
from tests.house import coverage_page
from tests.house.coverage_page import CATALOGUE, COMMAND, PAGE, ROOT, Line, cell, cells, table
from tests.selection import thorough
from tests.versions import needs_every_case


@thorough
@needs_every_case
def test_the_page_is_what_the_code_says() -> None:
    """In a process of its own: it collects tests."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.house.coverage_page"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == PAGE.read_text(encoding="utf-8"), f"docs/coverage.md is stale: run `{COMMAND}`"


def test_a_pair_without_a_test_is_a_gap() -> None:
    line = Line("`linear`", [BY_NAME["linear-2d"]])
    with pytest.raises(SystemExit) as gaps:
        cells([line], {("BatchGrad", "linear-2d"): "tests/test_x.py::test_y[linear-2d]"})
    named = str(gaps.value)
    assert "DiagGGNExact on `linear`: linear-2d" in named
    assert "BatchGrad on" not in named
    with pytest.raises(SystemExit, match="no case"):
        cells([Line("`new_loss`")], {})


def test_marks() -> None:
    case = BY_NAME["l1"]
    covered = {(name, "l1"): f"tests/test_x.py::test_y[{name}-l1]" for name in ("BatchGrad", "DiagHessianMC")}
    line = Line("`l1_loss`", [case])
    exact, drawn, refused = (
        cell(line, name, covered) for name in ("BatchGrad", "DiagHessianMC", "DiagGGNExact")
    )
    assert exact is not None
    assert drawn is not None
    assert refused is not None
    assert (exact.symbol, drawn.symbol, refused.symbol) == ("✓", "≈", "✗")
    assert "zero wherever it exists" in refused.why
    # products are made without an error, and fail when they multiply
    late = cell(Line("`multi_margin_loss`", [BY_NAME["multi-margin"]]), "HMP", {})
    assert late is not None
    assert "multi_margin_loss_backward" in late.why


def test_extensions_that_differ_nowhere_share_a_column() -> None:
    line = Line("`linear`", [BY_NAME["linear-2d"]])
    known = {("`linear`", name): coverage_page.Cell("✓", "linear-2d", "test") for name in CATALOGUE}
    known["`linear`", "KFRA"] = coverage_page.Cell("✗", "linear-2d", why="it is no chain")
    text = list(table([line], known, "function"))
    assert text[2] == "| `linear` | `linear-2d` | ✓ | ✗<sup>1</sup> |"
    assert "1. it is no chain" in text
