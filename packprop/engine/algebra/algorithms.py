"""Algorithms by name: the one that you force, else the fastest that may hold the memory it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from packprop.errors import BadInput

CHOICES = {
    "norms": ("gradients", "products"),
    "products": ("batched", "single"),
    "factors": ("patches", "shifts"),
    "convolutions": ("patches", "groups"),
}
"""The names of the algorithms for each kind of computation."""


_FORCED: ContextVar[dict[str, str] | None] = ContextVar("packprop_forced", default=None)


@contextlib.contextmanager
def algorithms(
    *,
    norms: str | None = None,
    products: str | None = None,
    factors: str | None = None,
    convolutions: str | None = None,
) -> Iterator[None]:
    """Force algorithms by name where they apply; results do not change, time and memory do.

    Args:
        norms: Norms of per-sample gradients of weights shared over positions: from the ``"gradients"``
            themselves (``s i o`` multiplications for each sample), or from ``"products"`` between pairs of
            positions (``s^2 (i + o)``).
        products: Per-sample gradients of a chunk in one ``"batched"`` product, or each in a ``"single"`` one.
        factors: Input factors of convolutions from unfolded ``"patches"``, or from ``"shifts"`` of the input.
        convolutions: Per-sample gradients of convolutions from unfolded ``"patches"``, or by one convolution
            with ``"groups"`` for every sample, which unfolds nothing.

    Raises:
        BadInput: For an unknown name.
    """
    asked = {"norms": norms, "products": products, "factors": factors, "convolutions": convolutions}
    chosen = {kind: name for kind, name in asked.items() if name is not None}
    for kind, name in chosen.items():
        if name not in CHOICES[kind]:
            raise BadInput(
                f"algorithms({kind}={name!r}) was entered.",
                kind,
                "there is no such algorithm",
                f"choose from {', '.join(map(repr, CHOICES[kind]))}",
            )
    token = _FORCED.set((_FORCED.get() or {}) | chosen)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced_algorithm(kind: str) -> str | None:
    """Return the name of the forced algorithm, if there is one."""
    chosen = _FORCED.get()
    return None if chosen is None else chosen.get(kind)


def choose_algorithm(kind: str, fastest: str, holds: Mapping[str, int], held: int | None) -> str:
    """Return the name of the algorithm that one use takes.

    Args:
        kind: The kind of computation, a key of ``CHOICES``.
        fastest: The algorithm that takes the least time.
        holds: For each algorithm, the bytes that it keeps for one sample and that the others do not need.
        held: The limit on these bytes; ``None`` for no limit.

    Returns:
        The forced algorithm, if there is one. Otherwise the fastest, if it stays within the limit; else the one
        that holds the least.
    """
    forced = forced_algorithm(kind)
    if forced is not None:
        return forced
    if held is None or holds[fastest] <= held:
        return fastest
    return min(holds, key=holds.__getitem__)
