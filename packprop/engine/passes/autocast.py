"""Autocast regions around a pass: packprop leaves them for its own sums, and enters them for your pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from packprop.engine.tensors.hooks import NOTHING


class AutocastRegions(NamedTuple):
    """Regions that packprop can leave and enter again.

    Args:
        regions: For each region the type of device, the precision, and whether it caches copies of weights.
    """

    regions: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def now(cls, devices: Iterable[str]) -> AutocastRegions:
        """Return the active regions."""
        available = (kind for kind in devices if torch.amp.is_autocast_available(kind))
        return cls(
            tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
                for kind in available
                if torch.is_autocast_enabled(kind)
            )
        )

    def switched(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Enter the regions again, or leave them."""
        return self._switched(on) if self.regions else NOTHING

    @contextlib.contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, cached in self.regions:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
            yield
