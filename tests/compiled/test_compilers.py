"""Graphs through compilers: PyTorch's, one that fails, one that is wrong, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from packprop import extensions
from packprop.applications.compiled import compiler, replayer
from packprop.errors import PackpropWarning
from tests.compiled.steps import batch, check_call, compiled, network, quietly, replays, settle
from tests.selection import often, thorough

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LOSS = nn.CrossEntropyLoss()
ASKED = (extensions.BatchL2Grad(), extensions.DiagGGNExact())


@thorough
@often(lambda backend: backend != "inductor")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_does_what_a_pass_does(backend: str) -> None:
    model = network()
    step = compiled(model, *ASKED, backend=backend)
    settle(step)
    for _ in range(2):
        check_call(step, model, LOSS, *batch(), *ASKED)
    assert replays(step) == 2
    (kind,) = step.kinds
    assert kind.runner is not None
    assert f"compiled in {kind.runner.seconds:.2g} s" in str(step)


def test_draws_are_those_of_a_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    step = compiled(model, extensions.DiagGGNMC(), backend="aot_eager")
    settle(step)
    check_call(step, model, LOSS, *batch(), extensions.DiagGGNMC())
    assert replays(step) == 1


@thorough
def test_a_compiler_that_fails() -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler on this machine")

    model = network()
    for _ in range(2):  # each step says it
        step = compiled(model, *ASKED, backend=failing)
        with pytest.warns(PackpropWarning, match="no compiler on this machine"):
            settle(step)
    quietly(step, *batch())
    check_call(step, model, LOSS, *batch(), *ASKED)
    assert replays(step) == 2


@thorough
def test_a_compiler_that_is_wrong() -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *given: [out + 1 if out.is_floating_point() else out for out in graph(*given)]

    model = network()
    step = compiled(model, *ASKED, backend=wrong)
    with pytest.warns(PackpropWarning, match="does not do what the graph says"):
        settle(step)
    step(*batch())
    check_call(step, model, LOSS, *batch(), *ASKED)
    assert replays(step) == 1


@thorough
def test_other_kinds_are_compiled_when_they_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "WORTH", 2)
    compilations = []

    def counting(graph: Any, inputs: Any) -> Any:
        compilations.append(len(inputs))
        return graph

    model = network()
    step = compiled(model, *ASKED, backend=counting)
    for size, expected in [(5, [1] * 3), (2, [1, 1, 1, 1, 1, 2, 2])]:
        settled = []
        for _ in range(len(expected)):
            check_call(step, model, LOSS, *batch(size), *ASKED)
            settled.append(len(compilations))
        assert settled[2:] == expected[2:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs() -> None:
    model = network().cuda()
    step = compiled(model, *ASKED, backend="inductor", mode="reduce-overhead")
    x, y = (each.cuda() for each in batch())
    for _ in range(3):
        step(x, y)
    kept = []
    for _ in range(4):
        check_call(step, model, LOSS, torch.randn_like(x), y, *ASKED)
        kept.append((model[0].weight.diag_ggn_exact, model[0].weight.diag_ggn_exact.clone()))
    for held, value in kept:  # results are not overwritten by the next replay
        assert torch.equal(held, value)
    assert replays(step) == 4


@pytest.mark.parametrize("part", [lambda x: x[:, :6:2], lambda x: x[:1, :3].expand(5, 3)])
def test_slices_keep_their_strides_for_the_compiler(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code takes inputs with the strides of its first call alone."""

    def strict(graph: Any, inputs: Any, **_: Any) -> Any:
        strides = [each.stride() for each in inputs]

        def run(*given: torch.Tensor) -> Any:
            assert [each.stride() for each in given] == strides
            return graph(*given)

        return run

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: strict)
    model, asked = network(), extensions.BatchL2Grad()
    step = compiled(model, asked, backend="inductor")
    for _ in range(5):
        check_call(step, model, LOSS, part(torch.randn(5, 8).double()), torch.randint(3, (5, 2))[:, 0], asked)
    assert replays(step) == 2


def test_equal_results_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may compute equal results once; a change of one in place must not reach the others."""

    def joining(graph: Any, inputs: Any, **_: Any) -> Any:
        def run(*given: torch.Tensor) -> Any:
            outputs = graph(*given)
            return [next(e for e in outputs if e.shape == o.shape and e.equal(o)) for o in outputs]

        return run

    class Twice(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + self.shift

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: joining)
    monkeypatch.setattr(compiler, "seconds_in_turns", lambda runs, tensors: [1.0, 1.0])
    model, asked = Twice().double(), extensions.BatchGrad()
    step = compiled(model, asked, backend="inductor")
    settle(step)
    check_call(step, model, LOSS, *batch(), asked)
    assert replays(step) == 1
    model.bias.grad_batch.zero_()
    assert model.shift.grad_batch.any()
