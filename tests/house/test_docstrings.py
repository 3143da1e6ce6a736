"""Docstrings say what a thing does or is: subject or verb first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house.pages import ROOT

PACKPROP = ROOT / "packprop"
OPENING = re.compile(r"(What|Which|Where|Whether|How|That|Whose|Who|When)\b")
ROOMS = sorted({path.relative_to(PACKPROP).parts[0] for path in PACKPROP.rglob("*.py")})


def openings(source: str) -> list[str]:
    """First lines of docstrings, and of the texts below assignments, that begin with a question word."""
    found = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            said = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str) and OPENING.match(said.value):
                found.append(said.value.splitlines()[0])
    return found


def files_of(room: str) -> list[Path]:
    return [PACKPROP / room] if room.endswith(".py") else sorted((PACKPROP / room).rglob("*.py"))


def found_in(room: str) -> dict[str, list[str]]:
    found = {str(path): openings(path.read_text(encoding="utf-8")) for path in files_of(room)}
    return {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_say_what_a_thing_does_or_is(room: str) -> None:
    assert found_in(room) == {}


def test_a_question_word_is_seen() -> None:
    assert openings('"""What it does."""\n') == ["What it does."]
    assert openings('def f():\n    """Whether so."""\n') == ["Whether so."]
    assert openings('LIMIT = 3\n"""How many."""\n') == ["How many."]
    assert openings('def f():\n    """Return whether so."""\n    x = ["What"]\n') == []
