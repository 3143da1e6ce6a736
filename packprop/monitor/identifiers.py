"""Names of samples, which users give as lists, tensors or arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from packprop.errors import BadInput


def require_identifiers(asked: str, given: Any) -> None:
    """Refuse an argument that cannot name several samples, without reading its entries.

    Raises:
        BadInput: For a single text, or anything that has no entries.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise BadInput(
            asked,
            f"identifiers of type {type(given).__name__}",
            "there must be one for each sample",
            "give a list, a tensor or an array",
        )


def names_of(asked: str, given: Iterable[Any] | None) -> list[Any]:
    """Return identifiers one by one; those in tensors and arrays become numbers of Python.

    Raises:
        BadInput: For an argument that cannot name several samples.
    """
    if given is None:
        return []
    require_identifiers(asked, given)
    names = plain(given)
    return [*map(plain, names)] if isinstance(names, Iterable) else [names]  # else it was one number


def plain(name: Any) -> Any:
    """Return a number, or a list of numbers, in place of a tensor or an array; anything else as it is."""
    return name.tolist() if hasattr(name, "tolist") else name
