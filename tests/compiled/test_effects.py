"""What passes change beside their results: no tracing, check or replay changes more, or less."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import extensions
from packprop.errors import PackpropWarning
from tests.compiled.steps import batch, compiled, quietly, replays, settle


class Noisy(nn.BatchNorm1d):
    """Normalises, draws twice, and writes to a buffer, a parameter, a tensor of its own and its input."""

    def __init__(self) -> None:
        super().__init__(3)
        self.source = torch.Generator()
        self.register_buffer("scale", torch.ones(()))
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
            self.weight.mul_(0.9)
            self.seen.add_(len(x))
        noise = torch.randn(3, generator=self.source)
        return self.scale * F.dropout(super().forward(x.mul_(0.5)) + noise, 0.5)


def test_a_pass_in_place_of_a_replay_begins_where_that_began() -> None:
    model, other = (nn.Sequential(Noisy(), nn.Linear(3, 3)).double() for _ in range(2))
    step = compiled(model, extensions.DiagHessianMC(generator=torch.Generator()))
    settle(step)
    other.load_state_dict(model.state_dict())
    other[0].seen.copy_(model[0].seen)
    other[0].source.set_state(model[0].source.get_state())
    model.zero_grad()
    given, y = batch()
    given[0, 0] = torch.nan
    x = given.clone()
    torch.manual_seed(1)
    with pytest.warns(PackpropWarning, match="finite|NaN"):
        step(given, y)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    F.cross_entropy(other(x), y).backward()
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(other[0].source.get_state(), model[0].source.get_state())
    assert other[0].seen == model[0].seen
    pairs = [(given, x), *zip(model.state_dict().values(), other.state_dict().values(), strict=True)]
    pairs += [(own.grad, its.grad) for own, its in zip(model.parameters(), other.parameters(), strict=True)]
    for own, its in pairs:
        torch.testing.assert_close(own, its, equal_nan=True)
    assert any(kind.runner is not None for kind in step.kinds)


def with_running_mean(ema: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        with torch.no_grad():
            ema[0].mul_(0.9).add_(0.1 * value.detach())
        return value / ema[0]

    return loss


def with_noise(source: torch.Generator) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        noise = torch.randn(outputs.shape, generator=source, dtype=outputs.dtype)
        return F.cross_entropy(outputs + noise, targets)

    return loss


class Shrinking(nn.Linear):
    """Writes to its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Counting(nn.Linear):
    """Counts in a tensor that is no buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * self.seen.sqrt()


class InPlace(nn.Linear):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


MAKE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "tensor of the loss": lambda: (nn.Linear(3, 3), with_running_mean(torch.ones(2).double())),
    "generator of the loss": lambda: (nn.Linear(3, 3), with_noise(torch.Generator())),
    "parameter": lambda: (Shrinking(3, 3), F.cross_entropy),
    "attribute": lambda: (Counting(3, 3), F.cross_entropy),
    "batch": lambda: (InPlace(3, 3), F.cross_entropy),
}


@pytest.mark.parametrize("name", MAKE)
def test_every_call_changes_what_one_pass_does(name: str) -> None:
    (model, loss), (other, its_loss) = MAKE[name](), MAKE[name]()
    other.load_state_dict(model.state_dict())
    model, other = model.double(), other.double()
    step = compiled(model, extensions.BatchL2Grad(), loss=loss)
    for _ in range(6):
        x, y = batch()
        given = x.clone()
        value = its_loss(other(x), y)
        torch.testing.assert_close(quietly(step, given, y), value.detach())
        assert torch.equal(given, x)
        torch.testing.assert_close(model.state_dict(), other.state_dict())
    assert replays(step) == 3


class Swapping(nn.Linear):
    """Gives its weight other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return super().forward(x)


class Growing(nn.Linear):
    """Gives a tensor of its own another shape."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.room = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.room.unsqueeze_(0)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "words"), [(Swapping, r"\.data"), (Growing, "another shape")])
def test_other_memory_or_another_shape_is_left_to_passes(kind: type[nn.Linear], words: str) -> None:
    model = kind(3, 3).double()
    other = copy.deepcopy(model)
    step = compiled(model, extensions.BatchL2Grad())
    step(*batch())
    with pytest.warns(PackpropWarning, match=words):
        step(*batch())
    other.weight.data = model.weight.data.clone()
    x, y = batch()
    torch.testing.assert_close(quietly(step, x, y), F.cross_entropy(other(x), y).detach())
    assert not replays(step)
