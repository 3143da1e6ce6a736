"""An interrupt ends a run, also where Python drops what is raised."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop.extensions import Variance

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupts:
    """Sends an interrupt to this process when it is deleted: what that raises is printed and dropped."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # Python looks for signals between two of its instructions
            pass


def batches(seen: list[int], sends: bool) -> Iterator[Batch]:
    for number in range(6):
        if sends and number == 2:
            Interrupts()
        seen.append(number)
        yield torch.ones(3, 4), torch.zeros(3, 2)


def run(data: Iterator[Batch]) -> Any:
    return packprop.compute(nn.Linear(4, 2), nn.MSELoss(), data, [Variance()], progress=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(batches(seen, sends=True))
    assert seen == [0, 1, 2]  # the batch in hand is finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_is_left_alone() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        seen: list[int] = []
        run(batches(seen, sends=True))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]
    assert len(seen) == 6


def test_other_threads_take_no_signals() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=run, args=(batches(seen, sends=False),))
    thread.start()
    thread.join()
    assert len(seen) == 6
