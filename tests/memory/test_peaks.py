"""The peak of a step is what was predicted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.graph.walk import walk
from packprop.engine.memory.live import LiveBytes
from packprop.engine.memory.peaks import Peak
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.engine.memory.planning import plan_again
from packprop.engine.recording.marks import HANDLES
from packprop.engine.samples.locating import check_graph
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropError, PackpropWarning
from tests.cases import Case
from tests.memory.steps import PLANNED, data, measured, network
from tests.references.oracle import Problem
from tests.references.running import HESSIANS, ROWS, Row, backward, forward, make_all, rows_for
from tests.selection import often, one_in, thorough

FEW = ("grad_batch", "variance", "diag_ggn_exact", "kfac", "diag_h")
"""One extension for each kind of seed and of merging."""


@one_in(5)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_peak_is_what_was_predicted(row: Row) -> None:
    model, batch = network(), data()
    asked = row(torch.Generator())
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked])
    assert measured(model, batch, asked, memory=plan) == pytest.approx(plan.peak, rel=0.05)
    assert sum(plan.parts.values()) == pytest.approx(plan.peak, rel=0.01)


@one_in(3)
@often(lambda row, dtype: dtype == torch.bfloat16 and row.attribute in FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", [*ROWS, *HESSIANS], ids=lambda row: row.name)
def test_the_peak_in_low_precision(row: Row, dtype: torch.dtype) -> None:
    """Sums, norms and statistics take four bytes an entry there, gradients side by side take two."""
    model, (x, y) = network().to(dtype), data()
    batch, asked = (x.to(dtype), y), row(torch.Generator())
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked])
    assert measured(model, batch, asked, memory=plan) == pytest.approx(plan.peak, rel=0.05)
    saved = [tensor for p in model.parameters() for tensor in tensors_in(getattr(p, row.attribute))]
    assert plan.results == sum(tensor.numel() * tensor.element_size() for tensor in saved)


@thorough
@pytest.mark.parametrize("given", ["plan", "budget"])
def test_a_batch_that_autograd_does_not_keep_is_there_all_the_same(given: str) -> None:
    """The user holds the batch: it is not freed, even if the first layer crops it and saves nothing of it."""
    layers = nn.ZeroPad2d(-2), nn.Flatten(), nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 6)
    model, batch = nn.Sequential(*layers), data()
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [extensions.BatchL2Grad()])
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, nn.CrossEntropyLoss(), batch, [extensions.BatchL2Grad()], memory=1)
    memory = plan if given == "plan" else caught.value.floor
    peak = measured(model, batch, extensions.BatchL2Grad(), memory=memory)
    assert peak == pytest.approx(plan.peak if given == "plan" else memory, rel=0.05)


@one_in(3)
@often(lambda row, memory: memory is None and row.attribute in FEW)
@pytest.mark.parametrize("memory", [None, "the plan"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_peak_holds_in_each_step_without_a_budget(row: Row, memory: str | None) -> None:
    """Results that the next step writes over are there from its first moment, when activations are, too."""
    torch.manual_seed(0)
    layers = nn.Embedding(300, 32), nn.Linear(32, 500), nn.ReLU(), nn.Linear(500, 64), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(64 * 10, 5))
    batch, asked = (torch.randint(300, (16, 10)), torch.randint(5, (16,))), row(torch.Generator())
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked])
    peak = measured(model, batch, asked, memory=None if memory is None else plan)
    assert peak <= 1.001 * plan.peak
    assert peak == pytest.approx(plan.peak, rel=0.05)


class Bidirectional(nn.Module):
    """An encoder of tokens, with positions that samples share and segments that each of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.segment = nn.Embedding(90, 32), nn.Embedding(9, 32), nn.Embedding(2, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 128, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = self.position(torch.arange(x.shape[1])) + self.segment(torch.zeros_like(x))
        return self.head(self.encoder(self.token(x) + places)[:, 0])  # type: ignore[no-any-return]  # a layer's


@thorough
@often(lambda make: make is extensions.KFAC)
@pytest.mark.parametrize("make", [extensions.BatchL2Grad, extensions.DiagGGNMC, extensions.KFAC])
def test_an_encoder(make: type[extensions.BatchL2Grad]) -> None:
    """What is looked up by the shape of the batch alone is the same use in the plan and in the pass."""
    torch.manual_seed(0)
    model, batch = Bidirectional(), (torch.randint(90, (8, 9)), torch.randint(3, (8,)))
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, make())
    assert {"embedding", "add"} <= {line.use for line in plan.lines}
    assert measured(model, batch, make(), memory=plan) == pytest.approx(plan.peak, rel=0.05)


