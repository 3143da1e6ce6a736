"""Steps of trainers that run them themselves, and fail in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packprop import BadInput, Monitor, PackpropError, backpack, extensions
from packprop.engine.context import innermost
from packprop.integrations.between import StepBetween, caller_of

X, Y = torch.randn(6, 4), torch.randint(3, (6,))
LOSS = nn.CrossEntropyLoss()


class Log:
    """What a trainer's logger was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, values: object, step: int) -> None:
        self.steps.append(step)


def between(log: Log) -> StepBetween:
    return StepBetween({"every": 1}, log)


def mixed() -> nn.Module:
    """A model that mixes samples, so that its backward pass is refused."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.fixture
def failed() -> StepBetween:
    """A trainer that failed in its backward pass, and told nobody."""
    begun = between(Log())
    model = mixed()
    begun.begin(model, 0, run=object())
    with pytest.raises(PackpropError, match="BatchNorm"):
        LOSS(model(X), Y).backward()
    return begun


def trained(log: Log) -> None:
    model, begun, run = nn.Linear(4, 3), between(log), object()
    for number in range(3):
        begun.begin(model, number, run=run)
        LOSS(model(X), Y).backward()
        begun.end()
    begun.abandon()
    assert innermost() is None


def test_the_next_trainer_runs(failed: StepBetween) -> None:
    log = Log()
    trained(log)
    assert log.steps == [0, 1, 2]


def test_another_model_gets_a_monitor_of_its_own() -> None:
    begun = StepBetween({"every": 1, "log": None}, None)
    for scale in (1, 2):
        model = nn.Linear(4, 3)
        begun.begin(model, 0, run=object())
        (scale * LOSS(model(X), Y)).backward()
        begun.end()
        assert begun.monitor is not None
        assert begun.monitor.last is not None
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert begun.monitor.last["gradient_norm"] == pytest.approx(float(norm))


def test_backward_passes_that_follow_are_plain(failed: StepBetween) -> None:
    model = mixed()
    LOSS(model(X), Y).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    failed.abandon()


def test_other_contexts_work_after_it(failed: StepBetween) -> None:
    monitor = Monitor(model := nn.Linear(4, 3), every=1, log=None)
    with monitor.step():
        LOSS(model(X), Y).backward()
    assert monitor.last is not None
    with backpack(extensions.BatchL2Grad()):
        LOSS(model(X), Y).backward()
    failed.abandon()
    assert innermost() is None


def test_a_step_that_failed_before_its_backward_pass_is_forgotten_by_the_next_trainer() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no room")

    model, log = Fails(), Log()
    between(Log()).begin(model, 0, run=object())
    with pytest.raises(RuntimeError, match="no room"):
        model(X)
    trained(log)
    assert log.steps == [0, 1, 2]


def test_two_callbacks_of_one_trainer_are_still_refused() -> None:
    model, run = nn.Linear(4, 3), object()
    first, second = between(Log()), between(Log())
    first.begin(model, 0, run=run)
    with pytest.raises(BadInput, match="around it"):
        second.begin(model, 0, run=run)
    first.abandon()
    assert innermost() is None


def announcing(module: str, begin: Callable[[], None]) -> Callable[[], None]:
    """A function of a module that calls another one, as a trainer announces its steps."""
    names: dict[str, Any] = {"__name__": module, "begin": begin}
    exec("def inner():\n    begin()\ndef announce():\n    inner()", names)
    return names["announce"]  # type: ignore[no-any-return]  # made by exec


def fails_before_its_backward_pass(begun: StepBetween, model: nn.Module) -> None:
    def begin() -> None:
        begun.begin(model, 0, run=object(), owner=caller_of("announcing"))

    def train() -> None:
        announcing("announcing", begin)()
        LOSS(model(X), Y).backward()
        assert begun.monitor is not None
        begin_again = announcing("announcing", begin)
        begun.end()
        begin_again()
        raise MemoryError

    with pytest.raises(MemoryError):
        train()
    assert begun.monitor is not None
    assert begun.monitor.last is not None  # the first step was seen


def test_after_a_step_that_failed_before_its_backward_pass_passes_are_plain() -> None:
    begun, model = between(Log()), nn.Linear(4, 3)
    fails_before_its_backward_pass(begun, model)
    other = mixed()
    LOSS(other(X), Y).backward()  # a watched pass would be refused
    LOSS(model(X), Y).backward()
    assert not any(name.startswith("_packprop") for p in model.parameters() for name in vars(p))
    monitor = Monitor(model, every=1, log=None)
    with monitor.step():
        LOSS(model(X), Y).backward()
    assert monitor.last is not None
    begun.abandon()
    assert innermost() is None


def test_no_caller_of_a_module_that_does_not_run() -> None:
    assert caller_of("announcing") is None
