"""What a plan is good for, and what is refused."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.engine.memory.search import budget_of
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.column_sweeps import ColumnSweeps
from packprop.engine.recording.marks import EXTENDED
from packprop.errors import BadInput, PackpropError
from tests.memory.steps import data, network, step
from tests.references.running import assert_all_near
from tests.selection import one_in, thorough


def test_a_plan_for_a_device_that_is_not_there_takes_its_algorithms() -> None:
    """Grouped convolutions are oneDNN's advantage: on an accelerator inputs are unfolded."""
    model = nn.Sequential(nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 3))
    batch = torch.randn(4, 16, 32, 32), torch.randint(3, (4,))
    lines = {
        device: packprop.plan(
            model, nn.CrossEntropyLoss(), batch, [extensions.BatchGrad()], device=device
        ).lines
        for device in ("cpu", "cuda")
    }
    found = {
        device: next(line.algorithm for line in own if line.parameter == "0.weight")
        for device, own in lines.items()
    }
    assert found == {"cpu": "gradients by groups", "cuda": "gradients by products"}


def test_a_plan_counts_no_bytes_of_gradients_that_are_not_formed() -> None:
    model, batch = nn.Linear(4096, 512), (torch.randn(64, 4096), torch.randint(512, (64,)))
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [extensions.Variance()])
    found = {line.parameter: (line.algorithm, line.bytes) for line in plan.lines}
    assert found == {
        "weight": ("cotangents and inputs alone", 0),
        "bias": ("per-sample gradients", 64 * 512 * 4),
    }
    assert "1 x 64" in str(plan)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_on_a_gpu_the_allocator_stays_inside_the_budget(share: float) -> None:
    model, batch = network().cuda(), tuple(tensor.cuda() for tensor in data(512))
    asked = [extensions.BatchGrad(), extensions.DiagGGNExact()]
    most = packprop.plan(model, nn.CrossEntropyLoss(), batch, asked).peak
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, memory=1)
    least = caught.value.floor
    budget = int(least + share * (most - least))
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, memory=budget)
    there = sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *batch))
    for _ in range(2):  # the first finds the samples, and has libraries take their workspaces
        model.zero_grad()
        beside = torch.cuda.memory_allocated() - there
        torch.cuda.reset_peak_memory_stats()
        step(model, batch, *asked, memory=plan)
        for parameter, extension in itertools.product(model.parameters(), asked):
            delattr(parameter, extension.savefield)
    # convolutions take workspaces of their own: 1.00, 1.15 and 1.11 of the plan on an H200
    assert torch.cuda.max_memory_allocated() - beside == pytest.approx(plan.peak, rel=0.2)


@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_a_plan_asks_for_no_address_of_tensors_without_data() -> None:
    """PyTorch warns once of a process, and will raise an error: a penalty is recognised without addresses."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    class Penalised(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) + 0.1 * sum(p.square().sum() for p in model.parameters())

    batch = torch.randn(4, 3), torch.randn(4, 2)
    once, _ = torch.is_warn_always_enabled(), torch.set_warn_always(True)
    try:
        plan = packprop.plan(model, Penalised(), batch, [extensions.BatchGrad()])
    finally:
        torch.set_warn_always(once)
    assert {line.parameter for line in plan.lines} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_plan_leaves_no_copy_for_the_collector() -> None:
    """The next pass would look through the copies of extended modules, and ask for addresses."""
    gc.disable()
    try:
        before = len(EXTENDED)
        packprop.plan(network(), nn.CrossEntropyLoss(), data(4), extensions.BatchGrad())
        assert len(EXTENDED) == before
    finally:
        gc.enable()


def test_a_budget_alone_asks_for_an_extended_model() -> None:
    model, (x, y) = network(), data(4)
    loss, refused = F.cross_entropy(model(x), y), pytest.raises(BadInput, match="not extended")
    with refused as error, packprop.backpack(extensions.Variance(), memory="1GB"):
        loss.backward()
    assert "packprop.extend(model) before its forward pass" in error.value.instead
    plan = packprop.plan(model, nn.CrossEntropyLoss(), (x, y), extensions.Variance(), memory="1GB")
    for memory in (plan, "1GB"):
        with packprop.backpack(extensions.Variance(), memory=memory):
            F.cross_entropy(model(x), y).backward()
        packprop.extend(model).zero_grad()


class Weighing(nn.Module):
    """A learned weight of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.s = nn.CrossEntropyLoss(), nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets) * torch.exp(-self.s) + self.s


