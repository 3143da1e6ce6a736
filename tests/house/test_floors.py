"""Imports go down, and each file knows only what its floor may know.

The rules read the source with `ast` and run nothing. Each is a function from a house (the parsed
files) to sentences that name its faults; a house in order has none.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first, as in CONTRIBUTING.md: folders, and the files that stand beside them. What stands on a floor may
# import its own floor and those below it.
ENGINE = (
    ("errors",),
    ("tensors",),
    ("algebra",),
    ("types",),
    ("functions",),
    ("recording",),
    ("graph",),
    ("samples",),
    ("curvature",),
    ("passes",),
    ("extensions",),
    ("memory",),
    ("distributed",),
    ("user_pass",),
    ("context",),
    ("clipped", "eager"),
)
APPLICATIONS = (
    ("compiled", "store"),
    ("dataset",),
    ("examples", "queries"),
    ("reports",),
    ("monitor",),
    ("integrations",),
    ("compat", "testing"),
)
FLOORS = (*ENGINE, *APPLICATIONS, ("__init__",))

# Files that offer names which a higher floor holds: these are imported when they are first asked for, from a
# module that a table names. Only type checkers read an import of them.
LATE = {("extensions/__init__", "compat/averaged/__init__")}
MODULE = re.compile(r"\w+(\.\w+)+")

# Who may mention torch.autograd, and what for.
AUTOGRAD = {
    "functions": "reads what nodes of the graph have saved, and calls them by themselves",
    "recording": "leaves uses on the nodes of the graph, and runs parts of the forward pass again",
    "graph": "walks the graph and sweeps through it",
    "samples": "feeds samples in at the losses, and follows their rows",
    "curvature": "feeds columns in, and differentiates twice",
    "passes/gradient": "sweeps the gradient where no pass of the user's does",
    "memory": "runs a step without data",
    "context": "takes over the backward pass of the user",
    "user_pass": "runs it for some inputs alone",
    "compat": "hands gradients at modules to extensions written for them, and goes along chains of nodes",
    "eager": "takes the gradient of a branch at once",
    "testing": "is the loop that results are compared with",
}
# Who may do so only beside a comment `# NOTE [Autograd ...]` that says why nothing lower will do.
AUTOGRAD_WITH_NOTE = ("algebra",)
NOTE = re.compile(r"^\s*# NOTE \[[^\]]*autograd[^\]]*\]", re.IGNORECASE | re.MULTILINE)

# Libraries for the same job: what packprop is measured against, not what it is made of.
PEERS = {
    "asdfghjkl",
    "asdl",
    "backpack",
    "cockpit",
    "curvlinops",
    "functorch",
    "laplace",
    "nngeometry",
    "opacus",
    "pyhessian",
    "vivit",
}


@dataclass(frozen=True)
class File:
    """One source file; its name is its path below the package, without the suffix."""

    name: str
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class House:
    """The source files of a package, by name."""

    package: str
    files: dict[str, File]
    imports: dict[str, Sequence[tuple[int, str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> House:
        files = {}
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).with_suffix("").as_posix()
            text = path.read_text(encoding="utf-8")
            files[name] = File(name, text, ast.parse(text, str(path)))
        return cls(root.name, files)

    def name_of(self, module: str) -> str | None:
        """The file of a dotted name, for `packprop.tape` and `packprop.tape.record` alike."""
        package, *parts = module.split(".")
        if package != self.package:
            return None
        for end in range(len(parts), -1, -1):
            stem = parts[:end]
            for name in ("/".join(stem), "/".join([*stem, "__init__"])):
                if name in self.files:
                    return name
        return None

    def modules_imported(self, file: File) -> Sequence[tuple[int, str]]:
        """Line and absolute dotted name of every import, wherever in the file it stands; searched for once."""
        if file.name not in self.imports:
            self.imports[file.name] = [*self._modules_imported(file)]
        return self.imports[file.name]

    def _modules_imported(self, file: File) -> Iterator[tuple[int, str]]:
        folder = [self.package, *file.name.split("/")[:-1]]
        for node in ast.walk(file.tree):
            match node:
                case ast.Import(names):
                    yield from ((node.lineno, alias.name) for alias in names)
                case ast.ImportFrom(module, names, level):
                    above = folder[: len(folder) - level + 1] if level else []
                    origin = ".".join([*above, *([module] if module else [])])
                    yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
                case ast.Call(
                    func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(module)), *_],
                ):
                    level = len(module) - len(module.lstrip("."))
                    above = folder[: len(folder) - level + 1] if level else []
                    yield node.lineno, ".".join([*above, module.lstrip(".")])

    def edges(self) -> Iterator[tuple[File, int, str]]:
        """Every import of one file of the house by another: importer, line, imported."""
        for file in self.files.values():
            for line, module in self.modules_imported(file):
                if (target := self.name_of(module)) is not None and not (
                    (file.name, target) in LATE and line in lines_for_checkers(file)
                ):
                    yield file, line, target

    def named(self) -> Iterator[tuple[File, int, str]]:
        """Every text that is the name of another file's module: such a file can be imported late."""
        for file in self.files.values():
            for node in ast.walk(file.tree):
                match node:
                    case ast.Constant(value=str(text)) if MODULE.fullmatch(text):
                        target = self.name_of(text)
                        if target not in (None, "__init__") and (file.name, target) not in LATE:
                            yield file, node.lineno, str(target)


