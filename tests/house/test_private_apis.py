"""Everything private of PyTorch that packprop leans on: where it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.house.test_floors import FLOORS, in_storey, read_packprop
from tests.versions import needs_recent

PACKAGE = Path(__file__).resolve().parents[2] / "packprop"

# Private name -> the files that may mention it, by their paths in their storey. Each says beside it why nothing
# public will do.
PRIVATE = {
    "_get_current_graph_task_keep_graph": {"recording/marks.py"},
    "_input_metadata": {"functions/nodes.py"},
    "_sequence_nr": {"functions/nodes.py"},
    "_backward_hooks": {"tensors/hooks.py"},
    "_forward_cls": {"functions/nodes.py"},
    "_top_saved_tensors_default_hooks": {"eager/pieces.py"},
    "_get_current_function_mode_stack": {"recording/recorder.py"},
    "_post_accumulate_grad_hooks": {"tensors/hooks.py"},
    "_fsdp_param_group": {"tensors/sharding.py"},
    "_unsharded_param": {"tensors/sharding.py"},
    "_linear_pointwise": {"algebra/kernels.py"},
}
# Names with an underscore that PyTorch's own documentation shows how to use: files, and the page.
SAVED = "notes/autograd.html#saved-tensors"
DOCUMENTED = {
    "_saved_dim": ({"graph/reorderings.py"}, SAVED),
    "_saved_indices": ({"graph/reorderings.py"}, SAVED),
    "_saved_reduction": ({"functions/losses/read.py"}, SAVED),
    "_raw_saved_tensors": ({"functions/saved.py"}, SAVED),
    "_saved_training": ({"functions/nodes.py", "graph/walk.py"}, SAVED),
    "_saved_weight": ({"functions/nodes.py"}, SAVED),
    "_version": ({"tensors/state.py"}, "generated/torch.autograd.grad_mode.inference_mode.html"),
    "_subclasses": ({"memory/dry_run.py"}, "library.html#torch.library.register_fake"),
    "_python_dispatch": (
        {"memory/live.py", "compiled/effects.py", "monitor/own_rank.py"},
        "library.html#torch.library.register_torch_dispatch",
    ),
    "_inductor": ({"compiled/compiler.py"}, "generated/torch.compile.html"),
    "_dynamo": (
        {"compiled/compiler.py"},
        "user_guide/torch_compiler/torch.compiler_custom_backends.html#composable-backends",
    ),
}
DOCUMENTATION = "https://docs.pytorch.org/docs/stable/"
USED = PRIVATE | {name: files for name, (files, _) in DOCUMENTED.items()}
# The modules on the way to them, and two names of Python's own.
ON_THE_WAY = {"_C", "_autograd", "_getframe", "_fields"}


def spellings(tree: ast.Module) -> Iterator[str]:
    """Every name that is imported, looked up as an attribute, or given to an argument."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Import(names):
                yield from (part for alias in names for part in alias.name.split("."))
            case ast.ImportFrom(module, names):
                yield from (module or "").split(".")
                yield from (alias.name for alias in names)
            case ast.Call(ast.Name("getattr" | "hasattr"), [_, ast.Constant(str(name)), *_]):
                yield name
            case ast.Call(ast.Attribute(attr="attrgetter"), [ast.Constant(str(name))]):
                yield name


def own_names(tree: ast.Module) -> Iterator[str]:
    """Every name that is given here."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.arg(name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def private_of_others(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Private names that the files use but do not give, and which files do."""
    own = {name for tree in trees.values() for name in own_names(tree)} - USED.keys()
    own |= ON_THE_WAY
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in spellings(tree):
            private = name.startswith("_") and not name.startswith("__")
            if private and name not in own:
                found.setdefault(name, set()).add(file)
    return found


def test_there_are_no_more_than_there_were() -> None:
    """A name that comes has to take another one's place."""
    assert len(PRIVATE) <= 11


def test_private_names_stand_where_the_table_says() -> None:
    trees = {f"{in_storey(file.name)}.py": file.tree for file in read_packprop().files.values()}
    assert private_of_others(trees) == USED, (
        "a private name of another library came, went or moved: find a public one, or give it a row in "
        "PRIVATE, a reason beside its one use, and a test in test_private_behaviour.py"
    )


@needs_recent
def test_the_documentation_shows_what_counts_as_documented() -> None:
    """As far as it is written in docstrings, which its pages are made of; the others are pages of their own."""
    shown = {
        "_version": torch.inference_mode,
        "_subclasses": torch.library.register_fake,
        "_python_dispatch": torch.library.register_torch_dispatch,
        "_inductor": torch.compile,
    }
    for name, documented in shown.items():
        assert name in str(documented.__doc__), name


def test_the_search_finds_private_names() -> None:
    text = "import torch\nfrom torch._C import _x\n"
    text += "class A:\n    def _own(self): return torch._y(_z=1) + x._version, operator.attrgetter('_a')\n"
    found = {name: {"a.py"} for name in ("_x", "_y", "_z", "_version", "_a")}
    assert private_of_others({"a.py": ast.parse(text)}) == found


# The pages of the design and of the notes speak of the code as it is


DESIGN, NOTES = (
    (PACKAGE.parent / "docs" / name).read_text(encoding="utf-8") for name in ("design.md", "notes.md")
)


def test_the_notes_page_lists_private_names() -> None:
    rows = {
        match[1].rpartition(".")[2]: set(re.findall(r"`([\w/]+\.py)`", match[2]))
        for match in re.finditer(r"^\| `([\w.]+)` \| ([^|]*) \|", NOTES, re.MULTILINE)
    }
    assert {name: files for name, files in rows.items() if name in USED} == USED


def test_the_notes_page_says_where_names_are_documented() -> None:
    """Names with an underscore that PyTorch documents stand in a table of their own, with the page."""
    parts = NOTES.partition("Names with an underscore that PyTorch documents")
    for name, (_, page) in DOCUMENTED.items():
        assert re.search(
            rf"^\| `[\w.]*{name}` \|.*\]\({DOCUMENTATION}{re.escape(page)}\)", parts[2], re.MULTILINE
        )
    assert not [name for name in PRIVATE if f"{name}`" in parts[2]]


def test_the_notes_page_lists_notes() -> None:
    written = {
        (title, in_storey(path.relative_to(PACKAGE).as_posix()))
        for path in PACKAGE.rglob("*.py")
        for title in re.findall(r"# NOTE \[(.+?)\]", path.read_text(encoding="utf-8"))
    }
    listed = set(re.findall(r"^\| (\w[\w ]+) \| `([\w/]+\.py)` \|", NOTES, re.MULTILINE))
    assert listed == written


def test_the_design_page_lists_rooms() -> None:
    """In the order of the floors, each with one line."""
    listed = re.findall(r"^\| `(\w+)(?:\.py|/)` \| [^|]+ \|$", DESIGN, re.MULTILINE)
    places = [place for floor in FLOORS for place in floor if place != "__init__"]
    assert sorted(listed) == sorted(places)
    floors = [next(number for number, floor in enumerate(FLOORS) if place in floor) for place in listed]
    assert floors == sorted(floors)


def test_files_that_the_pages_name_are_there() -> None:
    """Files that the pages for contributors speak of."""
    root = PACKAGE.parent
    pages = (
        DESIGN
        + NOTES
        + "".join((root / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/adding.md"))
    )
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|json))`", pages))
    assert len(named) > 20
    bases = (root, root / "docs", PACKAGE, PACKAGE / "engine", PACKAGE / "applications")
    missing = {name for name in named if not any((base / name).exists() for base in bases)}
    assert missing == set()
