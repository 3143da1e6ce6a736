"""The search for generators of random numbers in the objects of a program, to keep their states."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from packprop.engine.tensors import cells, generator_classes

GENERATORS = generator_classes()
"""Types of generators."""

CONTAINERS = (list, dict, set, deque)
"""Types that hold values, and may be filled."""

WITHOUT = (str, bytes, bytearray, int, float, complex, Tensor, np.ndarray, type, ModuleType, CodeType)
"""Types that hold no generator."""


def generators_in(values: Iterable[Any], met: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield the generators that values hold: in containers, attributes, defaults and closures of functions.

    Args:
        values: Anything.
        met: The values of earlier searches by identity, to leave out; this search adds its own.
    """
    todo, met = [*values], {} if met is None else met
    for value in todo:  # grows
        if value is None or isinstance(value, WITHOUT) or id(value) in met:
            continue
        met[id(value)] = value
        if isinstance(value, GENERATORS):
            yield value
        elif isinstance(value, FunctionType):  # its referents include all names of its module
            todo += [*(each for _, each in cells(value)), value.__defaults__, value.__kwdefaults__]
        else:
            todo += gc.get_referents(value)
