"""What is known of uses that take an input of the model as it is, without witnesses; see NOTE [Witnesses]."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packprop.functions.traits import RECURRENCES, axes_kept_and_mixed
from packprop.recording.evidence import Change, Evidence, Touched


class DirectInputs:
    """The inputs of an outermost call, for as long as they live."""

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def add(self, tensor: Tensor, is_data: bool) -> None:
        """Add an input whose axes have no declaration; ``is_data``: nothing was computed for it yet."""
        self._inputs[id(tensor)] = weakref.ref(tensor), is_data

    def is_known(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether it is known of a function and an input that it takes as it is what changes would change."""
        if not self._inputs or not args:
            return False
        reference, is_data = self._inputs.get(id(args[0]), (None, False))
        if reference is None or reference() is not args[0]:
            return False
        return bool(axes_kept_and_mixed(function, args)[0]) and (is_data or function in RECURRENCES)

    def evidence(self, function: Callable[..., Any], args: tuple[Any, ...], out: Any) -> list[Evidence]:
        """What changes of an input change in the first output of a function that takes it as it is."""
        if not self.is_known(function, args):
            return []
        made = out if isinstance(out, Tensor) else out[0]
        kept, mixed = axes_kept_and_mixed(function, args)
        given = args[0].shape
        return _evidence(given, made.shape, kept, mixed, given[kept[0]] if function in RECURRENCES else None)


@functools.lru_cache(maxsize=256)
def _evidence(
    given: torch.Size, made: torch.Size, kept: tuple[int, ...], mixed: tuple[int, ...], samples: int | None
) -> list[Evidence]:
    """Each half of the rows along an axis changes the same rows, or all if it is mixed."""
    found = []
    for axis in (*kept, *mixed):
        for second in (False, True) if given[axis] > 1 else ():
            change = Change(axis, given[axis], second)
            outputs = _touched(made, change, axis if axis in kept else None)
            found.append(Evidence(change, [_touched(given, change, axis)], {0: outputs}, samples))
    return found


def _touched(shape: torch.Size, change: Change, axis: int | None) -> Touched:
    """All rows along all axes but one, which is the change's own."""
    changed = [(row >= change.extent // 2) == change.second for row in range(change.extent)]
    rows: dict[int, Tensor | list[bool]] = {
        place: changed if place == axis else [True] * size
        for place, size in enumerate(shape)
        if size and size % change.extent == 0
    }
    return Touched(shape, rows)
