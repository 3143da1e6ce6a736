"""Pages that show programs and what they print: both are right."""

from __future__ import annotations

import re

import pytest

from tests.house.pages import ROOT, run

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
PAGES = ["docs/start.md", "docs/conventions.md", "docs/questions.md", "docs/reference/arguments.md"]
SHOWN = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_page(page: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Words are the same, and so are numbers, but for what rounding and other machines make of them."""
    parts = SHOWN.findall((ROOT / page).read_text(encoding="utf-8"))
    assert parts
    mark = "print('<next block>')"
    run(page, [f"{code}\n{mark}" for code, _ in parts])
    printed = capfd.readouterr().out.split("<next block>\n")
    for (code, shown), out in zip(parts, printed, strict=False):
        assert NUMBER.sub("#", out).split() == NUMBER.sub("#", shown).split(), code
        for mine, yours in zip(NUMBER.findall(out), NUMBER.findall(shown), strict=True):
            assert float(mine) == pytest.approx(float(yours), rel=0.05), out
