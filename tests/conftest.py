"""Settings of every test run: one thread per worker, and no state that leaks between tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Start every test from the same random state and leave none behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
