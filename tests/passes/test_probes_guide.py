"""The code in the guide to probe rows runs, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "probes.md"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block, scope)
    (said,) = re.findall(r"print\(.*\)  # (.*)", block)
    assert capsys.readouterr().out.strip() == said
    assert scope["model"][0].weight.batch_dot_probes.shape == (200, 50)
