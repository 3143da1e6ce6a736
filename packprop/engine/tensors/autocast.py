"""Autocast regions around a pass: packprop leaves them for its own sums, and enters them for your pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from packprop.engine.tensors.hooks import NOTHING

Function = TypeVar("Function", bound=Callable[..., Any])


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


def outside_autocast(function: Function) -> Function:
    """Return the function, which leaves autocast regions: its products have the digits of its arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with AutocastRegions.now().switched(False):
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]  # it has the same arguments and results