def test_a_plan_refuses_the_weights_of_an_extended_loss_as_the_pass_does() -> None:
    model, batch, loss = packprop.extend(network()), data(4), packprop.extend(Weighing())
    assert packprop.plan(model, Weighing(), batch, extensions.BatchGrad()).peak
    value = loss(model(batch[0]), batch[1])
    refused = pytest.raises(PackpropError, match="parameter 's'")
    with refused as of_pass, packprop.backpack(extensions.BatchGrad()):
        value.backward()
    with pytest.raises(PackpropError) as of_plan:
        packprop.plan(model, loss, batch, extensions.BatchGrad())
    assert str(of_plan.value) == str(of_pass.value)


@pytest.mark.parametrize("budget", [False, True], ids=["plan", "budget"])
def test_a_model_that_cannot_be_copied_is_refused_by_name(budget: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.lock = threading.Lock()
    x, y, loss = torch.ones(4, 3), torch.zeros(4, dtype=torch.long), nn.CrossEntropyLoss()
    with pytest.raises(PackpropError, match=r"Sequential, which packprop copies(.|\n)*lock"):
        if not budget:
            packprop.plan(model, loss, (x, y), extensions.BatchGrad())
        with packprop.backpack(extensions.BatchGrad(), memory="1MiB"):
            packprop.extend(loss)(packprop.extend(model)(x), y).backward()


def test_a_plan_changes_no_parameter_that_a_loss_reads() -> None:
    """A loss that is a function may take the model's own parameters, or others, which are no copies."""
    model, head = network(), nn.Parameter(torch.randn(6))
    head.grad, head.grad_batch = torch.ones(6), "mine"  # type: ignore[attr-defined]  # a name of packprop's
    before = head.grad

    def loss(f: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(f * head, y) + 0.1 * penalty

    packprop.plan(model, loss, data(4), extensions.BatchGrad())
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())
    assert head.grad is before
    assert head.grad_batch == "mine"  # type: ignore[attr-defined]  # see above


def test_a_plan_numbers_no_model() -> None:
    """Ranks name parameters by the number of the call of ``extend``: one of them alone may make plans."""
    before = EXTENDED.numbered
    packprop.plan(nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.ones(4, 3), torch.zeros(4).long()), [])
    assert EXTENDED.numbered == before


@pytest.mark.parametrize("memory", [1e6, np.float64(1e6), np.int64(10**6), 10**6, "1MB"], ids=repr)
def test_numbers_of_any_kind_are_budgets(memory: Any) -> None:
    assert budget_of(memory) == 10**6


def test_uses_of_tied_parameters_are_swept_together() -> None:
    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    model = nn.Sequential(tied, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), tied, nn.Tanh(), nn.Linear(6, 6))
    batch = torch.randn(5, 6), torch.randint(6, (5,))
    swept: list[list[str]] = []
    run = ColumnSweeps.run

    def watched(self: Any, groups: Any, tasks: Any, uses: Any, **options: Any) -> None:
        swept.append([self.request.graph.name(site.leaf) for use in uses for site in use.sites])
        run(self, groups, tasks, uses, **options)

    step(model, batch, extensions.DiagGGNExact())
    expected = {name: p.diag_ggn_exact.clone() for name, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ColumnSweeps, "run", watched)
        patch.setattr("packprop.engine.context.default_chunk_sizes", lambda device: ChunkSizes(0, 0, 0, 1))
        step(model, batch, extensions.DiagGGNExact())
    assert sorted(map(len, swept)) == [2, 2, 4]  # weight and bias of a layer; twice those of the tied one
    assert sorted({name for names in swept for name in names}) == sorted(expected)
    assert_all_near({n: p.diag_ggn_exact for n, p in model.named_parameters()}, expected, "in turn", 1e-5)


@thorough
def test_a_budget_that_nothing_fits_is_refused_before_any_work() -> None:
    model, batch = network(), data()
    state = torch.get_rng_state()
    with pytest.raises(BadInput) as caught:
        step(model, batch, extensions.BatchGrad(), memory="0.5 MiB")
    text = str(caught.value)
    for part in ("512 KiB", "still takes", "results", "activations", "a batch of", "BatchL2Grad", "hook"):
        assert part in text
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    smaller = int(text.split("a batch of ")[1].split()[0])
    packprop.plan(model, nn.CrossEntropyLoss(), data(smaller), [extensions.BatchGrad()], memory="0.5 MiB")


