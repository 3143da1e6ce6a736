"""The changes that the page on additions walks through are those that were made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/adding.md").read_text(encoding="utf-8")


def hunks() -> list[tuple[str, str]]:
    """A file, and lines that the page says were added to it."""
    shown = []
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        for name, lines in re.findall(r"^\+\+\+ b/(\S+)\n((?:\+(?!\+\+).*\n)+)", block, re.MULTILINE):
            shown.append((name, "".join(f"{line[1:]}\n" for line in lines.splitlines())))
    return shown


@pytest.mark.parametrize(("name", "added"), hunks())
def test_lines_of_a_diff_stand_in_their_file(name: str, added: str) -> None:
    assert added in (ROOT / name).read_text(encoding="utf-8")


def test_every_kind_of_change_is_walked_through() -> None:
    kinds = re.findall(r"^## An? (.*)$", PAGE, re.MULTILINE)
    assert kinds == ["function", "loss", "extension", "column of the profile"]
    assert len(hunks()) >= 12
    assert len(re.findall(r"```diff", PAGE)) == len(kinds)
