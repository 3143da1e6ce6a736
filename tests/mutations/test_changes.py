"""Changes are what they say: one place each, of a kind, in code that still parses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import KINDS, ROOT, chosen
from tests.mutations.changes import changes_of
from tests.selection import thorough

SOURCE = '''
"""a - b"""
Alias = int | None


def value(a: int | None, b: int = 1 - 2) -> float:
    total = 0
    if a is not None and not a < b:
        total += a.sum(0, keepdim=True)
        raise ValueError("a" + f"{a - b}")
    return -total * a.flatten(start_dim=-2) / 2 if a in b else Row(over_n=SUM, over_v=CAT[0])
'''
EXPECTED = [
    *("6 sign: - -> +", "8 comparison: is not -> is", "8 comparison: and -> or", "8 comparison: not  -> "),
    *("8 comparison: < -> <=", "9 merge: += -> -=", "9 merge: sum -> mean", "9 axis: 0 -> 1"),
    *("11 sign: - -> +", "11 sign: * -> /", "11 axis: -2 -> -1", "11 sign: / -> *"),
    *("11 comparison: in -> not in", "11 merge: SUM -> KEEP", "11 merge: CAT[0] -> CAT[1]"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.py"
    path.write_text(SOURCE)
    return path


def test_each_place_is_found_once(file: Path) -> None:
    found = changes_of(file.parent, file.name)
    assert [f"{each.line} {each.kind}: {each.old} -> {each.new}" for each in found] == EXPECTED


def test_a_change_changes_one_place(file: Path) -> None:
    for change in changes_of(file.parent, file.name):
        changed = change.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), change
        before, after = SOURCE.splitlines(), changed.splitlines()
        assert [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [change.line]


@thorough
def test_a_seed_draws_the_same_changes_of_all_kinds() -> None:
    drawn = chosen(ROOT, 8, 0)
    assert drawn == chosen(ROOT, 8, 0)
    assert [change.kind for change in drawn] == [*KINDS, *KINDS]
    assert drawn != chosen(ROOT, 8, 1)
