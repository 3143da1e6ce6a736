"""When plans are made anew, and that making one changes nothing of the user's."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.engine.memory.bytes import byte_count, byte_text
from packprop.engine.memory.live import LiveBytes
from packprop.engine.memory.peaks import PeakRecorder
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.engine.memory.planning import plan_again
from packprop.engine.tensors.dry import storage_key
from packprop.errors import BadInput, PackpropError, PackpropWarning
from tests.memory.steps import MIB, PLANNED, data, network, step
from tests.references.running import assert_all_near, backward, forward, results
from tests.selection import one_in, thorough


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[packprop.Plan]:
    """Plans that are made for budgets given as numbers."""
    plans: list[packprop.Plan] = []

    def counted(*arguments: Any) -> packprop.Plan:
        plans.append(plan_again(*arguments))
        return plans[-1]

    monkeypatch.setattr(sys.modules["packprop.engine.memory.planning"], "plan_again", counted)
    return plans


def test_a_budget_is_planned_anew_for_what_changes_it_and_not_for_other_samples(
    made: list[packprop.Plan],
) -> None:
    model, (inputs, targets) = network(), data()
    for chosen in ([0, 3], [5, 1], [7, 2]):  # another choice in each step, as in stochastic estimates
        model.zero_grad()
        step(model, (inputs, targets), extensions.BatchGrad(subsampling=chosen), memory="64MiB")
    assert len(made) == 1
    model.zero_grad()
    step(model.double(), (inputs.double(), targets), extensions.BatchGrad(subsampling=[0, 3]), memory="64MiB")
    assert len(made) == 2
    model.zero_grad()
    with packprop.algorithms(products="batched"):
        step(model, (inputs.double(), targets), extensions.BatchGrad(subsampling=[0, 3]), memory="64MiB")
    assert len(made) == 3


class Watched(nn.Module):
    """Draws numbers from Python and NumPy, as a model does that skips layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        random.random(), np.random.rand()  # noqa: NPY002  # the state that all share
        return output


def test_plans_run_no_backward_hooks() -> None:
    """A hook that stores gradients would keep tensors without data."""
    seen: list[Tensor] = []
    model, batch = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), (torch.randn(4, 3), torch.randn(4, 2))
    model[1].register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    model[0].register_full_backward_pre_hook(lambda module, out: seen.append(out[0]))
    packprop.plan(model, nn.MSELoss(), batch, extensions.BatchGrad())
    assert not seen
    loss = packprop.extend(nn.MSELoss())(packprop.extend(model)(batch[0]), batch[1])
    with packprop.backpack(extensions.BatchGrad(), memory="1GiB"):
        loss.backward()
    assert [type(gradient) for gradient in seen] == [Tensor, Tensor]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_plans_refuse_compressed_sparse_tensors_by_name(layout: torch.layout, is_buffer: bool) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("matrix", torch.eye(3).to_sparse(layout=layout))

        def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
            output: Tensor = self.layer((matrix if matrix is not None else self.matrix).matmul(x.T).T)
            return output

    model = Mixing()
    given = (torch.randn(4, 3),) if is_buffer else (torch.randn(4, 3), model.matrix)
    if not is_buffer:
        del model.matrix
    is_compressed = layout != torch.sparse_coo
    refused = (
        pytest.raises(PackpropError, match=f"layout {layout}") if is_compressed else contextlib.nullcontext()
    )
    with refused:
        packprop.plan(model, nn.MSELoss(), (given, torch.randn(4, 2)), extensions.BatchGrad())
    packprop.extend(model)
    loss = nn.functional.mse_loss(model(*given), torch.randn(4, 2))
    refused = pytest.raises(PackpropError) if is_compressed else contextlib.nullcontext()
    with refused, packprop.backpack(extensions.BatchGrad(), memory="1GiB"):
        loss.backward()


def test_plans_and_coverage_leave_all_random_states() -> None:
    model, batch = Watched(), (torch.randn(4, 3), torch.arange(4) % 2)
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(batch[0]), batch[1])
    before = random.getstate(), np.random.get_state()[2]  # noqa: NPY002  # the state that all share
    packprop.plan(model, nn.CrossEntropyLoss(), batch, extensions.BatchGrad())
    packprop.coverage(model, batch[0])
    with packprop.backpack(extensions.BatchGrad(), memory="1GiB"):
        loss.backward()
    assert (random.getstate(), np.random.get_state()[2]) == before  # noqa: NPY002  # the state that all share


