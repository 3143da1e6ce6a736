"""The most bytes that PyTorch's CPU allocator has given out at once, beside what was there."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from packprop.applications.compiled.costs import peak_of


def most_allocated(call: Callable[[], None]) -> int:
    """The peak of a call, by PyTorch's profiler."""

    def run(_: object) -> list[Tensor]:
        call()
        return []

    return peak_of(run, [])
