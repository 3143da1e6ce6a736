"""Bytes of results; ``packprop.engine.memory.LiveBytes`` counts them as a program runs."""

from __future__ import annotations

from typing import Any

from packprop.engine.tensors.nesting import tensors_in


def size_of(results: Any) -> int:
    """Return the bytes of all results, those that share storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(results)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
