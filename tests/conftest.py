"""Settings of every test run: one thread per worker, and no state that leaks between tests."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import pytest
import torch

from tests.seeding import seed
from tests.selection import mark_thorough

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Start every test from the same random state and leave none behind."""
    with torch.random.fork_rng(devices=[]):
        seed(0)
        yield


@pytest.fixture
def _new_objects_only() -> None:
    """Hide what is there from ``gc.get_objects``: a test that counts objects then counts its own."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what only `make test-all` runs, before anything is selected by marks."""
    mark_thorough(item)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and leave what they are out of it from then on.

    A million objects are made that stay. Beside them every full collection takes long, and one is due only when
    a quarter of all is new.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.collect()  # counts anew what is there, now without what is frozen
        gc.enable()
