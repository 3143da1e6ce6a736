"""A budget is kept, changes no number, and decides what is tried."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.algebra import kernels
from packprop.engine.memory.bytes import byte_text
from packprop.engine.memory.live import LiveBytes
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.engine.memory.search import HELD, choices, looser
from packprop.engine.passes import chunks
from packprop.engine.passes.chunks import ChunkSizes, default_chunk_sizes
from packprop.errors import BadInput
from tests.memory.steps import data, measured, network, step
from tests.references.running import BY_ATTRIBUTE, ROWS, Row, as_tensors, assert_all_near
from tests.selection import often, thorough


@thorough
@often(lambda row: row.attribute == "variance")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_budget_is_kept_and_changes_no_number(row: Row) -> None:
    """Budgets from ample down to the smallest that is possible, in steps."""
    loss = nn.CrossEntropyLoss()
    free = packprop.plan(network(), loss, data(), [row(torch.Generator())])
    with pytest.raises(BadInput) as caught:
        packprop.plan(network(), loss, data(), [row(torch.Generator())], memory=1)
    assert isinstance(caught.value, BudgetTooSmall)
    floor = caught.value.floor
    expected = asked_with(row, None)
    for budget in {floor, (floor + free.peak) // 2, free.peak + 1}:
        model, batch = network(), data()
        extension = row(torch.Generator().manual_seed(3))
        plan = packprop.plan(model, loss, batch, [extension], memory=budget)
        peak = measured(model, batch, extension, memory=plan)
        assert peak <= budget * 1.01
        found = asked_with(row, plan)
        assert_all_near(found, expected, row.attribute, 1e-4)


@thorough
@often(lambda name: name == "grad_batch")
@pytest.mark.parametrize("name", ["grad_batch", "diag_ggn_exact_batch", "kflr"])
def test_the_smallest_budget_is_kept_in_low_precision(name: str) -> None:
    """There results, and what is formed for a chunk, are larger than the parameters by a factor."""
    (x, y), loss, row = data(), nn.CrossEntropyLoss(), BY_ATTRIBUTE[name]
    batch, model = (x.bfloat16(), y), network().bfloat16()
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, loss, batch, [row(torch.Generator())], memory=1)
    plan = packprop.plan(model, loss, batch, [row(torch.Generator())], memory=caught.value.floor)
    assert measured(model, batch, row(torch.Generator()), memory=plan) <= caught.value.floor * 1.01


def asked_with(row: Row, memory: packprop.Plan | None) -> dict[str, Any]:
    model = network()
    step(model, data(), row(torch.Generator().manual_seed(3)), memory=memory)
    values = {name: getattr(p, row.attribute) for name, p in model.named_parameters()}
    return {f"{name}[{i}]": t for name, value in values.items() for i, t in enumerate(as_tensors(value))}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_choices_take_less_one_after_the_other(device: str) -> None:
    tried = choices(torch.device(device), freed=True)
    assert len(set(tried)) == len(tried)
    for before, after in itertools.pairwise(tried):
        assert after.scratch <= before.scratch
        assert after.cotangents <= before.cotangents
        assert (before.held, after.held) in {(None, None), (None, 0), (0, 0)}
        assert (after.parameters or 10**9) <= (before.parameters or 10**9)


def convolutions() -> nn.Module:
    """Unfolded, the inputs of the second are 16 times those of the first; one sample's are 576 KiB."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16, 5))


