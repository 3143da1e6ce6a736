"""Short texts for the behaviour of functions, the same in another process, file or line."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

SILENT = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"}
"""Instructions that do nothing to values."""

FILLING = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
"""Methods that change the container they belong to."""

ALL_NAMES = {"__dict__", "getattr", "vars"}
"""Names in code that may read any attribute."""


@dataclass
class Code:
    """The code of a function, and the names that it refers to.

    Args:
        digest: Stands for its instructions, and those of functions inside it.
        scope: Names it reads from its module.
        read: Attributes it reads, of whatever object.
        written: Attributes, and names from around it, that it assigns.
        filled: Attributes and names whose containers it changes.
    """

    digest: str = ""
    scope: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)

    def take_in(self, other: Code) -> None:
        """Add the references of other code."""
        self.scope |= other.scope
        self.read |= other.read
        self.written |= other.written
        self.filled |= other.filled


@functools.cache
def code_of(code: CodeType) -> Code:
    """Describe code; names of files and of local variables, lines, comments and docstrings do not count."""
    found = Code()
    taken = [
        f"{code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}",
        f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_exceptiontable.hex()}",
    ]
    statement: list[str] = []  # attributes that the current statement has read
    for step in dis.get_instructions(code):
        if step.opname in SILENT:
            continue
        taken.append(f"{step.opname} {_argument(step, found)}")
        _note_names(step, statement, found)
    found.digest = short_digest("\n".join(taken))
    return found


def _argument(step: dis.Instruction, found: Code) -> str:
    """Return the argument of an instruction as text; references of functions inside go to ``found``."""
    if step.opcode in dis.hasconst:
        if isinstance(step.argval, CodeType):
            inside = code_of(step.argval)
            found.take_in(inside)
            return inside.digest
        return _constant(step.argval)
    named = step.opcode in dis.hasname or step.opcode in dis.hasfree
    return str(step.argval if named else step.arg)


def _note_names(step: dis.Instruction, statement: list[str], found: Code) -> None:
    """Note the names that an instruction reads and writes."""
    name, operation = step.argval, step.opname
    if operation == "STORE_SUBSCR":
        found.filled.update(statement)
    if operation.startswith(("STORE_", "POP_", "RETURN_")):
        statement.clear()
    if step.opcode not in dis.hasname and step.opcode not in dis.hasfree:
        return
    if operation in ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"):
        found.written.add(name)
    elif operation.startswith("LOAD_"):
        if name in FILLING:
            found.filled.update(statement[-1:])
        (found.scope if operation in ("LOAD_GLOBAL", "LOAD_NAME") else found.read).add(name)
        statement.append(name)


def _constant(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # its order differs in each process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"


def short_digest(text: str) -> str:
    """Return a short text that no other text shares."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def package_of(thing: Any) -> str | None:
    """Return the installed package of a class or function; ``None`` for the user's own.

    Name and version identify installed code, so nobody has to look into it.
    """
    home = getattr(thing, "__module__", None)
    if isinstance(home, str):
        return package_at(home)
    return None if hasattr(thing, "__code__") else "builtins"  # methods of C have no home


@functools.cache
def package_at(home: str) -> str | None:
    """Return the installed package of a Python module, given by its name; ``None`` for the user's own."""
    root = home.partition(".")[0]
    if root in sys.stdlib_module_names or root in ("packprop", "torch"):
        return root
    file = getattr(sys.modules.get(home), "__file__", None)
    installed = file is not None and {"site-packages", "dist-packages"} & {*Path(file).parts}
    return root if installed else None


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of a package, empty for parts of Python itself; ``None`` if unknown."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return version
    if package in sys.stdlib_module_names:
        return ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    distributions = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(distributions[0]) if distributions else None


def own_classes(kind: type) -> Iterator[type]:
    """Return the class and its bases, as far as they are the user's own."""
    return (each for each in kind.__mro__ if package_of(each) is None)
