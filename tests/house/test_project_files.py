"""What the repository says of itself beside the code: its badges, how to cite it, its templates."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from types import ModuleType

import pytest

from tests.house.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def badges() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_badges", ROOT / "docs" / "make_badges.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_badges_say_what_the_project_says(badges: ModuleType) -> None:
    for name, said in badges.facts().items():
        drawn = (badges.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == badges.badge(*said), "python docs/make_badges.py draws them anew"
        assert f"![{' '.join(said)}](docs/images/badges/{name}.svg)" in README
    assert {path.stem for path in badges.FOLDER.iterdir()} == set(badges.facts())


def test_a_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == PROJECT["version"]
    assert f"name: {PROJECT['authors'][0]['name']}" in citation
    assert f"license: {PROJECT['license']}" in citation


def test_each_release_has_a_page() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for release in ["unreleased", *re.findall(r"^## (\d+\.\d+)\b", changes, re.MULTILINE)]:
        assert f"docs/changes/{release}.md" in changes
        assert (ROOT / "docs" / "changes" / f"{release}.md").exists()


def test_commands_of_the_templates_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in (ROOT / ".github").rglob("*.md"):
        for target in re.findall(r"`make ([\w-]+)`", path.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
