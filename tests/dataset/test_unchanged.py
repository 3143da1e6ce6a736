"""What a forward pass writes to, running statistics and the like, is put back after each batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import packprop
from packprop.engine.tensors.state import version
from packprop.extensions import Variance
from tests.selection import one_in


class Counts(nn.Module):
    """Scales by a buffer that it replaces in each call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        out: Tensor = self.linear(x) * self.calls
        return out


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(4, 2)
    )


def batch_normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "running statistics": normalised,
    "power iteration": lambda: nn.Sequential(spectral_norm(nn.Linear(4, 3)), nn.Linear(3, 2)),
    "a buffer that is replaced": Counts,
}


def state(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (id(tensor), tensor.detach().clone()) for name, tensor in named}


def assert_same_state(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> None:
    after = state(model)
    assert after.keys() == before.keys()
    for name, (identity, value) in before.items():
        assert after[name][0] == identity, name
        assert torch.equal(after[name][1], value), name


@one_in(3)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("compiled", [False, True], ids=["passes", "graphs"])
def test_each_batch_meets_the_same_model(kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:
        monkeypatch.setattr("packprop.applications.dataset.replays.MANY", 1)
        monkeypatch.setattr("packprop.applications.dataset.replays.PASSES_TO_TRACE", 0)
    torch.manual_seed(0)
    model, loss = MODELS[kind]().double(), nn.MSELoss()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
    before = state(model)
    one = packprop.compute(model, loss, (x, y), [Variance()], batch_size=6, progress=False)
    assert_same_state(model, before)
    many = packprop.compute(model, loss, (x, y), [Variance()], batch_size=1, progress=False)
    assert_same_state(model, before)
    for name, value in one["variance"].items():
        torch.testing.assert_close(many["variance"][name], value)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "statistics of a batch": (batch_normalised, torch.randn(6, 4), "BatchNorm"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_pass_has_changed_nothing(kind: str) -> None:
    make, x, why = REFUSED[kind]
    model = make()
    before = state(model)
    with pytest.raises(packprop.PackpropError, match=why):
        packprop.compute(model, nn.MSELoss(), (x, torch.randn(6, 2)), [Variance()], progress=False)
    assert_same_state(model, before)


def test_what_is_not_written_to_is_left_alone() -> None:
    model = normalised().eval()
    buffers = dict(model.named_buffers())
    versions = {name: version(buffer) for name, buffer in buffers.items()}
    packprop.compute(model, nn.MSELoss(), (torch.randn(6, 4), torch.randn(6, 2)), [Variance()], progress=False)
    assert {name: version(buffer) for name, buffer in buffers.items()} == versions
