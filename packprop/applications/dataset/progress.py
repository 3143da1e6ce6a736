"""The progress of a run on a terminal: batches, rate, time left, memory beside the budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from packprop.engine.memory import byte_text, resident_now
from packprop.engine.tensors import allocated_bytes

Advance = Callable[[int], None]
"""A function to call after each batch, with the samples so far."""


@contextlib.contextmanager
def progress_bar(
    said: str, done: int, left: int, budget: int | None, device: torch.device, shown: bool
) -> Iterator[Advance]:
    """Show a bar on standard error, if that is a terminal, in the block; yield a function to advance it.

    Args:
        said: The name of the work.
        done: Batches that were done before.
        left: Batches to come; 0 if their number is unknown.
        budget: The most bytes for tensors; ``None`` without a budget.
        device: The device of the tensors.
        shown: Show the bar; if False, the returned function does nothing.
    """
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda samples: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("batches{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[memory]}"),
    )
    meter = Meter(budget, device)
    with Progress(*columns, console=console, transient=True) as progress:
        total = done + left if left else None
        task = progress.add_task(said, total=total, completed=done, rate="", memory=meter.memory())

        def advance(samples: int) -> None:
            progress.update(task, advance=1, rate=meter.rate(samples), memory=meter.memory())

        yield advance


class Meter:
    """The speed of a run, and its memory.

    Args:
        budget: The most bytes for tensors; ``None`` without a budget.
        device: The device of the tensors. On a CPU, the meter shows the memory of the process: its growth since
            the run began, or, without a budget, all of it.
    """

    def __init__(self, budget: int | None, device: torch.device) -> None:
        self._budget, self._device = budget, device
        self._begin, self._before = time.perf_counter(), resident_now() or 0
        self._first: int | None = None

    def rate(self, samples: int) -> str:
        """Return the samples per second since the first batch, which takes longer than others."""
        if self._first is None:
            self._first, self._begin = samples, time.perf_counter()
            return ""
        passed = time.perf_counter() - self._begin
        return f", {(samples - self._first) / passed:,.0f} samples/s" if passed > 0 else ""

    def memory(self) -> str:
        """Return the bytes in use now, beside the budget if there is one."""
        taken = allocated_bytes(self._device)
        if taken is None:
            resident = resident_now()
            if resident is None:
                return ""
            taken = resident if self._budget is None else max(0, resident - self._before)
        if self._budget is None:
            return f"memory {byte_text(taken)}"
        grown = "" if allocated_bytes(self._device) is not None else "+"
        return f"memory {grown}{byte_text(taken)} of {byte_text(self._budget)}"
