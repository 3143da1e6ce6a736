"""The page on versions says what was measured, and the matrix is the one of the workflow."""

from __future__ import annotations

import json
import re

from benchmarks.matrix import PYTHONS, RESULTS, TORCHES, page_with
from tests.house.pages import ROOT


def test_the_page_has_the_results() -> None:
    text = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    assert page_with(text, json.loads(RESULTS.read_text(encoding="utf-8"))) == text


def test_the_workflow_tries_the_same() -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    pythons, torches = re.findall(r"^\s+(?:python|torch): \[(.*)\]$", workflow, re.MULTILINE)
    assert tuple(json.loads(f"[{pythons}]")) == PYTHONS
    assert tuple(json.loads(f"[{torches}]")) == TORCHES


def test_the_workflow_runs_targets_that_exist() -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"- run: make ([\w-]+)", workflow):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert (ROOT / ".ci/run").exists()
