"""Whatever a test registers is forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from packprop.engine.functions.losses.description import LOSSES
from packprop.engine.functions.registry import RULES


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Whatever a test registers is forgotten after it."""
    rules, losses = dict(RULES), dict(LOSSES)
    yield
    for table, before in ((RULES, rules), (LOSSES, losses)):
        table.clear()
        table.update(before)