@pytest.mark.parametrize("memory", [0, -5, "lots", "0 MiB", "-3GiB", True, 1.5, [1]])
def test_budgets_that_are_none(memory: Any) -> None:
    with pytest.raises(BadInput, match="positive number of bytes"):
        packprop.backpack(extensions.BatchGrad(), memory=memory)
    with pytest.raises(BadInput, match="positive number of bytes"):
        packprop.plan(network(), nn.CrossEntropyLoss(), data(), [extensions.BatchGrad()], memory=memory)


def test_a_plan_is_good_for_what_it_was_made_for() -> None:
    asked = extensions.DiagGGNExact()
    plan = packprop.plan(network(), nn.CrossEntropyLoss(), data(), [asked], memory="8MiB")
    model = network()
    step(model, data(), asked, memory=plan)
    assert all(hasattr(p, "diag_ggn_exact") for p in model.parameters())
    others: list[tuple[nn.Module, tuple[Tensor, Tensor], Any, str]] = [
        (network(), data(32), asked, r"\[32, .*planned was .*\[64, "),
        (network(), data(), extensions.BatchGrad(), "extensions BatchGrad; planned was DiagGGNExact"),
        (nn.Sequential(nn.Flatten(), nn.Linear(128, 6)), data(), asked, "uses of parameters"),
        (network().double(), (data()[0].double(), data()[1]), asked, r"float64; planned was .*float32"),
    ]
    for model, batch, extension, difference in others:
        with pytest.raises(BadInput, match=difference):
            step(model, batch, extension, memory=plan)
        assert all(p.grad is None for p in model.parameters())
    elsewhere = packprop.plan(network(), nn.CrossEntropyLoss(), data(), [asked], device="cuda")
    assert elsewhere.device == "cuda"
    assert elsewhere.chunk_sizes.scratch > plan.chunk_sizes.scratch
    with pytest.raises(BadInput, match="on cpu; planned was cuda"):
        step(network(), data(), asked, memory=elsewhere)


def test_a_plan_is_not_good_for_other_options_or_another_fan_in() -> None:
    """The outputs of all uses have the shapes that were planned, but the memory that is taken differs."""
    loss, few = nn.CrossEntropyLoss(), extensions.KFAC(mc_samples=1)
    plan = packprop.plan(network(), loss, data(), [few], memory="8MiB")
    step(network(), data(), extensions.KFAC(mc_samples=1, generator=torch.Generator()), memory=plan)
    with pytest.raises(BadInput, match="KFAC with mc_samples 50; planned was 1"):
        step(network(), data(), extensions.KFAC(mc_samples=50), memory=plan)
    refused = pytest.raises(BadInput, match="with norms products; planned was None")
    with refused, packprop.algorithms(norms="products"):
        step(network(), data(), few, memory=plan)
    narrow, wide = nn.Linear(5, 6), nn.Linear(5000, 6)
    batch = torch.randn(4, 5), torch.randint(6, (4,))
    plan = packprop.plan(narrow, loss, batch, [extensions.BatchGrad()], memory="8MiB")
    with pytest.raises(BadInput, match=r"'weight' \[6, 5000\] torch.float32; planned was \[6, 5\]"):
        step(wide, (torch.randn(4, 5000), batch[1]), extensions.BatchGrad(), memory=plan)


def test_a_plan_is_not_good_for_more_parameters() -> None:
    """A bias that was frozen when the plan was made comes last: no other fact differs."""
    model, batch, asked = nn.Linear(1, 2000), (torch.randn(8, 1), torch.arange(8)), extensions.BatchGrad()
    model.bias.requires_grad_(False)
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, asked)
    model.bias.requires_grad_(True)
    with pytest.raises(BadInput, match="trainable parameters: 2; planned was 1"):
        step(model, batch, asked, memory=plan)


@one_in(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [extensions.SumGradSquared, extensions.KFLR], ids=lambda make: make.__name__)
def test_chunks_in_low_precision_hold_no_more_bytes(make: Any, dtype: torch.dtype) -> None:
    """What is formed for a chunk of samples is formed in float32 there, too: as many samples fit."""
    found = []
    for each in (torch.float32, dtype):
        layers = nn.Linear(512, 512), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 512, 4)
        model, x = nn.Sequential(*layers).to(each), torch.randn(64, 3, 512, dtype=each)
        plan = packprop.plan(model, nn.CrossEntropyLoss(), (x, torch.randint(4, (64,))), [make()])
        found.append([(line.parameter, line.samples, line.bytes) for line in plan.lines])
    assert found[0] == found[1]
    assert any(samples < 64 for _, samples, _ in found[0])
