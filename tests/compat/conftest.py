"""Double precision for all tests here; an installed `backpack` and a fresh one for those that ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import packprop
from packprop import compat
from packprop.compat import calls
from packprop.engine.recording.marks import EXTENDED


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _left_extended() -> Iterator[None]:
    """Extend again what other files have extended: BackPACK's ``CTX.remove_hooks()`` restores all modules."""
    extended = list(EXTENDED)
    yield
    for module in extended:
        packprop.extend(module)


@pytest.fixture
def _installed() -> Iterator[None]:
    assert compat.install(replace=True)
    yield
    compat.uninstall()


@pytest.fixture
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has defined no extension for modules yet."""
    monkeypatch.setattr(calls, "_keeping", False)