def lines_for_checkers(file: File) -> set[int]:
    """Lines under ``if TYPE_CHECKING:`` at the top of a file."""
    blocks = [
        node.body
        for node in file.tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {node.lineno for block in blocks for node in block}


def in_storey(name: str) -> str:
    """The path of a file without the folder of its storey. Files at the top belong to a storey without it."""
    return name.removeprefix("engine/").removeprefix("applications/")


def floor_of(name: str) -> int | None:
    """The number of the floor that a file stands on, by its place in its storey."""
    place = in_storey(name).partition("/")[0]
    return next((number for number, places in enumerate(FLOORS) if place in places), None)


def unlisted(house: House) -> list[str]:
    """Files that stand on no floor."""
    return [f"{name}.py stands on no floor" for name in house.files if floor_of(name) is None]


def upward(house: House) -> list[str]:
    """Imports of a higher floor by a lower one, and names of modules there, unless they are in ``LATE``."""
    found = []
    for does, edges in (("imports", house.edges()), ("names", house.named())):
        for file, line, target in edges:
            low, high = floor_of(file.name), floor_of(target)
            if low is not None and high is not None and low < high:
                found.append(f"{file.name}.py:{line} (floor {low}) {does} {target}.py (floor {high})")
    return list(dict.fromkeys(found))


def reaching_in(house: House) -> list[str]:
    """Imports by applications of what a room of the engine does not export."""
    inside = f"{house.package}.engine."
    found = []
    for file in house.files.values():
        if (floor_of(file.name) or 0) < len(ENGINE) or file.name == "__init__":
            continue
        for line, module in house.modules_imported(file):
            room, _, name = module.removeprefix(inside).partition(".")
            if module.startswith(inside) and name not in exports(house, room):
                found.append(f"{file.name}.py:{line} reaches into the engine: {module}")
    return found


def exports(house: House, room: str) -> Collection[str]:
    """What a room of the engine offers.

    Of a folder the names that it imports as themselves, or its ``__all__``; of a file the public names.
    """
    if (alone := house.files.get(f"engine/{room}")) is not None:
        names = {getattr(node, "name", "") for node in alone.tree.body}
        names |= {
            target.id
            for node in alone.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        return {"", *(name for name in names if not name.startswith("_"))}
    offered: set[str] = set()
    folder = house.files.get(f"engine/{room}/__init__")
    for node in folder.tree.body if folder else []:
        match node:
            case ast.ImportFrom(names=names):
                offered |= {alias.name for alias in names if alias.asname == alias.name}
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                offered |= set(ast.literal_eval(value))
    return offered


def circular(house: House) -> list[str]:
    """Files that import each other, directly or in a round."""
    below: dict[str, set[str]] = {name: set() for name in house.files}
    for file, _, target in house.edges():
        below[file.name].add(target)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return ["imports in a circle: " + " <- ".join(f"{name}.py" for name in error.args[1])]
    return []


def peers(house: House) -> list[str]:
    """Imports of a library for the same job."""
    return [
        f"{file.name}.py:{line} imports the peer library {module.split('.')[0]}"
        for file in house.files.values()
        for line, module in house.modules_imported(file)
        if module.split(".")[0] in PEERS
    ]


def autograd_lines(house: House, file: File) -> list[int]:
    """Lines that name torch.autograd, imported or reached through whatever torch is called."""
    lines = {
        line
        for line, module in house.modules_imported(file)
        if module == "torch.autograd" or module.startswith("torch.autograd.")
    }
    torch_names = {
        alias.asname or "torch"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch" or (alias.name.startswith("torch.") and alias.asname is None)
    }
    for node in ast.walk(file.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr="autograd") if owner in torch_names:
                lines.add(node.lineno)
    return sorted(lines)


def stands_in(name: str, places: Iterable[str]) -> bool:
    """Whether a file is one of some places, or in a folder among them."""
    return any(f"{in_storey(name)}/".startswith(f"{place}/") for place in places)


def autograd(house: House) -> list[str]:
    """Mentions of torch.autograd by files that have no business with it."""
    return [
        f"{file.name}.py:{line} mentions torch.autograd"
        for file in house.files.values()
        if not stands_in(file.name, AUTOGRAD)
        and not (stands_in(file.name, AUTOGRAD_WITH_NOTE) and NOTE.search(file.text))
        for line in autograd_lines(house, file)
    ]


def silenced(house: House) -> list[str]:
    """Lines that silence a linter or the type checker without a reason behind it."""
    return [
        f"{file.name}.py:{number} gives no reason"
        for file in house.files.values()
        for number in silenced_lines(file.text)
    ]


def silenced_lines(text: str) -> list[int]:
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if (found := SILENCED.search(line)) and "#" not in line[found.end() :]
    ]


SILENCED = re.compile(r"#\s*(?:noqa|type:\s*ignore)")

RULES: tuple[Callable[[House], list[str]], ...] = (
    unlisted,
    upward,
    reaching_in,
    circular,
    peers,
    autograd,
    silenced,
)

LONGEST = 400
"""Lines of a source file."""

PACKPROP = Path(__file__).resolve().parents[2] / "packprop"

IN_ORDER = {
    "__init__.py": "from packprop.engine.context import extend\nfrom .applications.reports import cli\n",
    "errors.py": "import torch\nfrom torch import nn\n",
    "types.py": "from packprop.errors import PackpropError\nfrom packprop.engine.algebra import monoid\n",
    "extensions/__init__.py": "from .first_order import BatchGrad\nfrom ..engine.recording import recorder\n"
    "if TYPE_CHECKING:\n    from packprop.compat.averaged import KFRA\n"
    "HOMES = {'KFRA': 'packprop.compat.averaged'}\n",
    "compat/averaged/__init__.py": "from packprop.extensions import BatchGrad\n",
    "extensions/first_order.py": "from ..types import Extension\n",
    "store/reading.py": "from packprop.engine.algebra import cat\n"
    "from packprop.engine.context import LEVEL, extend\n",
    "engine/algebra/__init__.py": "from packprop.engine.algebra.monoid import cat as cat\n",
    "engine/algebra/monoid.py": "from ...errors import PackpropError\n",
    "engine/algebra/structures.py": "# NOTE [Autograd in structures]\nimport torch\ntorch.autograd.grad\n",
    "engine/functions/entry.py": "from ..algebra import structures, monoid\nself.autograd\n",
    "engine/recording/recorder.py": "from torch.autograd.graph import Node\n"
    "from packprop.engine.functions import entry\n",
    "engine/context.py": "LEVEL = 1\nfrom .. import extensions\n"
    "def extend():\n    import torch as t\n    t.autograd\n",
    "applications/dataset/state.py": "x = f()  # type: ignore[no-untyped-call]  # torch's own\n",
    "applications/reports/cli.py": "import importlib\nimportlib.import_module('packprop.engine.context')\n",
}
# Rule, what is changed in the house above, what the rule says about it.
FAULTS = [
    (unlisted, {"helpers.py": ""}, "helpers.py stands on no floor"),
    (unlisted, {"engine/tables/uses.py": ""}, "engine/tables/uses.py stands on no floor"),
    (
        upward,
        {"errors.py": "from packprop.engine.recording import recorder\n"},
        "errors.py:1 (floor 0) imports engine/recording/recorder.py (floor 5)",
    ),
    (
        upward,
        {"types.py": "import torch\ndef late():\n    from packprop.engine import context\n"},
        "types.py:3 (floor 3) imports engine/context.py (floor 14)",
    ),
    (
        upward,
        {"types.py": "if TYPE_CHECKING:\n    import packprop.engine.functions.entry as entry\n"},
        "types.py:2 (floor 3) imports engine/functions/entry.py (floor 4)",
    ),
    (
        upward,
        {"engine/functions/entry.py": "from packprop import extend\n"},
        "engine/functions/entry.py:1 (floor 4) imports __init__.py (floor 23)",
    ),
    (
        upward,
        {"engine/functions/entry.py": "from ...extensions import BatchGrad\n"},
        "engine/functions/entry.py:1 (floor 4) imports extensions/__init__.py (floor 10)",
    ),
    (
        upward,
        {"extensions/first_order.py": "from ..engine.context import backpack\n"},
        "extensions/first_order.py:1 (floor 10) imports engine/context.py (floor 14)",
    ),
    (
        upward,
        {
            "engine/recording/recorder.py": "import importlib\n"
            "importlib.import_module('...applications.reports.cli', 'packprop.engine.recording')\n"
        },
        "engine/recording/recorder.py:2 (floor 5) imports applications/reports/cli.py (floor 19)",
    ),
    (
        upward,
        {"types.py": "def late():\n    importlib.import_module(HOME)\nHOME = 'packprop.engine.context'\n"},
        "types.py:3 (floor 3) names engine/context.py (floor 14)",
    ),
    (
        upward,
        {
            "extensions/__init__.py": "from packprop.compat.averaged import KFRA\n",
            "compat/averaged/__init__.py": "",
        },
        "extensions/__init__.py:1 (floor 10) imports compat/averaged/__init__.py (floor 22)",
    ),
    (
        reaching_in,
        {"applications/dataset/state.py": "from packprop.engine.algebra.monoid import cat\n"},
        "applications/dataset/state.py:1 reaches into the engine: packprop.engine.algebra.monoid.cat",
    ),
    (
        reaching_in,
        {"store/reading.py": "def late():\n    from packprop.engine.algebra import monoid\n"},
        "store/reading.py:2 reaches into the engine: packprop.engine.algebra.monoid",
    ),
    (
        reaching_in,
        {"applications/reports/cli.py": "from packprop.engine import algebra\n"},
        "applications/reports/cli.py:1 reaches into the engine: packprop.engine.algebra",
    ),
    (
        reaching_in,
        {"store/reading.py": "from packprop.engine.context import _hidden\n"},
        "store/reading.py:1 reaches into the engine: packprop.engine.context._hidden",
    ),
    (
        circular,
        {"types.py": "from . import errors", "errors.py": "def late():\n    from . import types\n"},
        "imports in a circle: errors.py <- types.py <- errors.py",
    ),
    (
        circular,
        {"extensions/first_order.py": "from packprop.extensions import DiagGGN\n"},
        "extensions/first_order.py <- extensions/__init__.py",
    ),
    (
        peers,
        {"errors.py": "def late():\n    from backpack.extensions import BatchGrad\n"},
        "errors.py:2 imports the peer library backpack",
    ),
    (
        peers,
        {"applications/reports/cli.py": "import opacus as o\n"},
        "applications/reports/cli.py:1 imports the peer library opacus",
    ),
    (
        autograd,
        {"errors.py": "import torch\n\ntorch.autograd.grad\n"},
        "errors.py:3 mentions torch.autograd",
    ),
    (
        autograd,
        {"applications/reports/cli.py": "import torch as t\nt.autograd\n"},
        "applications/reports/cli.py:2 mentions torch.autograd",
    ),
    (
        autograd,
        {"applications/reports/cli.py": "from torch import autograd\n"},
        "applications/reports/cli.py:1 mentions torch.autograd",
    ),
    (
        autograd,
        {"applications/reports/cli.py": "from torch.autograd.graph import Node\n"},
        "applications/reports/cli.py:1 mentions torch.autograd",
    ),
    (
        autograd,
        {"applications/reports/cli.py": "import torch.autograd.functional as A\n"},
        "applications/reports/cli.py:1 mentions torch.autograd",
    ),
    (
        autograd,
        {"engine/algebra/structures.py": "import torch\ntorch.autograd.grad\n"},
        "engine/algebra/structures.py:2 mentions torch.autograd",
    ),
    (silenced, {"errors.py": "def A():  # noqa: N802\n    ...\n"}, "errors.py:1 gives no reason"),
    (silenced, {"types.py": "\nx: int = ''  # type: ignore[assignment]\n"}, "types.py:2 gives no reason"),
]


def build(root: Path, sources: dict[str, str]) -> House:
    """Write a package to disk and read it back."""
    for name, text in sources.items():
        path = root / "packprop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return House.read(root / "packprop")


@functools.cache
def read_packprop() -> House:
    """Read the package, once for all tests."""
    return House.read(PACKPROP)


def test_tests_say_why_they_silence() -> None:
    """Apart from those whose mistakes are what they show, and from this file, where it is in texts."""
    tests = PACKPROP.parent / "tests"
    files = {*tests.rglob("*.py")} - {*(tests / "typing").iterdir(), Path(__file__)}
    assert len(files) > 200
    assert not [
        f"{path}:{number}" for path in files for number in silenced_lines(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("rule", RULES)
def test_packprop_obeys(rule: Callable[[House], list[str]]) -> None:
    house = read_packprop()
    assert {"__init__", "errors"} <= house.files.keys()
    assert rule(house) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_house_in_order_passes(rule: Callable[[House], list[str]], tmp_path: Path) -> None:
    assert rule(build(tmp_path, IN_ORDER)) == []


@pytest.mark.parametrize(("rule", "change", "sentence"), FAULTS)
def test_a_fault_is_found(
    rule: Callable[[House], list[str]], change: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    found = rule(build(tmp_path, IN_ORDER | change))
    assert len(found) == 1
    assert sentence in found[0]


def test_every_rule_can_fail() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_no_place_is_listed_twice() -> None:
    listed = [place for floor in FLOORS for place in floor]
    assert len(listed) == len(set(listed))
    house = read_packprop()
    assert {in_storey(name).partition("/")[0] for name in house.files} == set(listed)
    named = [*AUTOGRAD, *AUTOGRAD_WITH_NOTE]
    assert all(any(stands_in(name, [place]) for name in house.files) for place in named)


def test_late_imports_are_all_there() -> None:
    house = read_packprop()
    for name, target in LATE:
        imported = [house.name_of(module) for _, module in house.modules_imported(house.files[name])]
        assert target in imported


def test_files_are_rooms_of_one_purpose() -> None:
    """None is longer than 400 lines, and half of them have at most 150."""
    lengths = {name: file.text.count("\n") for name, file in read_packprop().files.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
    assert statistics.median(lengths.values()) <= 150


def test_a_folder_is_said_in_one_line() -> None:
    for path in [*PACKPROP.iterdir(), *(PACKPROP / "engine").iterdir(), *(PACKPROP / "applications").iterdir()]:
        if path.is_dir() and (path / "__init__.py").exists():
            said = ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8")))
            assert said, f"{path.name} says nothing of itself"
            assert len(said.splitlines()[0]) <= 112


def test_the_picture_in_contributing_is_this_list() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = page.partition("## The order\n\n```text\n")[2].partition("```")[0]
    upper, _, lower = picture.partition("--- the engine")
    for storey, floors in ((upper, APPLICATIONS), (lower, ENGINE)):
        lines = [line for line in storey.splitlines() if re.match(r"\w", line)]
        assert [set(re.split(r"\s{2,}", line)[0].split(" · ")) for line in reversed(lines)] == [
            *map(set, floors)
        ]


FACTORY = re.compile(
    r"torch\.(tensor|as_tensor|zeros|ones|full|empty|arange|linspace|eye|rand|randn|randint|randperm)"
)
"""Functions of ``torch`` that make tensors on the default device of the user, unless they are given another."""

ON_THE_USERS_DEVICE = ("examples", "testing")
"""Rooms whose tensors are data, as those of users are."""


def test_tensors_of_packprops_own_have_a_device() -> None:
    """``torch.set_default_device`` belongs to the user's program, and moves nothing of packprop's."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted(ROOT.joinpath("packprop").rglob("*.py"))
        if path.relative_to(ROOT / "packprop").parts[0] not in ON_THE_USERS_DEVICE
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and FACTORY.fullmatch(ast.unparse(call.func))
        if not any(keyword.arg in (None, "device") for keyword in call.keywords)
    ]
    assert not found, f"these take the default device: {found}; give them device=..."
