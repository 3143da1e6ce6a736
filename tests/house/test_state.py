"""Everything that outlives a pass is in the table of docs/notes.md: read from the source, nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.pages import ROOT
from tests.house.test_floors import House, in_storey, read_packprop

HOLDERS = {
    "ContextVar",
    "WeakSet",
    "WeakKeyDictionary",
    "WeakIdKeyDictionary",
    "WeakValueDictionary",
    "Lock",
    "RLock",
    "count",
    "Verdicts",
}
CONTAINERS = {"dict", "set", "list", "defaultdict", "OrderedDict", "deque"}
CHANGES = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}
CACHES = {"cache", "lru_cache"}


def last_name(node: ast.expr | None) -> str:
    """The last part of a dotted name, of what is called or indexed as well."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return last_name(inner)
    return ""


def assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a file gives at its top, with their values."""
    for statement in body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name, value
            case ast.If(body=inner, orelse=other):
                yield from assigned([*inner, *other])


def changed_inside_functions(tree: ast.Module) -> set[str]:
    """Names of a file that one of its functions changes, or gives anew."""
    changed: set[str] = set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        match node:
            case ast.Global(names=names):
                changed |= {*names}
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                changed.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if attribute in CHANGES:
                changed.add(name)
    return changed


def state_of(tree: ast.Module) -> set[str]:
    """Names at the top of a file whose values change, and functions that remember their results."""
    threads = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(last_name(base) == "local" for base in node.bases)
    }
    changed = changed_inside_functions(tree)
    found = set()
    for name, value in assigned(tree.body):
        kind = last_name(value) if isinstance(value, ast.Call) else ""
        is_empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not ast.unparse(value).strip("[]{}")
        if kind in HOLDERS | threads or is_empty or (kind in CONTAINERS) or name in changed:
            found.add(name)
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef) and CACHES & {*map(last_name, member.decorator_list)}:
                found.add(member.name)
    return found


def state(house: House) -> set[tuple[str, str]]:
    """Name and file of everything that outlives a pass."""
    return {
        (name, f"{in_storey(file.name)}.py") for file in house.files.values() for name in state_of(file.tree)
    }


def test_the_table_lists_all_of_it() -> None:
    page = (ROOT / "docs/notes.md").read_text(encoding="utf-8").partition("## What outlives a pass\n")[2]
    rows = re.findall(r"^\| (`[^|]+`) \| `([\w/]+\.py)` \|", page.partition("\n## ")[0], re.MULTILINE)
    listed = {(name, file) for names, file in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == state(read_packprop()), (
        "state came, went or moved: can it live in the objects of one pass?"
    )


def test_the_search_finds_state() -> None:
    text = """
import threading, weakref, functools
class Here(threading.local):
    at = None
here, TABLE, FILLED, ODD, known, ON = Here(), {1: 2}, {1: 2}, (1,), set(), False
A = Here()
B: dict[int, int] = {}
C = {1: 2}
D = {1: 2}
E = weakref.WeakSet()
F = [1]
G = False
H = itertools.count()
I = frozenset({1})
def change():
    global G
    C[1] = 3
    F.append(2)
    own = {}
    own[1] = 2
@functools.cache
def remembered(): ...
class Plain:
    @functools.lru_cache(maxsize=3)
    def method(self): ...
"""
    assert state_of(ast.parse(text)) == {"A", "B", "C", "E", "F", "G", "H", "remembered", "method"}
