"""The memory of the pass over a batch, beside its plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from packprop.applications.reports.profile.costs import POINTS, MemoryUse, memory_use, thinned
from packprop.engine.passes.chunks import ChunkSizes
from packprop.extensions import BatchGrad
from tests.reports.profiled import SIZE, network, quiet
from tests.selection import thorough


def test_it_is_close_to_the_plan() -> None:
    model = nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 4))
    data = (torch.randn(300, 50), torch.randint(4, (300,)))
    use = quiet(model, nn.CrossEntropyLoss(), data, curvature=False, timeline=True).memory
    assert use is not None
    assert use.samples == 128
    assert use.budget is None
    assert use.planned is not None
    assert 0.8 * use.planned < use.peak < 1.2 * use.planned
    assert max(size for _, size in use.timeline) == use.peak
    assert len(use.timeline) <= POINTS
    assert [at for at, _ in use.timeline] == sorted({at for at, _ in use.timeline})
    assert use.forward is not None
    assert 0 < use.forward < use.operations
    assert {choice["parameter"] for choice in use.choices} == {name for name, _ in model.named_parameters()}
    assert sum(use.parts.values()) == use.planned


def test_a_budget_and_its_chunks() -> None:
    """With the chunks that a budget has led to: no more is alive than was planned for these."""
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.Flatten(), nn.Linear(1152, 4))
    batch = (torch.randn(64, 1, 8, 8), torch.randint(4, (64,)))
    budget = 5 * 2**20

    def use(scratch: int) -> MemoryUse:
        sizes = ChunkSizes(scratch, 2**20)
        return memory_use(
            model, nn.CrossEntropyLoss(), batch, lambda: [BatchGrad()], sizes, budget, torch.device("cpu")
        )

    whole, cut = use(2**23), use(2**15)
    for each in (whole, cut):
        assert each.budget == budget
        assert each.planned is not None
        assert each.peak <= each.planned == sum(each.parts.values())
        assert each.parts["results of the batches before"] > 0
    assert max(choice["chunks"] for choice in whole.choices) == 1
    assert max(choice["chunks"] for choice in cut.choices) > 1


@thorough
def test_nothing_else_changes() -> None:
    model, data = network()
    before = [parameter.clone() for parameter in model.parameters()]
    torch.manual_seed(5)
    without = quiet(model, nn.CrossEntropyLoss(), data)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    found = quiet(model, nn.CrossEntropyLoss(), data, timeline=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert (found.layers, found.total, found.loss) == (without.layers, without.total, without.loss)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert without.missing == {"memory": "packprop.profile(..., timeline=True) measures it"}


class Deciding(nn.Module):
    """Decides on data, which a run without data cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.sum() > -1e9) else x[:, :2]


def test_a_model_that_cannot_be_planned_is_measured() -> None:
    data = (torch.randn(SIZE, 3), torch.randint(2, (SIZE,)))
    use = quiet(Deciding(), nn.CrossEntropyLoss(), data, timeline=True).memory
    assert use is not None
    assert use.peak > 0
    assert (use.planned, use.choices) == (None, [])
    assert use.why_not is not None
    assert "cannot be run without data" in use.why_not


def test_what_fails_after_the_work_costs_the_timeline_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("packprop.applications.reports.profile.run.memory_use", fails)
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data, timeline=True)
    assert found.memory is None
    assert found.missing["memory"].startswith("MemoryError: no room")
    assert found.total.gradient_norm is not None


@pytest.mark.parametrize("length", [0, 1, 399, 400, 401, 5000])
def test_thinned(length: int) -> None:
    history = torch.randint(1000, (length,)).tolist()
    points = thinned(history)
    assert len(points) <= POINTS
    assert all(history[at] == size for at, size in points)
    assert not history or max(size for _, size in points) == max(history)
