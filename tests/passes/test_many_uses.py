"""A weight that is used at many steps: its uses are joined once, however many chunks of samples there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.passes import contributions
from packprop.engine.passes.chunks import ChunkSizes

SAMPLES, STEPS = 5, contributions.MANY + 4
ASKED = (
    extensions.BatchGrad(),
    extensions.BatchL2Grad(),
    extensions.Variance(),
    extensions.DiagGGNExact(),
    extensions.BatchDotGrad(),
    extensions.KFLR(),
)
VALUES = ("grad_batch", "batch_l2", "variance", "diag_ggn_exact", "batch_dot", "kflr")


class LastState(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[1][0]


def values_of(model: nn.Module, x: Tensor, asked: Any = ASKED, fields: Any = VALUES) -> list[Any]:
    """Everything that is asked for."""
    with packprop.backpack(*asked):
        packprop.extend(nn.MSELoss())(model(x), torch.ones(len(x), 3).double()).backward()
    return [getattr(parameter, field) for parameter in model.parameters() for field in fields]


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many structures were joined, each time that some were."""
    counts: list[int] = []
    join = contributions.join

    def counted(parts: Any) -> Any:
        counts.append(len(parts))
        return join(parts)

    monkeypatch.setattr(contributions, "join", counted)
    return counts


def test_values_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are taken of the joint structure have the values of uses that are joined for each chunk."""
    model, x = packprop.extend(LastState().double()), torch.randn(SAMPLES, STEPS, 2).double()
    expected = values_of(model, x)
    monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: 2)
    in_chunks = values_of(model, x)
    monkeypatch.setattr(contributions, "MANY", STEPS + 1)
    one_by_one = values_of(model, x)
    for known, *others in zip(expected, in_chunks, one_by_one, strict=True):
        for value in others:
            torch.testing.assert_close(value, known)


def test_some_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of listed samples are theirs."""
    model, x = packprop.extend(LastState().double()), torch.randn(SAMPLES, STEPS, 2).double()
    expected = values_of(model, x, (extensions.BatchGrad(),), ("grad_batch",))
    monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: 2)
    chosen = [3, 0, 4]
    for value, known in zip(
        values_of(model, x, (extensions.BatchGrad(subsampling=chosen),), ("grad_batch",)), expected, strict=True
    ):
        torch.testing.assert_close(value, known[chosen])


def test_uses_are_joined_once(joins: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of chunks does not matter."""
    model, x = packprop.extend(LastState().double()), torch.randn(SAMPLES, STEPS, 2).double()
    counts = []
    for size in (SAMPLES, 1):
        monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_, size=size: size)
        joins.clear()
        values_of(model, x, (extensions.BatchL2Grad(),), ("batch_l2",))
        counts.append(sum(count >= contributions.MANY for count in joins))
    assert counts == [2, 1 + SAMPLES]  # the weight of the states once, their bias in each chunk
