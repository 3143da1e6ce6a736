"""The site has a place for everything; told from its sources, without Sphinx. `make docs` checks the rest."""

from __future__ import annotations

import re
from importlib import import_module

import packprop
from tests.house.pages import ROOT

REFERENCE = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/reference").glob("*.md"))
)
SECTIONS = set(re.findall(r"^\.\. automodule:: ([\w.]+)$", REFERENCE, re.MULTILINE))
# Public modules that hold names of another section only.
ELSEWHERE = {"packprop.store": "packprop"}
# Packages that a user imports from, beside the modules at the top.
MORE = {"packprop", "packprop.monitor"}


def values_of(module: str) -> list[object]:
    held = import_module(module)
    return [getattr(held, name) for name in held.__all__]


def test_every_public_module_has_a_section() -> None:
    public = {*packprop._MODULES.values()} | MORE
    assert public - set(ELSEWHERE) == SECTIONS
    for module, section in ELSEWHERE.items():
        assert {id(value) for value in values_of(module)} <= {id(value) for value in values_of(section)}


def test_no_class_has_two_places() -> None:
    """Sphinx warns of a class that two sections show, unless one of them is the module that it is made in."""
    shown: dict[object, list[str]] = {}
    for section, options in re.findall(r"^\.\. automodule:: (\S+)\n((?: +:.*\n)*)", REFERENCE, re.MULTILINE):
        left_out = re.findall(r":exclude-members: (.*)", options)
        names = {*getattr(import_module(section), "__all__", ())} - {*re.findall(r"\w+", "".join(left_out))}
        for held in (getattr(import_module(section), name) for name in names):
            if isinstance(held, type) and held.__module__ != section:
                shown.setdefault(held, []).append(section)
    assert {held: places for held, places in shown.items() if len(places) > 1} == {}


def test_every_public_name_has_a_docstring() -> None:
    """Sphinx shows what has one, and `make docs` warns of a public name that it does not show."""
    bare = [
        f"{section}.{name}"
        for section in SECTIONS
        for name in getattr(import_module(section), "__all__", ())
        if not (getattr(import_module(section), name).__doc__ or "").strip()
    ]
    assert not bare


def test_every_page_is_in_the_list() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = {
        name for block in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for name in block.split()
    }
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    patterns = [name for name in listed if "*" in name]
    for page in pages:
        found = str(page) in listed or page.parts[0] == "reference" or any(page.match(p) for p in patterns)
        assert found or page.name == "index", page


def test_every_picture_of_a_page_has_words() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for words, target in re.findall(
            r"^!\[(.*?)\]\((.*?)\)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert words, f"{page}: {target} has nothing to be read out"
            assert (page.parent / target).exists(), target


def test_literals_end_where_words_do() -> None:
    """Sphinx takes two backquotes with a letter right behind them for the start of a literal."""
    for path in (ROOT / "packprop").rglob("*.py"):
        assert not re.findall(r"``[\w.]+``\w", path.read_text(encoding="utf-8")), path
