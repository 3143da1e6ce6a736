"""Errors in four parts: the request, the place where it failed, the reason, and what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class PackpropError(RuntimeError):
    """Raised when packprop cannot compute a quantity correctly.

    Args:
        asked: The request of the user.
        where: The parameter, function, layer or argument at which it failed.
        why: The reason.
        instead: What the user can do.
    """

    def __init__(self, asked: str, where: str, why: str, instead: str) -> None:
        super().__init__(asked, where, why, instead)
        self.asked, self.where, self.why, self.instead = asked, where, why, instead

    def __str__(self) -> str:
        return f"{self.asked}\n  where:   {self.where}\n  why:     {self.why}\n  instead: {self.instead}"


class OfParameter(PackpropError):
    """An error at a parameter, raised by code that does not know its name; ``named`` inserts the name.

    The name replaces ``{parameter}`` in ``where``, or is appended if ``where`` has no such field.
    """

    def named(self, name: str) -> PackpropError:
        """Return the error with the parameter's name."""
        where = self.where if "{parameter}" in self.where else f"{self.where}, of parameter {{parameter}}"
        return PackpropError(self.asked, where.replace("{parameter}", repr(name)), self.why, self.instead)


def install(*extras: str) -> str:
    """Return the command that installs missing packages; it works in a folder with packprop's source.

    >>> install("examples", "report")
    "pip install '.[examples,report]'"
    """
    return f"pip install '.[{','.join(extras)}]'"


@contextlib.contextmanager
def naming(name: str | Callable[[], str]) -> Iterator[None]:
    """Add the parameter's name to errors that lack it and are raised inside the context."""
    try:
        yield
    except OfParameter as error:
        raise error.named(name if isinstance(name, str) else name()) from error.__cause__


class BadInput(PackpropError, ValueError):
    """Raised, before any work is done, for an argument of the wrong type or value."""


def require_number(asked: str, name: str, number: object, what: str = "positive whole number") -> None:
    """Refuse an argument that is no whole number of at least 1.

    Args:
        asked: The request of the user.
        name: The name of the argument.
        number: Its value.
        what: The meaning of the number, for the message.

    Raises:
        BadInput: With name and value.
    """
    if type(number) is not int or number < 1:
        instead = "give a whole number of at least 1"
        if type(number) is not int and hasattr(number, "__index__"):
            instead += f", as an int: {name}=int({name})"
        raise BadInput(asked, f"{name}={number!r}", f"it is no {what}", instead)


def require_seed(asked: str, seed: object) -> None:
    """Refuse a seed that is no whole number, as ``require_number`` does, or that PyTorch does not take.

    Raises:
        BadInput: With its value.
    """
    if type(seed) is not int or not -(2**63) <= seed < 2**64:
        why = "it is no whole number" if type(seed) is not int else "it has more than 64 bits"
        raise BadInput(asked, f"seed={seed!r}", why, "give one, such as seed=0")


class Absent(BadInput, KeyError):
    """Raised for a key that a mapping of packprop does not have; ``in`` and ``get`` work as for any mapping."""


class FreedGraph(PackpropError):
    """Raised when a pass needs a graph that an earlier pass has freed."""


class PackpropWarning(UserWarning):
    """Issued when packprop has computed a result, but you should know something about it."""
