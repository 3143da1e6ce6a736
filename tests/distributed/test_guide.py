"""The table of the guide is what runs on two processes give."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import needs_groups
from tests.distributed.works_where import table
from tests.selection import thorough

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/distributed.md"


@thorough
@needs_groups
def test_the_table_says_what_works_where() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8")
