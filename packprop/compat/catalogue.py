"""Extensions of packprop under their names in BackPACK: the same, with ``set_module_extension`` in addition."""

from __future__ import annotations

import functools
from typing import Any

from packprop import extensions
from packprop.compat.own import Catalogued
from packprop.types import Extension


def is_available(name: str) -> bool:
    """Whether packprop has an extension of this name."""
    found = getattr(extensions, name, None)
    return isinstance(found, type) and issubclass(found, Extension) and found is not Extension


@functools.cache
def _catalogued(name: str) -> type:
    found = getattr(extensions, name)
    return type(name, (found, Catalogued), {"__module__": __name__, "__doc__": found.__doc__})


def __getattr__(name: str) -> Any:
    if not is_available(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _catalogued(name)
