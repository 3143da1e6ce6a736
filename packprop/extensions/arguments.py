"""Refusals that extensions share: each extension checks its arguments when you make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from packprop.engine.algebra.factors import Otherwise as Otherwise
from packprop.errors import BadInput, require_number
from packprop.types import Extension

OTHERWISE = (*get_args(Otherwise), None)


def require_one_of(asked: str, where: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Refuse a value that is not one of the choices.

    Raises:
        BadInput: A ``ValueError``.
    """
    if value not in choices:
        raise BadInput(
            asked,
            where,
            "it is not one of the possible values",
            f"choose from {', '.join(map(repr, choices))}",
        )


def require_otherwise(asked: str, value: object) -> None:
    """Refuse an unknown treatment of large factors.

    Raises:
        BadInput: A ``ValueError``.
    """
    require_one_of(asked, "otherwise", value, OTHERWISE)


def require_draws(name: str, mc_samples: object) -> None:
    """Refuse anything that is not a number of Monte Carlo draws.

    Raises:
        BadInput: A ``ValueError``.
    """
    asked = f"{name}(mc_samples={mc_samples!r}) was asked for."
    require_number(asked, "mc_samples", mc_samples, "number of Monte Carlo draws")


def require_own_savefields(asked: str, extensions: Sequence[Extension], instead: str) -> None:
    """Refuse extensions if two of them use one name.

    Raises:
        BadInput: A ``ValueError``, with the first of them.
    """
    fields = [extension.savefield for extension in extensions]
    for extension in extensions:
        if fields.count(extension.savefield) > 1:
            raise BadInput(
                asked,
                f"extension {extension.name}",
                f"another extension is also saved as {extension.savefield!r}",
                instead,
            )
