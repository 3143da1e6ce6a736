"""JSON that others may have written, read as declared types: packprop refuses whatever does not fit.

``fitted(kind, parsed(text))`` is the one way in which packprop reads JSON from files. Types are those of
annotations: dataclasses, ``list``, ``tuple``, ``dict``, ``Literal``, ``|``, numbers and texts, decoded tensors,
and ``Any`` for values that packprop only compares or shows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

LARGEST = 2**62
"""The limit of sizes: those below it, and sums of two of them, fit in a signed 64-bit number."""

DEPTH = 100
"""Levels of lists and objects that a file may have."""

Size = Annotated[int, "size"]
"""A whole number of at least 0, below ``LARGEST``."""


class Unfit(ValueError):
    """Raised if a value does not fit its declaration."""


def parsed(text: str | bytes) -> Any:
    """Parse JSON, in which no object has a name twice, and nothing is nested more than ``DEPTH`` times.

    Raises:
        Unfit: For any other text.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"{type(error).__name__}: {error}") from None
    level = [value]
    for _ in range(DEPTH):
        level = [item for each in level for item in _items(each) if isinstance(item, (dict, list))]
        if not level:
            return value
    raise Unfit(f"it has more than {DEPTH} levels of lists and objects")


def fitted(kind: Any, value: Any, name: str = "it") -> Any:
    """Convert a value of JSON to a declared type, with tuples for lists, and dataclasses for objects.

    Args:
        kind: The type, as an annotation.
        value: The parsed value.
        name: The name of the value, for messages.

    Raises:
        Unfit: For a value of another type, an entry that is missing, and one that is unknown.
    """
    if kind is Any:
        return value
    if kind == Size:
        _require(type(value) is int and 0 <= value < LARGEST, name, value, "a whole number of at least 0")
        return value
    if kind is float:
        number = isinstance(value, float) or (type(value) is int and abs(value) < LARGEST)
        _require(number and math.isfinite(value), name, value, "a finite number")
        return float(value)
    if dataclasses.is_dataclass(kind):
        return value if type(value) is kind else _made(kind, value, name)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is not None:
        return _made_of_others(origin, inner, value, name)
    _require(type(value) is kind or (kind is None and value is None), name, value, f"of type {_said(kind)}")
    return value


def checksum_of(value: Any, before: int = 0) -> int:
    """Return the CRC-32 of a value of JSON, whatever the order of its names; it continues ``before``."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode(), before)


def _made(kind: Any, value: Any, name: str) -> Any:
    _require(isinstance(value, dict), name, value, "an object with names")
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [key for key in value if key not in fields]
    if unknown and not getattr(kind, "may_have_more", False):
        raise Unfit(f"{name} has an unknown entry {unknown[0]!r}")
    missing = [
        key
        for key, field in fields.items()
        if key not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise Unfit(f"{name} lacks the entry {missing[0]!r}")
    return kind(**{key: fitted(hints[key], value[key], key) for key in fields if key in value})


def _made_of_others(kind: Any, inner: tuple[Any, ...], value: Any, name: str) -> Any:
    """Convert a value to a list, tuple, dictionary, literal or union of the ``inner`` types."""
    if kind is Literal:
        _require(type(value) is type(inner[0]) and value in inner, name, value, f"one of {list(inner)}")
        return value
    if kind is dict:
        _require(isinstance(value, dict), name, value, "an object with names")
        items = value.items()
        return {fitted(inner[0], key, name): fitted(inner[1], item, f"{name}.{key}") for key, item in items}
    if kind in (list, tuple):
        _require(isinstance(value, (list, kind)), name, value, "a list")
        kinds = [inner[0]] * len(value) if kind is list or inner[1:] == (...,) else inner
        _require(len(kinds) == len(value), name, value, f"a list of {len(kinds)}")
        numbered = enumerate(zip(kinds, value, strict=True))
        return kind(fitted(each, item, f"{name}[{index}]") for index, (each, item) in numbered)
    failures = []
    for each in inner:
        try:
            return fitted(each, value, name)
        except Unfit as error:
            failures.append(error)
    raise failures[0]


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise Unfit(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return found


def _require(right: bool, name: str, value: Any, kind: str) -> None:
    if not right:
        text = repr(value)
        raise Unfit(f"{name} is {text if len(text) <= 60 else text[:57] + '...'}, not {kind}")


def _said(kind: Any) -> str:
    return "null" if kind in (None, type(None)) else getattr(kind, "__name__", str(kind))
