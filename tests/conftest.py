"""Settings of every test run: one thread per worker, and no state that leaks between tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
gc.disable()  # while tests are collected, which makes a million objects that stay


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Start every test from the same random state and leave none behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pytest_collection_finish() -> None:
    """Leave what was collected out of every garbage collection to come.

    A full collection is due when a quarter of what is there is new: beside a million objects that is never, and
    the models of tests that are over would pile up.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts anew what is there, now without what is frozen
    gc.enable()
