"""Context variables that have a value inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def setting(variable: ContextVar[Value | None], value: Value) -> Iterator[Value]:
    """Set a context variable inside, and restore its earlier value afterwards."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
