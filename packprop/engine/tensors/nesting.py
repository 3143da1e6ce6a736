"""Tensors inside nested containers, and the parts of other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = frozenset({type(None), bool, int, float, str})
"""Types that hold no tensors: most arguments. A check whether they are dataclasses is slow."""


class _End(NamedTuple):
    """Says that everything in a container has been seen."""

    container: Any


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, depth first; stop at circles."""
    stack, around = [value], set[int]()
    while stack:
        item = stack.pop()
        if type(item) in PLAIN:
            continue
        if isinstance(item, Tensor):
            yield item
        elif type(item) is _End:
            around.remove(id(item.container))
        elif id(item) not in around:
            parts = _parts_of(item)
            if parts:
                around.add(id(item))
                stack += (_End(item), *reversed(parts))


def _parts_of(item: Any) -> Sequence[Any]:
    """Return the items of a tuple or list, the values of a mapping, or the fields of a dataclass."""
    if isinstance(item, (tuple, list)):
        return item
    if not isinstance(item, dict) and dataclasses.is_dataclass(item) and not isinstance(item, type):
        item = _fields_of(item)
    return [*item.values()] if isinstance(item, Mapping) else ()


def _fields_of(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    if hasattr(item, "__dict__"):
        fields: dict[str, Any] = vars(item)
        return fields
    names = [field.name for field in dataclasses.fields(item)]
    return {name: getattr(item, name) for name in names if hasattr(item, name)}


def tensors_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], as_far_as_readable: bool = False
) -> list[Tensor]:
    """Return the tensors in the arguments of a call, as a list; fast for tensors and plain values.

    ``as_far_as_readable``: end at a container whose methods raise an error, rather than raise it.
    """
    found: list[Tensor] = []
    try:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                found.append(value)
            elif type(value) not in PLAIN:
                found += tensors_in(value)
    except Exception:  # methods of a user's container may raise anything
        if not as_far_as_readable:
            raise
    return found


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the same nesting with ``function`` applied to every tensor."""
    if type(value) is list and all(isinstance(item, Tensor) for item in value):  # the usual case
        return [*map(function, value)]
    return map_instances(Tensor, function, value)


def moved(value: Any, device: torch.device | str | None) -> Any:
    """Return the same nesting with every tensor on a device; a tensor that occurs twice moves once."""
    return map_tensors(once(lambda tensor: tensor.to(device), id), value)


def once(function: Callable[[Any], Any], key: Callable[[Any], int]) -> Callable[[Any], Any]:
    """Return a function that computes its result only once for values with equal keys."""
    known: dict[int, tuple[Any, Any]] = {}

    def result(value: Any) -> Any:
        if key(value) not in known:
            known[key(value)] = value, function(value)  # no other value gets this key, as this one stays
        return known[key(value)][1]

    return result


def map_instances(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same nesting with ``function`` applied to every instance of ``kind``."""
    return map_chosen(lambda item: isinstance(item, kind), function, value)


def map_chosen(chosen: Callable[[Any], bool], function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same nesting with ``function`` applied to everything that is ``chosen``."""
    if type(value) in PLAIN:
        return value
    if chosen(value):
        return function(value)
    if type(value) is dict:
        return {key: map_chosen(chosen, function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_chosen(chosen, function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        if isinstance(value, dict) or hasattr(type(value), "__copy__"):
            made = copy.copy(value)  # its entries may also be its attributes
        else:  # a shallow copy would write into the entries of the original
            items = [*value.values()]
            made = copy.deepcopy(value, {id(item): item for item in items})
        for key, item in value.items():
            made[key] = map_chosen(chosen, function, item)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_mapped_fields(chosen, function, value)
    return value


def _with_mapped_fields(chosen: Callable[[Any], bool], function: Callable[[Any], Any], value: Any) -> Any:
    """Return a dataclass with its fields mapped; the same object if no field changes."""
    fields = _fields_of(value)
    mapped = {name: map_chosen(chosen, function, item) for name, item in fields.items()}
    if all(mapped[name] is item for name, item in fields.items()):
        return value
    made = copy.copy(value)
    for name, item in mapped.items():
        object.__setattr__(made, name, item)  # it may be frozen
    return made


def cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in the closure of a function; ``None`` for a value that is not bound yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            yield name, None


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of attributes that an object holds itself, in its ``__dict__`` or in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for each in type(value).__mro__:
        slots = vars(each).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{each.__name__.lstrip('_')}{slot}" if private else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
