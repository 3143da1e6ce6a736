"""What is known of uses that take an input of the model as it is, without witnesses; see NOTE [Witnesses]."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.functions.traits import RECURRENCES, axes_kept_and_mixed
from packprop.recording.evidence import Change, Evidence, Touched


class _Input(NamedTuple):
    """An input of a call, or one with its leading axes made into one.

    Args:
        tensor: The tensor.
        is_data: Whether nothing was computed for it yet.
        leading: The axes that its leading axis was made of; only that one if nothing was done to it.
    """

    tensor: weakref.ref[Tensor]
    is_data: bool
    leading: torch.Size


class DirectInputs:
    """The inputs of an outermost call, for as long as they live."""

    def __init__(self) -> None:
        self._inputs: dict[int, _Input] = {}

    def add(self, tensor: Tensor, is_data: bool) -> None:
        """Add an input whose axes have no declaration; ``is_data``: nothing was computed for it yet."""
        self._inputs[id(tensor)] = _Input(weakref.ref(tensor), is_data, tensor.shape[:1])

    def follow(self, tensor: Tensor, out: Tensor) -> None:
        """Note what a function in ``RESHAPINGS`` made: maybe of an input, its leading axes made into one."""
        known = self._of(tensor)
        merged = tensor.dim() - out.dim() + 1
        if (
            known is not None
            and len(known.leading) == 1
            and merged > 1
            and out.shape[1:] == tensor.shape[merged:]
        ):
            self._inputs[id(out)] = _Input(weakref.ref(out), known.is_data, tensor.shape[:merged])

    def _of(self, tensor: Tensor) -> _Input | None:
        known = self._inputs.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def is_known(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether it is known of a function and an input that it takes as it is what changes would change."""
        return self._known(function, args) is not None

    def _known(
        self, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[torch.Size, tuple[int, ...], tuple[int, ...]] | None:
        """The leading axes of the input that a function takes as it is, the axes that it keeps, and mixes."""
        known = self._of(args[0]) if self._inputs and args else None
        if known is None:
            return None
        kept, mixed = axes_kept_and_mixed(function, args)
        whole = bool(kept) if len(known.leading) == 1 else 0 in kept
        return (known.leading, kept, mixed) if whole and (known.is_data or function in RECURRENCES) else None

    def evidence(self, function: Callable[..., Any], args: tuple[Any, ...], out: Any) -> list[Evidence]:
        """What changes of an input change in the first output of a function that takes it as it is."""
        known = self._known(function, args)
        if known is None:
            return []
        leading, kept, mixed = known
        given, made = args[0].shape, (out if isinstance(out, Tensor) else out[0]).shape
        if len(leading) > 1:
            return _evidence_of_merged(leading, given, made)
        return _evidence(given, made, kept, mixed, given[kept[0]] if function in RECURRENCES else None)


@functools.lru_cache(maxsize=256)
def _evidence(
    given: torch.Size, made: torch.Size, kept: tuple[int, ...], mixed: tuple[int, ...], samples: int | None
) -> list[Evidence]:
    """Each half of the rows along an axis changes the same rows, or all if it is mixed."""
    found = []
    for axis in (*kept, *mixed):
        for change in _changes(axis, given[axis]):
            rows = _changed(change, 1, given[axis])
            outputs = _touched(made, change, axis if axis in kept else None, rows)
            found.append(Evidence(change, [_touched(given, change, axis, rows)], {0: outputs}, samples))
    return found


@functools.lru_cache(maxsize=256)
def _evidence_of_merged(leading: torch.Size, given: torch.Size, made: torch.Size) -> list[Evidence]:
    """Each half of the rows along one of the axes that were made into one changes their rows of that one."""
    found = []
    for axis in (0, 1):
        for change in _changes(axis, leading[axis]):
            rows = _changed(change, math.prod(leading[axis + 1 :]), given[0])
            inputs, outputs = (_touched(shape, change, 0, rows) for shape in (given, made))
            found.append(Evidence(change, [inputs], {0: outputs}))
    return found


def _changes(axis: int, extent: int) -> list[Change]:
    return [Change(axis, extent, second) for second in (False, True)] if extent > 1 else []


def _changed(change: Change, inner: int, number: int) -> list[bool]:
    """Which of so many rows are changed, ``inner`` rows for each place along the axis; calls no operation."""
    return [(row // inner % change.extent >= change.extent // 2) == change.second for row in range(number)]


def _touched(shape: torch.Size, change: Change, axis: int | None, changed: list[bool]) -> Touched:
    """All rows along all axes but one, of which some were changed."""
    rows: dict[int, Tensor | list[bool]] = {
        place: changed if place == axis else [True] * size
        for place, size in enumerate(shape)
        if size and size % change.extent == 0
    }
    return Touched(shape, rows)
