"""The code in the guide to data sets runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from packprop import Result
from tests.distributed.processes import script
from tests.selection import thorough

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "datasets.md"


@thorough
def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    for block in blocks:
        if block.startswith("# torchrun"):
            script(f"import os\nos.chdir({str(tmp_path)!r})\n{block}", 2)
        else:
            exec(compile(block, str(PAGE), "exec"), scope)
    assert len(blocks) >= 5
    assert list((tmp_path / "runs" / "first").glob("checkpoint-*.json"))
    assert Result.load(tmp_path / "curvature-of-all.safetensors").samples == 1000
    assert Result.load(tmp_path / "curvature-of-shards.safetensors").samples == 1000
