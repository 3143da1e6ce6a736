"""What a compiled graph costs beside the graph as it is: the faster one is kept, and the budget."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from packprop import extensions
from packprop.applications.compiled import compiler, costs, replayer
from packprop.applications.compiled.costs import peak_of, seconds_in_turns
from packprop.applications.compiled.step import CompiledStep
from packprop.errors import PackpropWarning
from tests.compiled.steps import EAGER_CALLS, batch, check_call, compiled, network, replays, settle
from tests.selection import thorough

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LOSS = nn.CrossEntropyLoss()


def calling(count: int, size: int) -> Any:
    """A backend whose code does what the graph says, and holds so many tensors of so many bytes besides."""

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*given: torch.Tensor) -> Any:
            held = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
            outputs = graph(*given)
            del held
            return outputs

        return run

    return backend


def settle_anew(step: CompiledStep, model: nn.Module) -> None:
    """Calls of one kind: plans count gradients that are there."""
    for _ in range(EAGER_CALLS):
        model.zero_grad()
        step(*batch())


def test_slow_code_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.2, 1.0])
    model = network()
    step = compiled(model, extensions.BatchL2Grad(), backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        settle(step)
    check_call(step, model, LOSS, *batch(), extensions.BatchL2Grad())
    (kind,) = step.kinds
    assert kind.runner is not None
    assert kind.runner.backend == "eager"
    assert replays(step) == 1
    assert "; compiled it takes 1.2e+03 ms, uncompiled 1e+03 ms; 1 replays" in str(step)


def test_long_compiling_for_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.2, 1.0])
    monkeypatch.setattr(compiler, "COSTLY", 0.0)
    step = compiled(network(), extensions.BatchL2Grad(), backend="aot_eager")
    with pytest.warns(PackpropWarning, match=r"uncompiled, after \d+ s of compiling: compiled it takes 1.2e"):
        settle(step)


def test_passes_that_are_faster_after_long_compiling_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.0, 1.0])
    monkeypatch.setattr(compiler, "COSTLY", 0.0)
    monkeypatch.setattr(replayer, "NOISE", 0.0)  # no replay is fast enough
    step = compiled(network(), extensions.BatchL2Grad(), backend="aot_eager")
    settle(step)
    for _ in range(replayer.MEASURED - 1):
        step(*batch())
    with pytest.warns(PackpropWarning, match=r"a graph: after \d+ s of compiling, a replay takes"):
        step(*batch())
    assert "eager: a replay takes" in str(step)


@thorough
def test_calls_of_another_kind_that_are_compiled_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.0, 1.0])
    monkeypatch.setattr(replayer, "WORTH", 1)
    step = compiled(network(), extensions.BatchL2Grad(), backend="aot_eager")
    settle(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (5, 6):
            for _ in range(EAGER_CALLS + 3):
                step(*batch(size))
    said = [str(each.message) for each in caught if "compiled again" in str(each.message)]
    assert len(said) == 1
    assert "tensor 0 of the batch: [5, 3] before, [6, 3] now" in said[0]


def test_it_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.2, 1.0])
    monkeypatch.setattr("packprop.applications.compiled.replayer.WORTH", 2)
    step = compiled(network(), extensions.BatchL2Grad(), backend="aot_eager")
    settle(step)
    for _ in range(4):
        step(*batch())
    assert replays(step) == 4


def test_fast_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.0, 1.0])
    step = compiled(network(), extensions.BatchL2Grad(), backend="aot_eager")
    settle(step)
    assert "by 'aot_eager'" in str(step)


def test_code_that_takes_too_much_memory() -> None:
    model = network()
    asked = extensions.BatchL2Grad()
    step = compiled(model, asked, backend=calling(3, 2**22), memory="2MiB")
    with pytest.warns(PackpropWarning, match=r"it takes 12(\.\d)? MiB of memory.*the budget is 2 MiB"):
        settle_anew(step, model)
    (kind,) = step.kinds
    model.zero_grad()
    check_call(step, model, LOSS, *batch(), asked)
    assert kind.runner is not None
    assert kind.runner.backend == "eager"


def test_code_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.0, 1.0])
    model = network()
    step = compiled(model, extensions.BatchL2Grad(), backend=calling(3, 2**22), memory="20MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        settle_anew(step, model)
    (kind,) = step.kinds
    assert kind.runner is not None
    assert kind.runner.verdict is None


def test_the_peak_counts_what_is_alive_at_once() -> None:
    x = torch.randn(1000, requires_grad=True)
    x.grad = torch.zeros(1000)

    def run(tensors: Any) -> list[torch.Tensor]:
        (given,) = tensors
        first = given.detach() + 1  # 4,000 bytes
        second = first * 2  # 4,000 more
        del first
        return [second.reshape(2, 500).sum(1), second + 1]  # 8 and 4,000 more

    for _ in range(2):  # a few bytes more for the numbers 1 and 2
        assert 0 <= peak_of(run, [x]) - (2 * 4000 + 8008) < 100


def test_replays_that_are_slower_than_passes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "MEASURED", 2)
    model, asked = network(), extensions.BatchL2Grad()
    step = compiled(model, asked)
    settle(step)
    (kind,) = step.kinds
    kind.pass_seconds = 1e-9
    for _ in range(4):
        check_call(step, model, LOSS, *batch(), asked)
    assert replays(step) == 2
    assert "eager: a replay takes" in str(step)


def test_turns_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LONGEST", 0.0)
    calls = []

    def run(tensors: Any) -> list[torch.Tensor]:
        calls.append(1)
        return [torch.zeros(())]

    assert len(seconds_in_turns([run, run], [])) == 2
    assert len(calls) == 2