def shared_weights() -> nn.Module:
    """Gradients of the first are 288 KiB for each sample, products of its 100 positions 156 KiB.

    Its outputs are half its inputs, so three gradients take more than autograd does at the nonlinearity.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(384, 192), nn.Tanh(), nn.Linear(192, 16), nn.Flatten(), nn.Linear(1600, 5))


def labels() -> Tensor:
    return torch.arange(4) % 5


MIXED = [
    (convolutions, (4, 2, 16, 16), torch.float64, extensions.BatchGrad, "2.weight", "gradients by groups"),
    (convolutions, (4, 2, 16, 16), torch.float64, extensions.Variance, "2.weight", "gradients by groups"),
    (shared_weights, (4, 100, 384), torch.float32, extensions.BatchL2Grad, "0.weight", "cotangents and inputs"),
]
"""Where one of two uses holds most: model, inputs, what is asked, that use, the algorithm that holds less."""


@thorough
@often(lambda mixed: mixed is MIXED[0])
@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: f"{mixed[0].__name__}-{mixed[3].__name__}")
def test_only_the_use_that_holds_most_changes_its_algorithm(
    mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WORTH_A_CALL", 2**20 // torch.get_num_threads())
    build, shape, dtype, make, large, algorithm = mixed
    small = {"0.weight": "2.weight", "2.weight": "0.weight"}[large]
    loss = nn.CrossEntropyLoss()
    model, batch = build().to(dtype), (torch.randn(shape, dtype=dtype), labels())
    free = packprop.plan(model, loss, batch, [make()])
    before = {line.parameter: line.algorithm for line in free.lines}
    in_turn = "gradients in turn" if dtype == torch.float32 else "gradients by products"
    assert (before[large], before[small]) == (in_turn, "gradients by products")
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, loss, batch, [make()], memory=1)
    budget = caught.value.floor
    plan = packprop.plan(model, loss, batch, [make()], memory=budget)
    assert plan.chunk_sizes.held not in (None, 0)
    after = {line.parameter: line.algorithm for line in plan.lines}
    assert after.pop(large).startswith(algorithm)
    assert after == {name: before[name] for name in after}
    assert algorithm in str(plan)
    assert "gradients by products" in str(plan)
    expected = build().to(dtype)
    step(expected, batch, make())
    peak = measured(model, batch, make(), memory=plan)
    assert peak <= budget * 1.001
    assert peak == pytest.approx(plan.peak, rel=0.01)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
        torch.testing.assert_close(getattr(mine, make.savefield), getattr(other, make.savefield))


@thorough
def test_an_algorithm_by_name_wins_over_a_budget() -> None:
    model, batch = convolutions().double(), (torch.randn(4, 2, 16, 16).double(), labels())
    asked = [extensions.Variance()]
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, memory=1)
    with packprop.algorithms(convolutions="patches"), pytest.raises(BudgetTooSmall) as forced:
        packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, memory=1)
    assert forced.value.floor > caught.value.floor
    with packprop.algorithms(convolutions="patches"):
        plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, memory=forced.value.floor)
    algorithms = {line.parameter: line.algorithm for line in plan.lines}
    assert algorithms["0.weight"] == algorithms["2.weight"] == "gradients by products"


@thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: f"{mixed[0].__name__}-{mixed[3].__name__}")
def test_peaks_fall_along_what_is_tried(mixed: Any, device: str, monkeypatch: Any) -> None:
    build, shape, dtype, make, *_ = mixed
    model, batch = build().to(dtype), (torch.randn(shape, dtype=dtype), labels())

    def peak(chunk_sizes: ChunkSizes, *asked: Any) -> int:
        monkeypatch.setattr(sys.modules["packprop.engine.memory.search"], "choices", lambda *_: [chunk_sizes])
        return packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, device=device).peak

    tried = choices(torch.device(device))
    held = [tried[0]._replace(held=size) for size in (None, 2**20, 2**18, 2**16, 2**14, 0)]
    for row, asked in ((tried, [make(), extensions.DiagGGNExact()]), (held, [make()])):
        peaks = [peak(chunk_sizes, *asked) for chunk_sizes in row]
        assert all(after <= 1.001 * before for before, after in itertools.pairwise(peaks))
        assert peaks[-1] < peaks[0]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 5))


@thorough
@pytest.mark.parametrize(
    ("build", "shape", "make"),
    [
        (layers, (24, 60), extensions.SumGradSquared),
        (layers, (24, 60), extensions.DiagGGNExact),
        (layers, (24, 60), extensions.BatchJacobian),
        (layers, (24, 60), extensions.KFAC),
        (shared_weights, (4, 100, 384), extensions.Variance),
    ],
)
def test_the_least_is_the_least_of_all_choices(
    build: Any, shape: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks add up beside a sum, and an algorithm that holds less may not: brute force knows."""
    loss, model, batch = nn.CrossEntropyLoss(), build(), (torch.randn(shape), torch.arange(shape[0]) % 5)
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, loss, batch, [make()], memory=1)
    floor = caught.value.floor
    plan = packprop.plan(model, loss, batch, [make()], memory=floor)
    assert plan.peak <= floor
    assert measured(model, batch, make(), memory=plan) <= 1.001 * floor
    all_of_them = itertools.product((2**23, 2**16, 2**14, 0), (2**25, 2**16, 0), (None, 2**16, 0))
    for chunk_sizes in itertools.starmap(ChunkSizes, all_of_them):
        monkeypatch.setattr(
            sys.modules["packprop.engine.memory.search"], "choices", lambda *_, one=chunk_sizes: [one]
        )
        assert packprop.plan(model, loss, batch, [make()], memory=2**40).peak >= floor, chunk_sizes


