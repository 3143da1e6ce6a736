"""Autocast regions that a pass is begun in: packprop's own sums leave them, the user's pass runs inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch


class AutocastRegions(NamedTuple):
    """Regions that can be left and entered again.

    Args:
        regions: Type of device, precision, and whether copies of weights are kept.
    """

    regions: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def now(cls, devices: Iterable[str]) -> AutocastRegions:
        """The regions that are in force."""
        available = (kind for kind in devices if torch.amp.is_autocast_available(kind))
        return cls(
            tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
                for kind in available
                if torch.is_autocast_enabled(kind)
            )
        )

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Enter the regions again, or leave them."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, cached in self.regions:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
            yield