@thorough
@pytest.mark.parametrize("bags", [False, True])
def test_gradients_that_are_sparse(bags: bool) -> None:
    """Indices and values are counted in place of a tensor that has no memory of its own."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(500, 32, sparse=True) if bags else nn.Embedding(500, 32, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Tanh(), nn.LazyLinear(5))
    batch = torch.randint(500, (64, 10)), torch.randint(5, (64,))
    model(batch[0])
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, extensions.BatchL2Grad())
    for memory in (plan, None):
        peak = measured(model, batch, extensions.BatchL2Grad(), memory=memory)
        assert peak == pytest.approx(plan.peak, rel=0.05)


class LastState(nn.Module):
    """An LSTM, and a layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x)[0][:, -1])
        return out


@thorough
def test_a_workspace_of_unknown_size_is_warned_of() -> None:
    """Without data oneDNN reports an empty workspace; without oneDNN there is none."""
    model, loss, asked = LastState(), nn.CrossEntropyLoss(), extensions.BatchGrad()
    batch = torch.randn(8, 10, 16), torch.randint(6, (8,))
    if torch.backends.mkldnn.is_available():
        with pytest.warns(PackpropWarning, match="keeps a workspace"):
            packprop.plan(model, loss, batch, [asked])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            plan = packprop.plan(model, loss, batch, [asked])
            assert 0.9 * plan.peak < measured(model, batch, asked, memory=plan) < 1.05 * plan.peak


# Where the plan of some kilobytes is known to be off, and by what part.
SHORT = {
    "nll-map": 0.25,  # torch takes another kernel for tensors without data
    "flattened-time-first": 0.2,  # samples are not where they usually are, and what is between is not known
    "gru-rows-folded": 0.08,  # rows of a sample are not side by side, and are taken together first
    "cosine-similarity": 0.06,  # planned are 323 bytes more than it takes
}


@one_in(6)
@often(lambda case: case in PLANNED[::24])
@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.name)
def test_the_peak_of_every_case(case: Case) -> None:
    """All extensions at once, on every case, except where the size of a null space depends on the data."""
    peak, plan = planned_and_measured(case, [row for row in rows_for(case) if "EKFAC" not in row.name])
    if case.name in SHORT:
        assert peak == pytest.approx(plan.peak, rel=SHORT[case.name])
    elif "between model and loss" in plan.parts:  # what is made there is not known, but how much it can be
        assert peak <= plan.peak + 256
    else:
        assert peak == pytest.approx(plan.peak, rel=0.05, abs=256)


@thorough
@pytest.mark.parametrize("case", PLANNED[::16], ids=lambda case: case.name)
def test_eigenvectors_take_no_more_than_planned(case: Case) -> None:
    """Without data a plan assumes the largest null space, which costs another decomposition."""
    peak, plan = planned_and_measured(case, [row for row in rows_for(case) if "EKFAC" in row.name])
    assert peak <= 1.05 * plan.peak + 256


