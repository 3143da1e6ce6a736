"""What README.md shows is run, and what it says came out comes out."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from packprop import Profile, examples, extensions
from packprop.applications.reports import cli
from packprop.examples import load_digits
from tests.selection import thorough

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w/])-?\d[\d.]*(?:e-?\d+)?(?![\w/])")


def block(kind: str, start: str) -> str:
    """The one block of a kind that starts like this."""
    (found,) = (text for language, text in BLOCKS if language == kind and text.startswith(start))
    return found


def run_python(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "README.md", "exec"), names)


def test_first_example(capfd: pytest.CaptureFixture[str]) -> None:
    run_python(block("python", "import torch\nfrom packprop import backpack"), {})
    (shown,) = (text for language, text in BLOCKS if language == "text")
    assert capfd.readouterr().out == shown


@thorough
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Word by word, and number by number as far as training on another machine allows."""
    monkeypatch.chdir(tmp_path)
    shown = block("console", "$ packprop profile\n").partition("\n")[2]
    assert cli.main(["profile", "--no-page"]) == 0  # what is printed is the same
    printed = capfd.readouterr().out
    assert Profile.load("profile").total.ggn_trace_exact is not None
    for mine, yours in zip(printed.splitlines(), shown.splitlines(), strict=True):
        words, numbers = NUMBER.sub("#", mine).split(), NUMBER.findall(mine)
        assert words == NUMBER.sub("#", yours).split()
        for found, expected in zip(numbers, NUMBER.findall(yours), strict=True):
            # condition numbers, from labels that are sampled, are the furthest apart
            assert float(expected) / 2 <= float(found) <= 2 * float(expected), mine
    assert re.sub(r"\d", "", printed).count("KFAC") == 3


@thorough
def test_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The factory, the command and the three lines of Python, on a few digits."""
    images, classes = load_digits()
    monkeypatch.setattr(examples, "load_digits", lambda: (images[:20], classes[:20]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    code = block("python", "# my_model.py\n")
    Path("my_model.py").write_text(code)
    program, *arguments = shlex.split(block("console", "packprop profile my_model"))
    assert program == "packprop"
    assert cli.main(arguments) == 0
    from_shell = Profile.load("runs/first")
    names: dict[str, Any] = {}
    run_python(code, names)
    run_python(block("python", "import packprop\n"), names)
    from_python = Profile.load("profile")
    assert [layer.name for layer in from_python.layers] == [layer.name for layer in from_shell.layers]
    assert from_shell.samples == from_python.samples == 20
    assert f"{from_python}\n" in capfd.readouterr().out


@thorough
def test_the_page_on_curvature(capfd: pytest.CaptureFixture[str]) -> None:
    """Every block in turn; numbers as far as training on another machine allows."""
    page = (ROOT / "docs/guide/curvature.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    compared = 0
    for code, shown in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page, flags=re.DOTALL):
        exec(compile(code, "curvature.md", "exec"), names)
        printed = capfd.readouterr().out
        assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
        for mine, yours in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
            assert float(mine) == pytest.approx(float(yours), rel=0.3), printed
            compared += 1
    assert compared > 20


def test_every_extension_is_listed_with_its_attribute() -> None:
    rows = [line.split("|") for line in README.splitlines() if line.startswith("| `")]
    listed = {}
    for _, calls, attributes, *_ in rows:
        pairs = zip(re.findall(r"`(\w+)\(", calls), re.findall(r"`(\w+)`", attributes), strict=True)
        listed.update(pairs)
    there = {name: getattr(extensions, name) for name in extensions.__all__}
    expected = {name: kind.savefield for name, kind in there.items() if hasattr(kind, "savefield")}
    assert listed == expected


def test_the_page_on_low_precision(capfd: pytest.CaptureFixture[str]) -> None:
    """Its example runs, and its table has every extension with the precision that its values have."""
    page = (ROOT / "docs/guide/precision.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert blocks
    for code, shown in blocks:
        exec(compile(code, "precision.md", "exec"), {})
        assert capfd.readouterr().out == shown
    rows = [
        [cell.strip(" `") for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    listed = {name: (attribute, precision) for _, name, attribute, _, precision, _ in rows}
    expected = {}
    for name in {*extensions.__all__} - {"Extension", "Row"}:
        kind = getattr(extensions, name)
        precision = "that of the parameter" if kind.rounded else "float32"
        if issubclass(kind, (extensions.HMP, extensions.GGNMP, extensions.PCHMP)):
            precision = "that of the vectors"
        expected[name] = (kind.savefield, precision)
    assert listed == expected


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        if target not in {"docs/benchmarks.md", "docs/design.md"}:  # written elsewhere
            assert (ROOT / target).exists(), target