class SmallBert(nn.Module):
    """Tokens and places, embedded; blocks of attention; what comes out at the first place is classified."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(200, 16), nn.Embedding(32, 16)
        block = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(block, 1, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        output: Tensor = self.head(self.blocks(embedded)[:, 0])
        return output


SWEPT: list[tuple[Any, Any]] = [
    (SmallBert, lambda: (torch.randint(200, (6, 24)), torch.arange(6) % 3)),
    (layers, lambda: (torch.randn(24, 60), torch.arange(24) % 5)),
    (convolutions, lambda: (torch.randn(4, 2, 16, 16), labels())),
]
ASKED = {
    SmallBert: ("variance", "grad_batch", "batch_l2"),
    layers: ("diag_ggn_exact", "kfac"),
    convolutions: ("diag_ggn_mc", "variance"),
}
KEPT_OR_REFUSED = [(*swept, attribute) for swept in SWEPT for attribute in ASKED[swept[0]]]


@thorough
@pytest.mark.parametrize(("build", "data", "attribute"), KEPT_OR_REFUSED)
def test_budgets_are_kept_or_refused_with_one_that_is_accepted(build: Any, data: Any, attribute: str) -> None:
    """No budget below the least that was named is accepted, and what is planned without one is not below it."""
    extension, model, batch = BY_ATTRIBUTE[attribute], build(), data()

    def planned(memory: int | None) -> int:
        asked = [extension(torch.Generator())]
        return packprop.plan(model, nn.CrossEntropyLoss(), batch, asked, memory=memory).peak

    free, draws = planned(None), random.Random(attribute)
    kept, refused, named = [], [], set()
    for budget in (int(draws.uniform(0.3, 1.5) * free) for _ in range(3)):
        try:
            assert planned(budget) <= budget
            kept.append(budget)
        except BudgetTooSmall as error:
            refused.append(budget)
            named.add(error.floor)
    with pytest.raises(BudgetTooSmall) as caught:
        planned(1)
    least = caught.value.floor
    assert named <= {least}
    assert planned(least) <= least <= free
    assert all(budget < least for budget in refused)
    assert all(budget >= least for budget in kept)


@thorough
@often(lambda swept: swept[0] is layers)
@pytest.mark.parametrize("swept", SWEPT, ids=lambda swept: swept[0].__name__)
def test_rows_of_the_jacobian_take_no_less_without_a_budget_than_is_named(swept: Any) -> None:
    model, batch, asked = swept[0](), swept[1](), extensions.BatchJacobian()
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked], memory=1)
    assert caught.value.floor <= measured(model, batch, asked)
    assert measured(model, batch, asked, memory=caught.value.floor) <= 1.001 * caught.value.floor


@thorough
def test_the_least_of_a_pass_counts_what_is_between_model_and_loss() -> None:
    model, (x, y) = packprop.extend(layers()), (torch.randn(24, 60), torch.arange(24) % 5)

    def run(memory: int) -> None:
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x).sigmoid().mul(3).tanh(), y)
        with packprop.backpack(extensions.Variance(), memory=memory):
            loss.backward()

    for memory in (1, 30_000):
        with pytest.raises(BudgetTooSmall, match=f"memory={byte_text(memory)} on") as caught:
            run(memory)
        run(caught.value.floor)
        with pytest.raises(BudgetTooSmall):
            run(caught.value.floor - 1)


@thorough
def test_the_least_of_a_data_set_counts_the_results_of_the_batches_before() -> None:
    data = torch.randn(24, 60), torch.arange(24) % 5

    def run(memory: int) -> None:
        asked, loss = [extensions.Variance()], nn.CrossEntropyLoss()
        packprop.compute(layers(), loss, data, asked, batch_size=12, progress=False, memory=memory)

    for memory in (1, 100_000):
        with pytest.raises(BudgetTooSmall, match=f"memory={byte_text(memory)} on") as caught:
            run(memory)
        run(caught.value.floor)
        with pytest.raises(BudgetTooSmall):
            run(caught.value.floor - 1)


@thorough
def test_a_budget_counts_a_retained_graph() -> None:
    """The graph that backward() would free along the way is still there when the last results are made."""
    model = packprop.extend(nn.Sequential(*[each for _ in range(5) for each in (nn.Linear(64, 64), nn.Tanh())]))
    (x, y), asked = (torch.randn(64, 64), torch.arange(64)), extensions.BatchL2Grad()
    freed = packprop.plan(model, nn.CrossEntropyLoss(), (x, y), asked)

    def run(memory: Any, **options: Any) -> int:
        model.zero_grad()
        live = LiveBytes()
        results = [p.batch_l2 for p in model.parameters() if hasattr(p, "batch_l2")]
        live.own([*model.parameters(), x, y, *results], "there before")
        with live:
            loss = nn.functional.cross_entropy(model(x), y)
            with packprop.backpack(asked, memory=memory):
                loss.backward(**options)
        return live.peak

    assert run(freed.peak) <= 1.02 * freed.peak
    with pytest.raises(BudgetTooSmall) as caught:
        run(freed.peak, retain_graph=True)
    assert caught.value.floor > 1.2 * freed.peak
    assert run(caught.value.floor, retain_graph=True) <= 1.01 * caught.value.floor
    with pytest.raises(BadInput, match="retains; planned was frees"):
        run(freed, retain_graph=True)
    for memory in (freed, "1GiB"):
        with pytest.raises(BadInput, match="create_graph=True"):
            run(memory, create_graph=True)


@thorough
def test_a_budget_counts_results_of_other_extensions() -> None:
    """An earlier pass left them on the parameters, where they stay throughout."""
    model, (x, y) = packprop.extend(nn.Linear(20, 10)), (torch.randn(64, 20), torch.arange(64) % 10)
    budget = 2 * packprop.plan(model, nn.CrossEntropyLoss(), (x, y), extensions.BatchL2Grad()).peak
    step(model, (x, y), extensions.BatchL2Grad(), memory=budget)
    model.zero_grad()
    step(model, (x, y), extensions.BatchGrad())
    model.zero_grad()
    with pytest.raises(BudgetTooSmall, match=r"results of other passes 52\.5 KiB"):
        step(model, (x, y), extensions.BatchL2Grad(), memory=budget)
    step(model, (x, y), extensions.BatchL2Grad(), memory=budget + 64 * 210 * 4)


def test_more_is_given_back_from_the_most_to_what_there_is() -> None:
    whole, least = ChunkSizes(2**23, 2**26), ChunkSizes(0, 2**20, 0)
    scratch = [chunk_sizes.scratch for chunk_sizes in looser(least, whole, "scratch")]
    assert scratch == sorted(set(scratch), reverse=True)
    assert (scratch[0], scratch[-1]) == (2**23, 0)
    assert [chunk_sizes.held for chunk_sizes in looser(least, whole, "held")] == [None, *HELD, 0]
    cotangents = [chunk_sizes.cotangents for chunk_sizes in looser(least, whole, "cotangents")]
    assert cotangents == [2**power for power in range(26, 19, -1)]
    assert looser(whole, whole, "scratch") == [whole]


def test_an_accelerator_takes_larger_chunks_but_a_share_of_what_is_free(monkeypatch: Any) -> None:
    cuda, free = torch.device("cuda"), [2**40]
    monkeypatch.setattr(chunks, "free_bytes", lambda device: free[0])
    roomy, host = default_chunk_sizes(cuda), default_chunk_sizes(torch.device("cpu"))
    assert roomy.scratch > host.scratch
    assert roomy.cotangents > host.cotangents
    free[0] = 2**28
    tight = default_chunk_sizes(cuda)
    assert sum(tight[:2]) < 2**28 / 4
    assert default_chunk_sizes() == default_chunk_sizes(torch.device("cpu")) == host


def test_what_is_free_is_what_the_device_says(monkeypatch: Any) -> None:
    from packprop.engine.tensors.device import free_bytes

    class Module:
        is_available = staticmethod(lambda: True)
        mem_get_info = staticmethod(lambda device: (1000, 5000))
        memory_reserved = staticmethod(lambda device: 300)
        memory_allocated = staticmethod(lambda device: 100)

    assert free_bytes(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert free_bytes(torch.device("cuda")) == 1200
