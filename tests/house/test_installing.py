"""What the project says about installing is true: commands, extras, versions."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from packprop.errors import install
from tests.house.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {*PROJECT["optional-dependencies"]}
FOLDERS = ("packprop", "docs", "benchmarks", "tests")


def written() -> list[Path]:
    """What people read: pages, and programs with their messages."""
    found = [path for folder in FOLDERS for end in ("py", "md") for path in (ROOT / folder).rglob(f"*.{end}")]
    return [*found, *ROOT.glob("*.md"), ROOT / "Makefile"]


def test_hints_name_the_folder_and_an_extra_that_is_there() -> None:
    """The package is on no index: `packprop[report]` installs nothing, `'.[report]'` in a checkout does."""
    named = 0
    for path in written():
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"""(?<!\w)packprop\[[a-z,]+\]""", text), path
        for extras in re.findall(r"""pip install (?:[-\w]+ )*["']\.\[([a-z,]+)\]""", text):
            assert {*extras.split(",")} <= EXTRAS, (path, extras)
            named += 1
    assert named > 10


def test_one_helper_says_how_in_errors() -> None:
    """In code `install("report")`; its output stands in docstrings and pages alone."""
    assert install("examples", "report") == "pip install '.[examples,report]'"
    asked = set()
    for path in (ROOT / "packprop").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        asked |= set(re.findall(r"""\binstall\(["'](\w+)["']\)""", text))
        code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
        if path.name != "errors.py":
            assert not re.search(r"pip install ['\"]?\.\[", code), path
    assert asked == {"examples", "frames", "lightning", "report", "scipy", "tensorboard", "transformers"}


def test_the_demo_installs_what_its_page_needs() -> None:
    target = re.search(r"^demo: (.*?) ##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert target is not None
    assert {"$(VENV)/.installed-examples", "$(VENV)/.installed-report"} == {*target[1].split()}


def test_the_read_me_says_what_was_measured_and_tested() -> None:
    """Sizes are those of `benchmarks.install_size`, versions those of `docs/versions.md`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = " ".join(readme.partition("## Install")[2].partition("\n## ")[0].split())
    sizes = json.loads((ROOT / "benchmarks/results/install_size.json").read_text(encoding="utf-8"))["sizes"]
    alone, page = sizes["library"], sizes["library, examples and page"]
    assert f"fetches {page['bytes'] / 1e6:.0f} MB, {page['torch'] / 1e6:.0f} MB of it PyTorch." in section
    assert f"The library alone (`pip install .`) fetches {alone['bytes'] / 1e6:.0f} MB" in section
    assert page["asked"] in section
    (tested,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"PyTorch {tested} on a CPU" in section
    versions = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    tried = re.findall(r"^\| 3\.11\.\d+ \| (\d+\.\d+)", versions, re.MULTILINE)
    assert {*tried} == {*re.findall(r"2\.\d+", section.partition("Python 3.11 with")[2])}
