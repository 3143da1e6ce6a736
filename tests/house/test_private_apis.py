"""Everything private of PyTorch that packprop leans on: where it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "packprop"

# Private name -> the files that may mention it. Each says beside it why nothing public will do.
PRIVATE = {
    "_get_current_graph_task_keep_graph": {"tape.py"},
    "_input_metadata": {"graph.py"},
    "_sequence_nr": {"eager/reach.py"},
    "_backward_hooks": {"eager/reach.py", "memory.py"},
    "_saved_training": {"nodes.py"},
    "_saved_weight": {"nodes.py"},
    "_forward_cls": {"nodes.py"},
    "_version": {"memory.py"},
    "_use_count": {"memory.py"},
    "_storage_Use_Count": {"memory.py"},
    "_cdata": {"memory.py"},
    "_pytree": {"eager/pieces.py"},
    "_linear_pointwise": {"kernels.py"},
    "_subclasses": {"plan.py"},
    "_python_dispatch": {"memory.py"},
}
# The modules on the way to them, and one function of Python's own.
ON_THE_WAY = {"_C", "_autograd", "_getframe"}


def spellings(tree: ast.Module) -> Iterator[str]:
    """Every name that is imported or looked up as an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.Import(names):
                yield from (part for alias in names for part in alias.name.split("."))
            case ast.ImportFrom(module, names):
                yield from (module or "").split(".")
                yield from (alias.name for alias in names)


def own_names(tree: ast.Module) -> Iterator[str]:
    """Every name that is given here."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.arg(name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def private_of_others(sources: dict[str, str]) -> dict[str, set[str]]:
    """Private names that the files use but do not give, and which files do."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    own = {name for tree in trees.values() for name in own_names(tree)} - PRIVATE.keys()
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in spellings(tree):
            private = name.startswith("_") and not name.startswith("__")
            if private and name not in own | ON_THE_WAY:
                found.setdefault(name, set()).add(file)
    return found


def test_private_names_stand_where_the_table_says() -> None:
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")
    }
    assert private_of_others(sources) == PRIVATE, (
        "a private name of another library came, went or moved: find a public one, or give it a row in "
        "PRIVATE, a reason beside its one use, and a test below"
    )


def test_the_search_finds_private_names() -> None:
    text = "import torch\nfrom torch._C import _x\nclass A:\n    def _own(self): return torch._y + x._version\n"
    assert private_of_others({"a.py": text}) == {"_x": {"a.py"}, "_y": {"a.py"}, "_version": {"a.py"}}


# The design page speaks of the code as it is


DESIGN = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")


def test_the_design_page_lists_private_names() -> None:
    rows = {
        match[1].rpartition(".")[2]: set(re.findall(r"`([\w/]+\.py)`", match[2]))
        for match in re.finditer(r"^\| `([\w.]+)` \| ([^|]*) \|", DESIGN, re.MULTILINE)
    }
    assert {name: files for name, files in rows.items() if name in PRIVATE} == PRIVATE


def test_the_design_page_lists_notes() -> None:
    written = {
        (title, path.relative_to(PACKAGE).as_posix())
        for path in PACKAGE.rglob("*.py")
        for title in re.findall(r"# NOTE \[(.+?)\]", path.read_text(encoding="utf-8"))
    }
    listed = set(re.findall(r"^\| (\w[\w ]+) \| `([\w/]+\.py)` \|", DESIGN, re.MULTILINE))
    assert listed == written


def test_the_design_page_lists_files() -> None:
    house = DESIGN.split("packprop/\n")[1].split("```")[0]
    listed = set(re.findall(r"\w+\.py|\w+/", house))
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    folders = {f"{file.parts[0]}/" for file in files if len(file.parts) > 1}
    on_top = {file.name for file in files if len(file.parts) == 1}
    rows = {file.name for file in files if file.parts[0] == "extensions"} - {"__init__.py"}
    assert listed == folders | on_top | rows
