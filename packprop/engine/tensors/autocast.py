"""Autocast regions around a pass: packprop leaves them for its own sums, and enters them for your pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from packprop.engine.tensors.hooks import NOTHING

P = ParamSpec("P")
R = TypeVar("R")


class AutocastRegions(NamedTuple):
    """Regions that packprop can leave and enter again.

    Args:
        regions: For each region the type of device, the precision, and whether it caches copies of weights.
    """

    regions: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def now(cls, devices: Iterable[str] = ("cpu", "cuda", "xpu", "mps")) -> AutocastRegions:
        """Return the active regions of some types of devices."""
        regions = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in devices
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
        return cls(tuple(regions))

    def switched(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that enters the regions again (``on``), or leaves them."""
        return self._switched(on) if self.regions else NOTHING

    def outside(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls the given one outside of the regions."""
        if not self.regions:
            return function

        def called(*args: Any) -> None:
            with self._switched(False):
                function(*args)

        return called

    @contextlib.contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, cached in self.regions:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
            yield


def outside_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function leave the active regions, which would round the products of matrices in it."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with AutocastRegions.now().switched(False):
            return function(*args, **kwargs)

    return called
