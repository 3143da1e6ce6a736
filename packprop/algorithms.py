"""Algorithms by name: chosen by shapes for the least time, or the least memory, unless one is forced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from packprop.errors import BadInput

CHOICES = {
    "norms": ("gradients", "products"),
    "products": ("batched", "single"),
    "factors": ("patches", "shifts"),
    "convolutions": ("patches", "groups"),
}
"""What is chosen -> the names of its algorithms."""

_FORCED: ContextVar[dict[str, str] | None] = ContextVar("packprop_forced", default=None)
_FRUGAL: ContextVar[bool] = ContextVar("packprop_frugal", default=False)


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
        norms: Of per-sample gradients of weights shared over positions: from the ``"gradients"`` themselves
            (``s i o`` multiplications for each sample), or from ``"products"`` between pairs of positions
            (``s^2 (i + o)``).
        products: Per-sample gradients of a bite in one ``"batched"`` product, or each as a ``"single"`` one.
        factors: Input factors of convolutions from unfolded ``"patches"``, or from ``"shifts"`` of the input.
        convolutions: Per-sample gradients of convolutions from unfolded ``"patches"``, or by one convolution
            with ``"groups"`` for every sample, which unfolds nothing.

    Raises:
        BadInput: For a name that is not known.
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


def forced(kind: str) -> str | None:
    """The name of the algorithm that is forced, if one is."""
    chosen = _FORCED.get()
    return None if chosen is None else chosen.get(kind)


@contextlib.contextmanager
def choosing(frugal: bool) -> Iterator[None]:
    """Choose what is not forced by the memory that it takes, or else by its time."""
    token = _FRUGAL.set(frugal)
    try:
        yield
    finally:
        _FRUGAL.reset(token)


def frugal() -> bool:
    """Whether the least memory is what counts."""
    return _FRUGAL.get()