def test_a_budget_and_a_plan_know_autocast_of_the_forward_pass(made: list[packprop.Plan]) -> None:
    """PyTorch advises to call backward() outside of it. Copies of frozen weights in low precision are large."""
    model, loss, asked = (
        nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 9)),
        nn.CrossEntropyLoss(),
        extensions.BatchL2Grad(),
    )
    model[0].weight.requires_grad_(False)
    packprop.extend(model)
    x, y = torch.randn(8, 300), torch.arange(8)

    def run(memory: Any, forward: bool, backward: bool) -> int:
        model.zero_grad()
        live = LiveBytes()
        live.own([*model.parameters(), x, y], "there before")
        with live:
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                value = loss(model(x), y)
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=backward),
                packprop.backpack(asked, memory=memory),
            ):
                value.backward()
        return live.peak

    plain = packprop.plan(model, loss, (x, y), asked)
    with torch.autocast("cpu", torch.bfloat16):
        cast = packprop.plan(model, loss, (x, y), asked)
    assert cast.peak > 1.2 * plain.peak
    assert run(cast, forward=True, backward=False) <= 1.01 * cast.peak
    with pytest.raises(BadInput, match=r"autocast to torch\.bfloat16; planned was"):
        run(plain, forward=True, backward=False)
    budget = int(1.1 * plain.peak)
    assert run(budget, forward=False, backward=False) <= budget
    with pytest.raises(BudgetTooSmall):
        run(budget, forward=True, backward=False)
    assert run(budget, forward=False, backward=True) <= budget
    assert len(made) == 1


class Pooled(nn.Module):
    """Pools its inputs before the first parameter, and recomputes its layer on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.recomputes = nn.Sequential(nn.Linear(20, 10), nn.Tanh()), False

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool1d(x * 2, 20)
        output: Tensor = (
            checkpoint(self.layer, pooled, use_reentrant=False) if self.recomputes else self.layer(pooled)
        )
        return output


def test_a_budget_is_planned_anew_for_other_inputs_and_without_checkpoints(made: list[packprop.Plan]) -> None:
    """Nothing at the uses tells them apart; a plan is refused for them."""
    model, y, asked = Pooled(), torch.arange(8), extensions.BatchL2Grad()
    model.recomputes = True
    plan = packprop.plan(model, nn.CrossEntropyLoss(), (torch.randn(8, 100), y), asked)
    for count in (1, 1, 2):
        model.zero_grad()
        step(model, (torch.randn(8, 100 * count), y), asked, memory=2**20)
        assert len(made) == count
    with pytest.raises(BadInput, match=r"inputs of Pooled: \[8, 200\] torch.float32; planned was \[8, 100\]"):
        step(model, (torch.randn(8, 200), y), asked, memory=plan)
    step(model, (torch.randn(8, 100), y), asked, memory=plan)
    with pytest.raises(BudgetTooSmall):
        step(model, (torch.randn(8, 10**5), y), asked, memory=2**20)
    model.recomputes = False
    with pytest.raises(BadInput, match=r"planned was linear .* in a checkpoint"):
        step(model, (torch.randn(8, 100), y), asked, memory=plan)
    model.zero_grad()
    step(model, (torch.randn(8, 100), y), asked, memory=2**20)
    assert len(made) == 3


@thorough
@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_that_are_there_when_a_step_begins(accumulated: bool) -> None:
    """Gradients of earlier passes: a budget counts them; a plan counts them if it is told to, or warns."""
    asked, loss = extensions.BatchL2Grad(), packprop.extend(nn.CrossEntropyLoss())
    model = packprop.extend(
        nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 6))
    )
    batch = torch.randn(8, 64), torch.randint(6, (8,))
    plan = packprop.plan(model, loss, batch, [asked], accumulated=accumulated)

    def peak(memory: Any) -> int:
        live = LiveBytes()
        live.own([*model.parameters(), *batch, *(p.grad for p in model.parameters() if p.grad is not None)], "")
        with live:
            value = loss(model(batch[0]), batch[1])
            with packprop.backpack(asked, memory=memory):
                value.backward()
        return live.peak

    if not accumulated:
        assert peak(plan) == pytest.approx(plan.peak, rel=0.05)
        with pytest.warns(PackpropWarning, match="accumulated=True"):
            assert peak(plan) > 1.2 * plan.peak
        with pytest.raises(BudgetTooSmall):
            peak(plan.peak)
    else:
        peak("1GiB")
        assert peak(plan) == pytest.approx(plan.peak, rel=0.05)
        assert peak(plan.peak) <= 1.01 * plan.peak


def test_a_model_without_data() -> None:
    """A large transformer is planned on the meta device, without memory for its tensors."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(4096, 32, 11008, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.Sequential(nn.Embedding(32000, 4096), layer, layer, nn.Linear(4096, 32000))
        batch = torch.zeros(2, 64, dtype=torch.long), torch.zeros(2, 32000, 64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs.mT, targets)

    plan = packprop.plan(model, loss, batch, [extensions.BatchL2Grad()], device="cpu")
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert plan.parts["parameters"] == weights
    assert plan.peak > 2 * weights
    text = str(plan)
    assert "1.linear1.weight" in text
    assert "parameters" in text
    assert "GiB" in text


