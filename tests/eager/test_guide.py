"""The code in the guide to `eager_backward` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "eager.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    assert scope["loss"].isfinite()
