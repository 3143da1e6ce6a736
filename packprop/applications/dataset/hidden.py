"""The search for generators of random numbers in the objects of a program: their states can be kept."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packprop.engine.tensors import attributes_of, cells

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Types of generators."""

CONTAINERS = (list, dict, set, deque)
"""Types that hold values, and may be filled."""

WITHOUT = (str, bytes, bytearray, int, float, complex, Tensor, np.ndarray, type, ModuleType)
"""Types that hold no generator."""

MOST = 5000
"""The number of values in the search."""


def generators_in(values: Iterable[Any]) -> Iterator[Any]:
    """Find generators that values hold: in containers, attributes, arguments of functions, and around these."""
    todo, met = [*values], dict[int, Any]()
    for value in todo:  # grows
        if len(met) == MOST:
            return
        if value is None or isinstance(value, WITHOUT) or id(value) in met:
            continue
        met[id(value)] = value
        if isinstance(value, GENERATORS):
            yield value
        elif isinstance(value, Mapping):
            todo += islice(value.values(), MOST) if isinstance(value, dict) else ()  # lazy ones read files
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            todo += islice(value, MOST)
        else:
            todo += _parts_of(value)


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from (each for _, each in cells(value))
        yield from (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        yield value.__self__
    else:
        yield from (each for _, each in attributes_of(value))