def test_a_forward_pass_that_decides_on_data() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > 0 else self.inner(-x)

    with pytest.raises(PackpropError, match="without data"):
        packprop.plan(Decides(), nn.MSELoss(), (torch.randn(4, 3), torch.randn(4, 2)), [extensions.BatchGrad()])


def test_planning_changes_nothing() -> None:
    model = packprop.extend(network())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    live = LiveBytes()
    with live:
        packprop.plan(model, nn.CrossEntropyLoss(), data(), [extensions.KFAC()], memory="8MiB")
    assert live.peak == 0 or live.peak < 100_000  # the batch of this very line
    assert all(p.grad is None and not hasattr(p, "kfac") for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.device.type == "cpu" and type(p) is nn.Parameter for p in model.parameters())


def test_a_plan_prints() -> None:
    text = str(packprop.plan(network(), nn.CrossEntropyLoss(), data(), [extensions.KFAC()], memory="20MiB"))
    for part in ("2.weight", "conv2d", "Outer", "budget 20", "peak", "activations", "parameters"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 112


@pytest.mark.parametrize(
    ("text", "count"), [("600MiB", 600 * MIB), ("1.5 GB", 1_500_000_000), (7, 7), ("x", None), (True, None)]
)
def test_numbers_of_bytes(text: Any, count: int | None) -> None:
    assert byte_count(text) == count


def test_results_are_named_by_parameter() -> None:
    """A case of the list with a budget gives what it gives without."""
    case = next(case for case in PLANNED if "smoke" in case.tags)
    free, tight = case.problem(3), case.problem(3)
    backward(free, extensions.SumGradSquared())
    loss = forward(tight)
    with packprop.backpack(extensions.SumGradSquared(), memory="1GiB"):
        loss.backward()
    assert_all_near(results(tight, "sum_grad_squared"), results(free, "sum_grad_squared"), "budget", 1e-12)


def test_bytes_are_written_to_three_digits() -> None:
    assert [byte_text(n) for n in (5, 2048, 3 * MIB // 2)] == ["5 B", "2 KiB", "1.5 MiB"]


def test_options_of_an_extension_have_plans_of_their_own(made: list[packprop.Plan]) -> None:
    """Other options get another plan, and the same options share one."""
    model, batch = network(), data(8)
    for approximation in ("mixed", "expand", "mixed", "expand"):
        model.zero_grad()
        step(model, batch, extensions.KFAC(approximation=approximation), memory="1GiB")
    assert len(made) == 2


@one_in(3)
@pytest.mark.parametrize("samples", [1, 3, 6])
def test_a_plan_finds_the_uses_of_a_parametrised_weight(samples: int) -> None:
    """Earlier passes, a batch of one, and as many samples as the weight has rows change nothing."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    model, loss = packprop.extend(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3))), nn.CrossEntropyLoss()
    x, y = torch.randn(samples, 6), torch.arange(samples) % 3
    for _ in range(2):
        plan = packprop.plan(model, loss, (x, y), [extensions.BatchL2Grad()])
        with packprop.backpack(extensions.BatchL2Grad(), memory=plan):
            loss(model(x), y).backward()
        model.zero_grad()


class Positions(nn.Module):
    """Embeddings of words and of their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.words((x.abs() * 9).long() % 9) + self.places(torch.arange(x.shape[1]))
        return self.head(h.mean(1))  # type: ignore[no-any-return]  # of torch


class Repeated(nn.Module):
    """A layer whose outputs all have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.Parameter(torch.ones(1, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.row.expand(6, 6)).tanh())  # type: ignore[no-any-return]  # of torch


@pytest.mark.parametrize("samples", [1, 4, 6])
@pytest.mark.parametrize("make", [Positions, Repeated])
def test_a_plan_finds_the_uses_of_the_pass(make: type[nn.Module], samples: int) -> None:
    """For one sample, and for as many samples as positions or outputs."""
    model, loss = packprop.extend(make()), nn.CrossEntropyLoss()
    x, y = torch.rand(samples, 6), torch.arange(samples) % 3
    plan = packprop.plan(model, loss, (x, y), [extensions.BatchGrad()])
    with packprop.backpack(extensions.BatchGrad(), memory=plan):
        loss(model(x), y).backward()


def test_memory_of_a_result_that_was_dropped_is_no_result() -> None:
    """The next tensor may lie where it lay."""
    recorder = PeakRecorder(torch.device("cpu"))
    with recorder.live:
        value = torch.ones(1000)
        recorder.own_result(value)
        place = storage_key(value)
        assert recorder.saved_alive() == 4000
        del value
        recorder.live.sizes[place] = 4000  # as if another tensor had come to lie there
        assert recorder.saved_alive() == 0


LINKED: dict[str, Any] = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y),
    "nll_loss": lambda out, y: F.nll_loss(out.log_softmax(1), y),
    "logarithms": lambda out, y: F.nll_loss(out.softmax(1).log(), y),
    "binary_cross_entropy": lambda out, y: F.binary_cross_entropy(out.sigmoid(), y),
    "poisson_nll_loss": lambda out, y: F.poisson_nll_loss(out.exp(), y, log_input=False, eps=0.0),
}
"""Losses that take a function of the model's output."""


@one_in(3)
@pytest.mark.parametrize(
    ("name", "recording"),
    [
        (name, recording)
        for name in LINKED
        for recording in (packprop.record, contextlib.nullcontext)
        # no node of PyTorch's tells that this one was called
        if name != "poisson_nll_loss" or recording is packprop.record
    ],
)
@pytest.mark.parametrize("asked", [extensions.DiagGGNExact(), extensions.KFAC()], ids=lambda each: each.name)
def test_a_budget_for_a_loss_that_takes_a_function_of_the_output(
    name: str, asked: Any, recording: Any, made: list[packprop.Plan]
) -> None:
    """Such losses need not be extended."""
    model, (x, y) = packprop.extend(network()), data(16)
    if name in ("binary_cross_entropy", "poisson_nll_loss"):
        y = F.one_hot(y, 6).float()
    live = LiveBytes()
    live.own([*model.parameters(), x, y], "there before")
    for _ in range(2):
        model.zero_grad()
        with live:
            with recording():
                loss = LINKED[name](model(x), y)
            with packprop.backpack(asked, memory="100MiB"):
                loss.backward()
    assert len(made) == 1
    # on a CPU, PyTorch keeps all terms of some losses behind their value
    room = loss.untyped_storage().nbytes()
    assert live.peak <= made[0].peak + room
    assert all(hasattr(leaf, asked.savefield) for leaf in model.parameters())


def test_a_plan_for_what_is_made_of_the_loss() -> None:
    """Without data, nothing tells whether it couples samples: the plan is that of a loss that does not."""
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))

    def distance(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum().sqrt()

    batch = torch.randn(5, 3), torch.randn(5, 2)
    plan = packprop.plan(model, distance, batch, extensions.DiagHessian())
    assert plan.peak > 0
