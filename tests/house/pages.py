"""Pages of the documentation as programs: their blocks of Python, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def blocks_of(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def run(page: str, blocks: list[str]) -> dict[str, Any]:
    """Run blocks one after the other, and return the names that they leave; errors name the block."""
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names
