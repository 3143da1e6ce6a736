"""Memory that the checks of a first pass have freed goes back to the system, if it is much."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packprop
from packprop.engine.samples import feeding
from packprop.engine.tensors.device import return_freed_pages
from packprop.extensions import BatchL2Grad
from tests.selection import thorough

RESIDENT = """
import ctypes, torch
from packprop.engine.memory.bytes import resident_now
from packprop.engine.tensors.device import keep_freed_pages, return_freed_pages

keep_freed_pages()
blocks = [torch.ones(2**18) for _ in range(400)]  # 1 MiB each, within the heap
pins = blocks[::8]
del blocks
before = resident_now()
return_freed_pages()
print(before - resident_now())
"""


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory")
def test_freed_pages_return_to_the_system() -> None:
    """350 MiB are free, below blocks that are not."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 * 2**20


@pytest.mark.parametrize(("large", "returns"), [(2**22, False), (1, True)])
def test_only_large_checks_return_what_they_freed(
    large: int, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(feeding, "LARGE", large)
    monkeypatch.setattr(feeding, "return_freed_pages", lambda: (calls.append(1), return_freed_pages()))
    model = packprop.extend(nn.Linear(4, 3))
    for number in range(2):
        calls.clear()
        with packprop.backpack(BatchL2Grad()):
            F.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3).backward()
        assert bool(calls) == (returns and number == 0)  # a later pass makes no checks
