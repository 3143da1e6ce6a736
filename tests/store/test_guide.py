"""The code in the guide to stores runs, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "store.md"


def test_the_guide_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    printed = capsys.readouterr().out.splitlines()
    said = [line.split("# ", 1)[1] for block in blocks for line in block.splitlines() if "print(" in line]
    assert len(printed) == len(said) == 6
    for actual, expected in zip(printed, said, strict=True):
        assert expected.startswith(actual), (actual, expected)
    assert (scope["store"].samples, scope["store"].finished) == (100, True)
