"""Functions of a batch ``[n, d]`` after which no sample stands for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

MIXING: list[Any] = [
    pytest.param(lambda h: h - h.mean(0), id="mean"),
    pytest.param(lambda h: h / h.norm(), id="norm"),
    pytest.param(lambda h: h @ h.T @ h, id="gram"),
    pytest.param(lambda h: h.softmax(0), id="softmax"),
    pytest.param(lambda h: h.cumsum(0), id="cumulative"),
    pytest.param(lambda h: h.flip(0).cumsum(0).flip(0), id="cumulative-backwards"),
    pytest.param(lambda h: torch.roll(h, 1, 0) + h, id="roll"),
    pytest.param(lambda h: h + h.flip(0), id="flip"),
    pytest.param(lambda h: torch.cat([h[:1] + h[1:2], h[1:]]), id="one-pair"),
    pytest.param(lambda h: torch.cat([h[:-1], h[-1:] + h[-2:-1]]), id="last-pair"),
    pytest.param(lambda h: h.sort(0).values, id="sort"),
    pytest.param(
        lambda h: F.conv1d(h.T[:, None], torch.ones(1, 1, 3).to(h), padding=1)[:, 0].T,
        id="convolution-over-samples",
    ),
]
