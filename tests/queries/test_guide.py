"""The code in the guide to queries runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "influence.md"


def test_the_guide_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    assert len(blocks) == 8
    assert scope["found"].largest.identifiers.shape == (2, 5)
    assert scope["read"].largest.rows.equal(scope["found"].largest.rows)
    assert scope["near"].quantity == "grad_batch_projected"
    assert float(scope["exact"].residuals.max()) <= 1e-3
    assert float(scope["curved"].residuals.max()) <= 1e-3
    assert scope["rough"].data_readings <= scope["exact"].data_readings
    assert scope["stepped"].groups.shape == (2, 3)
    assert scope["alone"].shape == (100,)
    assert scope["during"].checkpoints == 3
    printed = capsys.readouterr().out
    assert "query 1" in printed
    assert "(F + 0.001 I)^-1, F: ekfac" in printed
