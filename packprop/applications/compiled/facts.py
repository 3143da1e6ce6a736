"""Descriptions of values that decide what a pass does: equal descriptions, equal work.

# NOTE [What a description holds]
packprop describes containers, configurations and other objects by class and contents, numbers with their types,
arrays by their bytes, and objects that are not written in Python by what pickle would write. A class, a
function, or an object that shows no contents, equals itself alone; attributes, defaults and closed-over
variables of a function must be unchanged as well. A description keeps the objects in it alive, so that no other
object can take their identity. An object of more than ``MOST_PARTS`` parts, or an array of more than
``MOST_BYTES`` bytes, equals nothing, not even itself: packprop does not replay a pass that may depend on it. If
it is not public (a private attribute, a hook, a variable that a function closes over), it equals itself while
some entries of the array, list or dictionary are unchanged, because such tables are mostly large and fixed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Mapping, MappingView, Set, Sized
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor

from packprop.engine.tensors import PLAIN, attributes_of, cells

MOST_PARTS = 2048
"""The maximum number of parts in the description of one value."""

MOST_BYTES = 2**20
"""The bytes of the largest array that a description holds."""


CONTAINERS = (tuple, list, dict)
"""Types that most values with parts have; they have no attributes."""

VALUES = (int, float, complex, str)
"""Types of plain values; an instance of a subclass is described by such a value as well."""


SPOTS = 64
"""The number of entries of a large table that packprop compares."""


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


class Number(NamedTuple):
    """A number that equals only numbers of its own type, unlike Python's ``True == 1``. Zero has a sign."""

    kind: type
    text: str

    def __repr__(self) -> str:
        return self.text


class Unlike:
    """A value that equals nothing, since packprop cannot tell whether it has changed."""

    __hash__ = object.__hash__

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__name__

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"an object of {self.kind} that is too large to compare"


def plain_fact(value: Any) -> Any:
    """Describe a value of a type in ``PLAIN``, or a complex number."""
    return Number(type(value), repr(value)) if isinstance(value, (bool, float, complex)) else value


Memo = dict[int, Any]
"""Descriptions of objects, by identity; valid as long as no object changes."""


class _TooLarge(Exception):
    """Raised for a value with too many parts, or too large ones, to describe."""


def facts_of(
    value: Any, modules: Container[int] = frozenset(), tensors: Mapping[int, int] = MappingProxyType({})
) -> Any:
    """Describe a value; see NOTE [What a description holds].

    Args:
        value: Anything.
        modules: Modules that are described elsewhere, by identity.
        tensors: The numbers of the tensors that are inputs of a graph, by identity: their values may change.
            Other tensors equal themselves alone.
    """
    return _Describer(modules, tensors, {}, False).described(value)


def facts_if_small(value: Any, modules: Container[int], tensors: Mapping[int, int], memo: Memo) -> Any:
    """Describe a value; with too many parts, plain ones included, it equals itself if some entries do."""
    if type(value) in PLAIN:
        return plain_fact(value)
    if id(value) not in memo:
        memo[id(value)] = "itself"  # for what is inside it
        try:
            memo[id(value)] = _Describer(modules, tensors, memo, True).described(value)
        except _TooLarge:
            memo[id(value)] = Same(value), _some_entries(value)
    return memo[id(value)]


def _some_entries(value: Any) -> Any:
    """Describe some entries of a large table: the first of a dictionary, entries spread over a sequence."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value.flat[:: max(1, value.size // SPOTS)].tobytes()
    if isinstance(value, (list, tuple)):
        some = value[:: max(1, len(value) // SPOTS)]
    elif isinstance(value, dict):
        some = [*itertools.islice(value.values(), SPOTS)]
    else:
        return None
    return len(value), *(plain_fact(each) if type(each) in PLAIN else Same(each) for each in some)


class _Describer:
    def __init__(
        self, modules: Container[int], tensors: Mapping[int, int], memo: Memo, only_small: bool
    ) -> None:
        self._modules, self._tensors, self._parts = modules, tensors, 0
        self._memo, self._only_small = memo, only_small
        self._inside: set[int] = set()

    def described(self, value: Any) -> Any:
        """Describe a value and what is in it."""
        kind = type(value)
        if kind in PLAIN:
            return plain_fact(value)
        if isinstance(value, Tensor):
            return ("tensor", self._tensors[id(value)]) if id(value) in self._tensors else Same(value)
        self._parts += 1
        if self._only_small and isinstance(value, Sized):
            self._parts += len(value)
        if self._parts > MOST_PARTS:
            return self._too_large(value)
        if id(value) in self._modules:
            return Same(value)
        if id(value) in self._inside:
            return "itself"
        self._inside.add(id(value))
        try:
            return self._composed(kind, value)
        finally:
            self._inside.discard(id(value))

    def _too_large(self, value: Any) -> Unlike:
        if self._only_small:
            raise _TooLarge
        return Unlike(value)

    def _composed(self, kind: type, value: Any) -> Any:
        if kind in CONTAINERS:
            return (kind, *map(self.described, itertools.chain(*value.items()) if kind is dict else value))
        if isinstance(value, type) or kind is torch.Generator:  # a graph draws from one as a pass does
            return Same(value)
        if kind is ReferenceType:
            return (kind, self.described(value()))
        if isinstance(value, FunctionType):
            around = (
                facts_if_small(each, self._modules, self._tensors, self._memo) for _, each in cells(value)
            )
            parts = (value.__defaults__, value.__kwdefaults__, vars(value))
            return (Same(value), Same(value.__code__), *map(self.described, parts), *around)
        attributes = [*attributes_of(value)]  # first: a partial function has these once somebody has looked
        contents = self._contents(value)
        if contents is None and not attributes:
            return Same(value)
        return (kind, contents, *((name, self.described(each)) for name, each in attributes))

    def _contents(self, value: Any) -> tuple[Any, ...] | None:
        """Describe what a value holds besides its attributes; ``None`` if Python cannot tell."""
        parts: Any
        if isinstance(value, Mapping):
            parts = itertools.chain.from_iterable(value.items())
        elif isinstance(value, (list, tuple, deque, MappingView)):
            parts = value
        elif isinstance(value, Set):
            parts = sorted(value, key=hash)
        elif isinstance(value, MethodType):
            parts = value.__self__, value.__func__
        elif (plain := next((each for each in VALUES if isinstance(value, each)), None)) is not None:
            return (plain_fact(plain(value)),)
        elif (array := _bytes_of(value)) is not None:
            return (self._too_large(value),) if array == () else array
        else:
            parts = _pickled(value)
        return None if parts is None else tuple(map(self.described, parts))


def _bytes_of(value: Any) -> tuple[Any, ...] | None:
    """Return shape, type and bytes of an array, such as NumPy's; ``()`` if it is large, ``None`` for others."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    if view.nbytes > MOST_BYTES or "O" in view.format:
        return ()
    return view.shape, view.format, view.tobytes()


def _pickled(value: Any) -> tuple[Any, ...] | None:
    """Return the parts that pickle would write, if the class itself defines them; else ``None``."""
    kind: Any = type(value)
    if kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__:
        return None
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # anything: it may be the user's code
        return None
    return parts if isinstance(parts, tuple) else None
