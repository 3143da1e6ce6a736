"""Work that takes long: its progress, a warning if it will take minutes, a bar on a terminal.

# NOTE [Long work]
packprop does not know beforehand how long a pass takes: that depends on the machine. It does know the number of
columns, and the size of the matrices to decompose. So it times the first of them while it works, and assumes
that the rest takes as long. Nothing waits for a device: on an accelerator, where calls return before their work
is done, an estimate comes later, when its queue is full.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packprop.engine.tensors.plain_text import import_rich
from packprop.engine.tensors.setting import setting
from packprop.errors import PackpropWarning

if TYPE_CHECKING:
    from rich.progress import Progress

clock = time.perf_counter

LONG = 60.0
"""A warning appears for work that takes more seconds than this."""

SHOWN = 5.0
"""Seconds after which a terminal shows the progress of the work."""

SETTLED = 0.5
"""The least seconds of work that an estimate is made from: the first calls take longer than others."""


@dataclass
class Gauge:
    """The progress of one kind of work.

    Args:
        total: The amount of work, as far as it is known.
        done: The part that is done.
        seconds: The time that this part took.
    """

    total: float = 0.0
    done: float = 0.0
    seconds: float = 0.0

    @property
    def left(self) -> float:
        """Seconds that the rest will take at the rate so far; 0 while that is not known."""
        if self.seconds < SETTLED or not self.done:
            return 0.0
        return self.seconds * max(0.0, self.total - self.done) / self.done


class LongWork:
    """The work of one pass.

    Args:
        asked: The quantities of the pass.
        cheaper: Something that would take less time.
        bar: Lets a terminal show a bar.
    """

    def __init__(self, asked: str, cheaper: Sequence[str] = (), bar: bool = True) -> None:
        self._asked, self._cheaper, self._bar = asked, cheaper, bar
        self.gauges: defaultdict[str, Gauge] = defaultdict(Gauge)
        """The progress of each kind of work: ``"columns"``, or ``"eigenvectors"`` (rows, cubed)."""
        self._begin, self._warned = clock(), False
        self._progress: Progress | None = None

    @contextlib.contextmanager
    def doing(self, what: str, count: float) -> Iterator[None]:
        """Count the work that the block inside does."""
        start = clock()
        yield
        gauge = self.gauges[what]
        gauge.done += count
        gauge.seconds += clock() - start
        self._look(what, gauge)

    def _look(self, what: str, gauge: Gauge) -> None:
        left, passed = sum(gauge.left for gauge in self.gauges.values()), clock() - self._begin
        if not self._warned and passed + left > LONG and left > LONG / 4:
            self._warned = True
            warnings.warn(self._text(what, gauge, left), PackpropWarning, stacklevel=2)
        if self._bar and passed > SHOWN and sys.stderr.isatty():
            self._show(passed, left)

    def _text(self, what: str, gauge: Gauge, left: float) -> str:
        done = f"{gauge.done:,.0f} of {gauge.total:,.0f} {what}"
        if what != "columns":
            done = f"{gauge.done / max(gauge.total, gauge.done):.0%} of the work on {what}"
        cheaper = "; ".join([*self._cheaper, "requires_grad=False on parameters that do not matter"])
        return (
            f"{self._asked} will take about {_duration(left)} more: {done} took {gauge.seconds:.2g} s. "
            f"Cheaper: {cheaper}."
        )

    def _show(self, passed: float, left: float) -> None:
        import_rich()
        from rich.console import Console
        from rich.progress import Progress

        if self._progress is None:
            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task(self._asked)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], total=passed + left, completed=passed)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()


_CURRENT: ContextVar[LongWork | None] = ContextVar("packprop_long_work", default=None)


@contextlib.contextmanager
def long_work(asked: str, cheaper: Sequence[str] = (), bar: bool = True) -> Iterator[LongWork]:
    """Time the work inside; inside another such context, it counts as part of that work."""
    outer = _CURRENT.get()
    if outer is not None:
        yield outer
        return
    with setting(_CURRENT, LongWork(asked, cheaper, bar)) as work, contextlib.closing(work):
        yield work


def expect(what: str, count: float) -> None:
    """Announce more work of this kind in the current pass, if there is one."""
    work = _CURRENT.get()
    if work is not None:
        work.gauges[what].total += count


def doing(what: str, count: float) -> contextlib.AbstractContextManager[None]:
    """Count work of this kind for the current pass, done inside."""
    work = _CURRENT.get()
    return contextlib.nullcontext() if work is None else work.doing(what, count)


@contextlib.contextmanager
def waiting(said: str, shown: bool = True) -> Iterator[None]:
    """Show on a terminal how long the work inside has taken so far, where no estimate is possible."""
    if not shown or not sys.stderr.isatty():
        yield
        return
    import_rich()
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    columns = f"packprop: {said}", TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        progress.add_task("")
        yield


def _duration(seconds: float) -> str:
    """Format a duration roughly.

    >>> [_duration(s) for s in (70, 200, 8000)]
    ['70 s', '3 minutes', '2.2 hours']
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