def planned_and_measured(case: Case, rows: Sequence[Row]) -> tuple[int, packprop.Plan]:
    size, reduction = case.sizes[-1], case.reductions[0]
    asked = make_all(rows)
    problem = case.problem(size, reduction)
    backward(problem, *asked)
    for p in problem.model.parameters():
        p.grad = None
        for extension in asked:
            vars(p).pop(extension.savefield, None)
    loss = forward(problem)
    graph = walk([loss], [None], None)
    check_graph(graph)
    graph.kept = False  # backward() will free it
    try:
        plan = plan_again(graph, asked, None)
    except PackpropError as error:
        if not any(reason in str(error) for reason in ("make a plan", "without data")):
            raise
        pytest.skip(error.why)
    del loss, graph
    live = LiveBytes()
    live.own([*problem.model.parameters(), *problem.model.buffers()], "there before")
    live.own(tensors_in([*problem_tensors(problem)]), "there before")
    if HANDLES in vars(problem.model):  # later passes, which are direct, may take less than was planned
        vars(problem.model)[HANDLES].walks.clear()
    with live:
        for _ in range(4):
            problem.model.zero_grad()
            loss = forward(problem)
            with packprop.backpack(*asked, memory=plan):
                loss.backward()
    return live.peak, plan


def problem_tensors(problem: Problem) -> Iterator[Any]:
    yield from (value for value in vars(problem).values() if not isinstance(value, nn.Module))


def test_results_that_are_not_written_over_are_gone_before_their_like_are_made() -> None:
    """Several columns at once are a tensor of their own: the one of the step before is not held beside it."""
    torch.manual_seed(0)
    layers = nn.Linear(20, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 5)
    model, batch = nn.Sequential(*layers), (torch.randn(100, 20), torch.randint(5, (100,)))
    asked = extensions.SqrtGGNMC(mc_samples=3)
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked])
    assert measured(model, batch, asked) == pytest.approx(plan.peak, rel=0.05)


@pytest.mark.parametrize("make", [extensions.BatchL2Grad, extensions.DiagGGNMC])
def test_what_a_wide_head_takes_is_what_was_predicted(make: Any) -> None:
    """The logits are let go of where only gradients are asked for: plans know it."""
    torch.manual_seed(0)
    layers = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 2000, bias=False), nn.Flatten(0, 1)
    tokens = torch.randint(40, (4, 32))
    model, batch = nn.Sequential(*layers), (tokens, tokens.flatten())
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [make()])
    assert measured(model, batch, make()) == pytest.approx(plan.peak, rel=0.05)


@pytest.mark.parametrize("positions", ["as rows", "behind the classes"])
@pytest.mark.parametrize("row", [extensions.BatchL2Grad, extensions.Variance])
def test_the_first_pass_of_a_wide_head_takes_no_more_than_a_plain_one(row: Any, positions: str) -> None:
    """What finds the samples is as large as the logits, and takes the place of gradients in them."""
    torch.manual_seed(0)
    layers = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 2000, bias=False)
    model, loss = nn.Sequential(*layers), nn.CrossEntropyLoss()
    tokens = torch.randint(40, (4, 32))

    def peak(*asked: Any) -> int:
        model.zero_grad()
        with LiveBytes() as live:
            if positions == "as rows":
                value = loss(model(tokens).flatten(0, 1), tokens.flatten())
            else:
                value = loss(model(tokens).transpose(1, 2), tokens)
            with packprop.backpack(*asked):
                value.backward()
        return live.peak

    plain = peak()
    packprop.extend(model)
    packprop.extend(loss)
    assert peak(row()) < 1.05 * plain


def test_a_refused_pass_says_what_it_has_freed() -> None:
    """Only gradients were asked for: what the loss was given went before it was seen that samples are mixed."""
    model, loss = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.CrossEntropyLoss(label_smoothing=0.1))
    y = model(torch.randn(4, 3))
    value = loss(y - y.mean(0), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(PackpropError, match="mix"), packprop.backpack(extensions.BatchGrad()):
        value.backward()
    with pytest.raises(PackpropError, match="refused, freed"), packprop.backpack(extensions.DiagGGNMC()):
        value.backward()
    value.backward()
    assert model.weight.grad is not None


def test_what_the_step_before_has_left_counts() -> None:
    peak = Peak(10, {"gradients": 4, "results": 6}, [("weight", 6)]).beside("results", 5)
    assert peak == Peak(
        15, {"gradients": 4, "results": 11}, [("weight", 6), ("results: of the step before", 5)]
    )
