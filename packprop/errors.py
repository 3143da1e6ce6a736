"""Errors in four parts: what was asked, where it failed, why, what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class PackpropError(RuntimeError):
    """A quantity that was asked for cannot be computed correctly.

    Args:
        asked: What the user asked for.
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
    """What is wrong at a parameter whose name is not known where it is found: ``named`` puts it in.

    It takes the place of ``{parameter}`` in ``where``, or follows if there is none.
    """

    def named(self, name: str) -> PackpropError:
        """The error with the parameter's name."""
        where = self.where if "{parameter}" in self.where else f"{self.where}, of parameter {{parameter}}"
        return PackpropError(self.asked, where.replace("{parameter}", repr(name)), self.why, self.instead)


def install(*extras: str) -> str:
    """The command that installs what is missing; it works in a folder that holds packprop's source.

    >>> install("examples", "report")
    "pip install '.[examples,report]'"
    """
    return f"pip install '.[{','.join(extras)}]'"


@contextlib.contextmanager
def naming(name: str | Callable[[], str]) -> Iterator[None]:
    """Inside, errors that lack the name of their parameter get it."""
    try:
        yield
    except OfParameter as error:
        raise error.named(name if isinstance(name, str) else name()) from error.__cause__


class BadInput(PackpropError, ValueError):
    """An argument has the wrong type or value; raised before any work is done."""


class FreedGraph(PackpropError):
    """A graph that an earlier pass has freed was to be used again."""


class PackpropWarning(UserWarning):
    """A result was computed, but something about it deserves attention."""
