"""Ctrl-C during long work: it ends the work, wherever Python is at that moment."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_kept() -> Iterator[Callable[[], None]]:
    """Raise interrupts in the block as usual; yield a function that raises one again, if Python dropped it.

    Python prints and drops exceptions from a destructor or from the callback of a weak reference, so a
    ``KeyboardInterrupt`` there ends nothing. packprop replaces no handler that you have set, and does nothing
    in other threads than the main one, which alone gets signals.

    Raises:
        KeyboardInterrupt: From the function, if there was an interrupt.
    """
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        signal.default_int_handler(number, frame)

    def raise_again() -> None:
        if has_come:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_again
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield raise_again
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
