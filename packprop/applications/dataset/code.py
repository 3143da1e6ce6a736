"""Digests of the code of functions, the same in another process, in another file, and at another line."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from packprop.applications.dataset.digests import bytes_digest

SILENT = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME"}
"""Instructions that do nothing to values."""

FILLING = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
"""Methods that change the container they belong to."""

INDICES_OF_CHANGES = {"STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}
"""Instructions that change entries of a container, with the number of their indices."""

BY_TEXT = {"eval", "exec", "globals"}
"""Functions that reach any name around the code that calls them."""

ALL_NAMES = {"__dict__", "getattr", "vars"}
"""Names in code that may read any attribute."""


NOT_CALLED = {
    *("__init__", "__new__", "__post_init__", "__del__", "__init_subclass__", "__set_name__", "__annotate__"),
    *("__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__class_getitem__", "__rich_repr__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__copy__"),
    *("__deepcopy__",),
}
"""Special methods of Python that change no value in a pass: they make, copy or show objects."""


@dataclass
class Code:
    """The code of a function, and the names that it refers to.

    Args:
        digest: Stands for its instructions, and those of functions inside it.
        scope: Names it reads from its module.
        read: Attributes it reads, of any object.
        written: Attributes of itself or of named objects, and names from around it, that it assigns.
        filled: Attributes and names whose containers it changes.
        around: True if it changes something that belongs to no object of its own: a name from around it, or an
            entry or an attribute of one. Code that reaches such names by their text counts as well.
        imported: Modules that it imports when it runs; the names of relative imports begin with a dot.
    """

    digest: str = ""
    scope: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    around: bool = False
    imported: set[str] = field(default_factory=set)

    @property
    def options(self) -> set[str]:
        """The attributes that it reads and leaves unchanged."""
        return self.read - self.written - self.filled

    @property
    def reads_all(self) -> bool:
        """Tell whether it may read attributes whose names it does not contain."""
        return bool(ALL_NAMES & (self.read | self.scope))

    def take_in(self, other: Code) -> None:
        """Add the references of other code."""
        self.scope |= other.scope
        self.read |= other.read
        self.written |= other.written
        self.filled |= other.filled
        self.around |= other.around
        self.imported |= other.imported


@functools.cache
def code_of(code: CodeType) -> Code:
    """Describe code, without files, lines, comments, docstrings, and names of locals except arguments."""
    found = Code()
    taken = [
        f"{code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}",
        f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_exceptiontable.hex()}",
    ]
    steps = [step for step in dis.get_instructions(code) if step.opname not in SILENT]
    for place, step in enumerate(steps):
        if step.opname != "PRECALL":  # of Python 3.11 alone: it takes the arguments for the call after it
            taken.append(f"{step.opname} {_argument(step, found)}")
        _note_names(steps, place, found, code)
    found.digest = bytes_digest("\n".join(taken).encode())
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


def _note_names(steps: Sequence[dis.Instruction], place: int, found: Code, code: CodeType) -> None:
    """Note the names that an instruction of some code reads and writes."""
    step, free = steps[place], code.co_freevars
    owner = code.co_varnames[0] if code.co_argcount else None  # of a method
    name, operation = step.argval, step.opname

    def note_change(end: int, names: set[str], name: str | None = None) -> None:
        """Note the change of the object, or of its attribute, that the expression up to ``end`` names."""
        changed = _named(steps, end)
        if changed is not None:
            names.add(name or changed.argval)
            found.around |= changed.opname != "LOAD_ATTR" and _is_around(changed, free)
        elif name is not None and _last_local(steps, end) == owner:  # and not of any object on the way
            names.add(name)

    if operation in INDICES_OF_CHANGES:  # the container comes before its indices
        note_change(_before(steps, place, INDICES_OF_CHANGES[operation]), found.filled)
    if step.opcode not in dis.hasname and step.opcode not in dis.hasfree:
        return
    if operation in ("STORE_DEREF", "STORE_GLOBAL"):
        found.written.add(name)
        found.around |= _is_around(step, free)
    elif operation == "STORE_ATTR":
        note_change(_before(steps, place, 0), found.written, name)
    elif operation.startswith("LOAD_"):
        if name in FILLING:
            note_change(place - 1, found.filled)
        is_around = operation in ("LOAD_GLOBAL", "LOAD_NAME")
        (found.scope if is_around else found.read).add(name)
        found.around |= is_around and name in BY_TEXT
    elif operation == "IMPORT_NAME":  # its level and the names taken from it come before
        found.imported.add("." * (steps[place - 2].argval or 0) + name)


def _is_around(step: dis.Instruction, free: Sequence[str]) -> bool:
    """Tell whether an instruction reads or writes a name from around the function."""
    return step.opname.endswith(("_GLOBAL", "_NAME")) or step.argval in free


def _before(steps: Sequence[dis.Instruction], place: int, indices: int) -> int:
    """Return the place of the last instruction of the expression whose entry or attribute is changed.

    ``a[i] += x`` copies container and index before it reads the entry, and moves them behind the result.
    """
    end = place - 1
    if steps[end].opname == "SWAP":
        while steps[end].opname != "COPY":
            end -= 1
        while steps[end].opname == "COPY":
            end -= 1
    for _ in range(indices):
        end = _start(steps, end) - 1
    return end


def _start(steps: Sequence[dis.Instruction], end: int) -> int:
    """Return the place of the first instruction of the expression that ends at ``end``, and adds one value."""
    added, place = 0, end
    while place >= 0:
        step = steps[place]
        argument = step.arg if step.opcode >= dis.HAVE_ARGUMENT else None
        added += dis.stack_effect(step.opcode, argument, jump=False)
        if added == 1:
            return place
        place -= 1
    return 0


def _named(steps: Sequence[dis.Instruction], end: int) -> dis.Instruction | None:
    """Return the instruction that loads ``x`` in an expression ``x`` or ``x[i]``; ``None`` for others."""
    while end >= 0:
        step = steps[end]
        is_entry = step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")
        if is_entry or step.opname == "BINARY_SLICE":
            for _ in range(1 if is_entry else 2):
                end = _start(steps, end - 1)
            end -= 1
        elif step.opname.startswith("LOAD_") and (step.opcode in dis.hasname or step.opcode in dis.hasfree):
            return step
        else:
            break
    return None


def _last_local(steps: Sequence[dis.Instruction], end: int) -> str | None:
    """Return the local variable that an instruction reads last; ``None`` if it reads none."""
    step = steps[end]
    if "LOAD_FAST" not in step.opname:
        return None
    name: str = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return name


def _constant(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # its order differs in each process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"


def package_of(thing: Any) -> str | None:
    """Return the installed package of a class or function; ``None`` for the user's own.

    Name and version identify installed code, so packprop does not look into it. A wrapper made by
    ``functools.wraps`` has the module of what it wraps, so the module where its code stands counts as well.
    """
    if isinstance(thing, FunctionType) and package_at(str(thing.__globals__.get("__name__"))) is None:
        return None
    home = getattr(thing, "__module__", None)
    if isinstance(home, str):
        return package_at(home)
    return None if hasattr(thing, "__code__") else "builtins"  # methods written in C have no module


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


def own_spaces(owner: type | ModuleType) -> Iterator[type | ModuleType]:
    """Return a module of the user; or a class and its bases, as far as they are the user's own."""
    if isinstance(owner, type):
        return own_classes(owner)
    return iter(() if package_at(owner.__name__) else (owner,))


def is_special(name: str) -> bool:
    """Tell whether Python calls a method of this name by itself, for an operator and the like."""
    return name.startswith("__") and name.endswith("__") and name not in NOT_CALLED


def own_names(kind: type) -> list[str]:
    """Return the names that the user's classes among a class and its bases hold."""
    return [name for each in own_classes(kind) for name in vars(each)]


def is_code(kind: type, name: str) -> bool:
    """Tell whether a member of a class is code of the user."""
    return any(name in vars(each) and next(functions_in(vars(each)[name]), None) for each in own_classes(kind))


def functions_in(member: Any) -> Iterator[FunctionType]:
    """Yield the user's functions in a member of a class, such as a method or a property."""
    inside = (getattr(member, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))
    for part in (member, *inside):
        if isinstance(part, FunctionType) and package_of(part) is None:
            yield part
