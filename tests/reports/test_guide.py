"""The guide to the page: its example runs, and says what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.selection import thorough

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "report.md"


@thorough
def test_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    monkeypatch.chdir(tmp_path)
    codes = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for code in codes:
        exec(compile(code, str(GUIDE), "exec"), names)
    assert capsys.readouterr().out.split() == re.findall(r"print\(.*\)  # (.*)", codes[0])[0].split()
    assert (tmp_path / "profile.html").stat().st_size < 2_000_000
