"""Descriptions of values that decide what a pass does: equal descriptions, equal work.

# NOTE [What a description holds]
Containers, configurations and any other objects are described by their classes and contents, numbers with their
types, arrays by their bytes. Functions, classes and objects without contents in Python equal themselves alone;
of the variables that a function closes over, plain ones count. A description keeps what it names alive, so that
nothing else can take its identity. Objects of more parts than ``MOST_PARTS``, and arrays of more than
``MOST_BYTES``, are unlike everything, even themselves: a pass that may depend on them is not replayed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Container, Mapping, Set
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from torch import Tensor

from packprop.engine.tensors import PLAIN, attributes_of, cells

MOST_PARTS = 2048
"""The number of parts that a description of one value may have."""

MOST_BYTES = 2**20
"""The largest array that a description takes in."""


class Same:
    """An object that equals itself alone; it stays alive, so that nothing else can have its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"another {type(self.value).__name__}"


class Number:
    """A number that equals those of its own type alone; Python's ``True`` equals 1."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Number) or type(other.value) is not type(self.value):
            return False
        return bool(other.value == self.value) or (other.value != other.value and self.value != self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


class Unlike:
    """A value that equals nothing, since nobody can tell whether it has changed."""

    __hash__ = object.__hash__

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"an object of {self.kind} that is too large to compare"


def plain_fact(value: Any) -> Any:
    """Describe a value of a type in ``PLAIN``."""
    return Number(value) if isinstance(value, (bool, float)) else value


def facts_of(
    value: Any, modules: Container[int] = frozenset(), tensors: Mapping[int, int] = MappingProxyType({})
) -> Any:
    """Describe a value; see NOTE [What a description holds].

    Args:
        value: Anything.
        modules: Modules that are described elsewhere, by identity.
        tensors: The numbers of tensors, by identity, that are inputs of a graph: their values may change.
            Others equal themselves alone.
    """
    return _Describer(modules, tensors).described(value)


class _Describer:
    def __init__(self, modules: Container[int], tensors: Mapping[int, int]) -> None:
        self._modules, self._tensors, self._parts = modules, tensors, 0
        self._inside: set[int] = set()

    def described(self, value: Any) -> Any:
        """Describe a value and what is in it."""
        kind = type(value)
        if kind in PLAIN:
            return plain_fact(value)
        if isinstance(value, Tensor):
            return ("tensor", self._tensors[id(value)]) if id(value) in self._tensors else Same(value)
        self._parts += 1
        if self._parts > MOST_PARTS:
            return Unlike(value)
        if id(value) in self._modules:
            return Same(value)
        if id(value) in self._inside:
            return "itself"
        self._inside.add(id(value))
        try:
            return self._composed(kind, value)
        finally:
            self._inside.discard(id(value))

    def _composed(self, kind: type, value: Any) -> Any:
        if isinstance(value, Mapping):
            return (kind, *((self.described(name), self.described(each)) for name, each in value.items()))
        if isinstance(value, (list, tuple, deque)):
            return (kind, *map(self.described, value))
        if isinstance(value, Set):
            return (kind, frozenset(map(self.described, value)))
        if isinstance(value, functools.partial):
            return (kind, *map(self.described, (value.func, value.args, value.keywords)))
        if isinstance(value, MethodType):
            return (kind, self.described(value.__self__), Same(value.__func__))
        if isinstance(value, FunctionType):
            around = [each for _, each in cells(value) if type(each) in PLAIN]
            return (Same(value), *map(self.described, (value.__defaults__, value.__kwdefaults__, *around)))
        if isinstance(value, type):
            return Same(value)
        contents = _bytes_of(value)
        if contents is not None:
            return (kind, *contents)
        attributes = [*attributes_of(value)]
        if not attributes:
            return Same(value)
        return (kind, *((name, self.described(each)) for name, each in attributes))


def _bytes_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape, type and bytes of an array, as of NumPy; ``None`` for anything else."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    if view.nbytes > MOST_BYTES or "O" in view.format:
        return (Unlike(value),)
    return view.shape, view.format, view.tobytes()
