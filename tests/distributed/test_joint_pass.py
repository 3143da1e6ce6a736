"""Values of the samples of all ranks: what they are, on which ranks, and what is refused on all of them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import packprop
from packprop import extensions
from packprop.engine.distributed import AllRanks, joint
from packprop.engine.distributed.statement import described, shares
from packprop.errors import BadInput, PackpropError
from tests.distributed.processes import in_processes, needs_groups, outcomes_of, run_each
from tests.selection import thorough

pytestmark = needs_groups

SIZES = (5, 2, 3)
"""Samples of each rank."""

ASKED = [
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.KFLR,
    extensions.DiagHessian,
]


class Branching(nn.Module):
    """A model whose second layer serves some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, detour: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(torch.sigmoid(self.second(x)) if detour else x)  # type: ignore[no-any-return]  # a module's call is Any


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x) @ self.embedding.weight)  # type: ignore[no-any-return]  # a module's call is Any


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))


def built(build: Callable[[], nn.Module] = network) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(3)
    return packprop.extend(build().double())


def data(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    """The samples of each rank."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def cross_entropy(**options: Any) -> nn.Module:
    return packprop.extend(nn.CrossEntropyLoss(**options))


def values(model: nn.Module, fields: list[str]) -> dict[str, list[Tensor]]:
    found = {}
    for name, parameter in model.named_parameters():
        for field in fields:
            if hasattr(parameter, field):
                value = getattr(parameter, field)
                found[f"{field} of {name}"] = [*value] if isinstance(value, list) else [value]
    return found


def assert_same(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for key, tensors in expected.items():
        for mine, other in zip(found[key], tensors, strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
            )


FIELDS = [make.savefield for make in ASKED]


def one_process(model: nn.Module, loss: nn.Module, **options: Any) -> dict[str, list[Tensor]]:
    """What one process has of the samples of all ranks."""
    x, y = (torch.cat(each) for each in zip(*data(), strict=True))
    with packprop.backpack(*(make() for make in ASKED), **options):
        loss(model(x), y).backward()
    return values(model, FIELDS)


def unequal_batches(rank: int) -> None:
    """Means are over all samples, and .grad is what DistributedDataParallel makes of it."""
    for options in ({}, {"reduction": "sum"}, {"weight": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)}):
        loss = cross_entropy(**options)
        expected = one_process(built(), loss)
        model = built()
        wrapped = DistributedDataParallel(model)
        x, y = data()[rank]
        for _ in range(2):
            with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)) as context:
                loss(wrapped(x), y).backward()
            assert context.rows == [range(5), range(5, 7), range(7, 10)][rank]
            assert_same(values(model, FIELDS), expected)
        with packprop.backpack(extensions.BatchGrad(), extensions.Variance(), ranks="all") as context:
            loss(wrapped(x), y).backward()
        rows = expected["grad_batch of 0.weight"][0][context.rows.start : context.rows.stop]
        torch.testing.assert_close(model[0].weight.grad_batch, rows)  # they stay where they were


def rows_sum_to_the_gradient(rank: int) -> None:
    """With equal shares, rows of all ranks add up to .grad under DistributedDataParallel."""
    model, loss = built(), cross_entropy()
    x, y = data()[rank]
    wrapped = DistributedDataParallel(model)
    with packprop.backpack(extensions.BatchGrad(), ranks=AllRanks(share="equal", gather=True)):
        loss(wrapped(x), y).backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)
    share = SIZES[rank] / sum(SIZES)
    expected = one_process(built(), loss)
    for ranks in (AllRanks(share="samples"), AllRanks(share=share)):
        with packprop.backpack(*(make() for make in ASKED[2:]), ranks=ranks):
            loss(model(x), y).backward()
        assert_same(values(model, FIELDS[2:]), {k: v for k, v in expected.items() if "batch" not in k})


def accumulation(rank: int) -> None:
    """Gradients accumulate on the rank under no_sync; values are those of all ranks in every pass."""
    model, loss = built(), cross_entropy()
    wrapped = DistributedDataParallel(model)
    x, y = data()[rank]
    expected = one_process(built(), loss)
    asked = [make() for make in ASKED]
    with wrapped.no_sync(), packprop.backpack(*asked, ranks=AllRanks(gather=True), loss_scale=0.5):
        (loss(wrapped(x), y) / 2).backward()
    assert_same(values(model, FIELDS), expected)
    plain = built()
    (cross_entropy()(plain(x), y) / 2).backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)  # that of this rank
    with packprop.backpack(*asked, ranks=AllRanks(gather=True), loss_scale=0.5):
        (loss(wrapped(x), y) / 2).backward()
    assert_same(values(model, FIELDS), expected)


def unused_on_one_rank(rank: int) -> None:
    """What a rank has not used has zeros for its samples, and the values of all ranks."""
    model, loss = built(Branching), cross_entropy()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    x, y = data()[rank]
    with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)) as context:
        loss(wrapped(x, detour=rank != 1), y).backward()
    reference = built(Branching)
    parts = [reference(x, detour=place != 1) for place, (x, _) in enumerate(data())]
    total = sum(SIZES)
    rows = {name: torch.zeros(total, *p.shape, dtype=p.dtype) for name, p in reference.named_parameters()}
    place = 0
    for part, (_, y) in zip(parts, data(), strict=True):
        for out, label in zip(part, y, strict=True):
            term = nn.functional.cross_entropy(out[None], label[None]) / total
            for name, p in reference.named_parameters():
                (g,) = torch.autograd.grad(term, p, retain_graph=True, allow_unused=True)
                rows[name][place] = 0 if g is None else g
            place += 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_batch, rows[name])
        torch.testing.assert_close(parameter.batch_l2, rows[name].flatten(1).square().sum(1))
        torch.testing.assert_close(parameter.variance, rows[name].var(0, unbiased=False))
        torch.testing.assert_close(parameter.sum_grad_squared, rows[name].square().sum(0))
    factors = model.second.weight.kflr
    if rank == 1:
        assert context.rows == range(5, 7)
    inputs = torch.cat([torch.tanh(reference.first(x)) for place, (x, _) in enumerate(data()) if place != 1])
    torch.testing.assert_close(factors[1], inputs.T @ inputs / total)


def empty_on_one_rank(rank: int, any_output: bool = True) -> None:
    """A rank without samples takes part, and has the values of the others."""
    model, loss = built(), cross_entropy()
    sizes = (4, 0, 3)
    x, y = data(sizes)[rank]
    with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)) as context:
        out = model(x)
        (loss(out, y) if len(x) or not any_output else out.sum() * 0).backward()
    assert context.rows == [range(4), range(4, 4), range(4, 7)][rank]
    reference = built()
    x, y = (torch.cat(each) for each in zip(*data(sizes), strict=True))
    with packprop.backpack(*(make() for make in ASKED)):
        loss(reference(x), y).backward()
    assert_same(values(model, FIELDS), values(reference, FIELDS))


def empty_under_the_loss_on_one_rank(rank: int) -> None:
    """It may call the loss as the others do."""
    empty_on_one_rank(rank, any_output=False)


def empty_on_all_ranks(rank: int) -> None:
    """Values are those of one process that has an empty batch."""
    x, y = data((0, 0, 0))[rank]
    asked = [extensions.BatchGrad, extensions.SumGradSquared, extensions.DiagGGNExact, extensions.BatchL2Grad]
    found = []
    for ranks in (AllRanks(gather=True), "own"):
        model, loss = built(), cross_entropy()
        for parameter in model.parameters():
            parameter.grad_batch = "of the step before"
        asks = [make() for make in (*asked, extensions.Variance)]
        with packprop.backpack(*asks, ranks=ranks) as context:
            loss(model(x), y).backward()
        assert context.rows == range(0)
        assert all(parameter.variance.isnan().all() for parameter in model.parameters())
        found.append(values(model, [make.savefield for make in asked]))
    assert_same(*found)


def without_terms_on_one_rank(rank: int) -> None:
    """All targets of a rank are ignored: its mean is 0/0, and counts nothing."""
    model, loss = built(), cross_entropy()
    parts = data()
    x = parts[rank][0]
    ignored = [y if place != 1 else torch.full_like(y, -100) for place, (_, y) in enumerate(parts)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)):
            loss(model(x), ignored[rank]).backward()
    reference = built()
    with packprop.backpack(*(make() for make in ASKED)):
        loss(reference(torch.cat([x for x, _ in parts])), torch.cat(ignored)).backward()
    assert_same(values(model, FIELDS), values(reference, FIELDS))


def tied_and_frozen(rank: int) -> None:
    for build in (Tied, network):
        model, reference = built(build), built(build)
        if build is network:
            model[0].bias.requires_grad_(False)
            reference[0].bias.requires_grad_(False)
        loss = cross_entropy()
        x, y = data()[rank]
        wrapped = DistributedDataParallel(model)
        with packprop.backpack(*(make() for make in ASKED), ranks=AllRanks(gather=True)):
            loss(wrapped(x), y).backward()
        assert_same(values(model, FIELDS), one_process(reference, loss))


def penalties(rank: int) -> None:
    """A penalty on parameters is in the loss of all ranks once."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]  # a module's call is Any

    def run(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        with packprop.backpack(extensions.DiagHessian(), **options):
            (cross_entropy()(model(x), y) + penalty).backward()
        return model.inner[0].weight.diag_h  # type: ignore[no-any-return]  # saved by the pass

    found = run(built(Penalised), *data()[rank], ranks="all")
    x, y = (torch.cat(each) for each in zip(*data(), strict=True))
    torch.testing.assert_close(found, run(built(Penalised), x, y))


def hooks_see_values_of_all_ranks(rank: int) -> None:
    model, loss = built(), cross_entropy()
    seen = []

    def hook(module: nn.Module) -> None:
        seen.append(module.weight.diag_ggn_exact.clone())
        del module.weight.diag_ggn_exact

    x, y = data()[rank]
    with packprop.backpack(extensions.DiagGGNExact(), ranks="all", extension_hook=hook):
        loss(model(x), y).backward()
    assert len(seen) == 2
    expected = one_process(built(), loss)
    by_shape = {tensors[0].shape: tensors[0] for key, tensors in expected.items() if "diag_ggn" in key}
    for diagonal in seen:
        torch.testing.assert_close(diagonal, by_shape[diagonal.shape])


def several_losses(rank: int) -> None:
    """Two means over the same samples have one share."""
    model, loss = built(), cross_entropy()
    x, y = data()[rank]

    def run(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        with packprop.backpack(extensions.Variance(), **options), packprop.record():
            out = model(x)
            (loss(out, y) + 0.3 * nn.functional.mse_loss(out, torch.ones_like(out))).backward()
        return model[0].weight.variance  # type: ignore[no-any-return]  # saved by the pass

    found = run(model, x, y, ranks="all")
    x, y = (torch.cat(each) for each in zip(*data(), strict=True))
    torch.testing.assert_close(found, run(built(), x, y))


def clipped_by_each_rank(rank: int) -> None:
    """Under DDP each rank clips its own samples; the sums are averaged as gradients are."""
    loss, expected = cross_entropy(), []
    for x, y in data():
        alone = built()
        with packprop.clipped_gradients(max_norm=0.5):
            loss(alone(x), y).backward()
        expected.append([p.grad for p in alone.parameters() if p.grad is not None])
    model, (x, y) = DistributedDataParallel(built()), data()[rank]
    with packprop.clipped_gradients(max_norm=0.5) as clipped:
        loss(model(x), y).backward()
    assert len(clipped.norms) == len(x)
    for parameter, each in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(parameter.grad, torch.stack(each).mean(0))


def several_models_of_equal_names(rank: int) -> None:
    """One that a rank has not called, or whose call no hook sees, is not taken for another."""
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    x, _ = data((4, 4))[rank]
    for alone in (0, 1):
        torch.manual_seed(3)
        models = [packprop.extend(nn.Linear(4, 4).double()) for _ in range(3)]

        def value(x: Tensor, whose: int, models: list[nn.Linear] = models, alone: int = alone) -> Tensor:
            first, second, _ = models
            out = models[alone].forward(x) if whose else second(first(x).tanh())
            total: Tensor = loss(out, torch.ones_like(out))
            return total

        with packprop.backpack(extensions.SumGradSquared(), ranks="all"):
            value(x, rank).backward()
        terms = [value(row[None], whose) for whose, (x, _) in enumerate(data((4, 4))) for row in x]
        for model in models[:2]:
            expected = torch.stack([row_of(term, model.weight).square() for term in terms]).sum(0)
            torch.testing.assert_close(model.weight.sum_grad_squared, expected)


def row_of(term: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of one term, of zeros if the parameter is not in it."""
    (row,) = torch.autograd.grad(term, parameter, retain_graph=True, allow_unused=True)
    return torch.zeros_like(parameter) if row is None else row


def zeros_of_unused_parameters(rank: int) -> None:
    """A rank that has not used a parameter adds zeros for its chosen samples, or for its tokens that count."""
    model, loss = built(Branching), packprop.extend(nn.CrossEntropyLoss(reduction="sum"))
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(2, 4, 3, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (2, 4, 3), generator=generator)
    targets[1, 0, 1:] = -100

    def value(whose: int, n: slice = slice(None), t: slice = slice(None)) -> Tensor:
        out = model(inputs[whose, n, t], detour=whose == 0)
        total: Tensor = loss(out.transpose(1, 2), targets[whose, n, t])
        return total

    weight, chosen = model.second.weight, [[0, 1], [2]]
    terms = [value(whose, slice(n, n + 1)) for whose in (0, 1) for n in chosen[whose]]
    rows = torch.stack([row_of(term, weight) for term in terms])
    counted = [*(targets >= 0).nonzero().tolist()]
    terms = [value(whose, slice(n, n + 1), slice(t, t + 1)) for whose, n, t in counted]
    of_tokens = torch.stack([row_of(term, weight) for term in terms])
    for gather in (True, False):
        asked = [make(subsampling=chosen[rank]) for make in (extensions.Variance, extensions.BatchGrad)]
        with packprop.backpack(*asked, extensions.Variance(per="token"), ranks=AllRanks(gather=gather)):
            value(rank).backward()
        torch.testing.assert_close(weight.variance, rows.var(0, correction=0))
        torch.testing.assert_close(weight.grad_batch, rows if gather else rows.split([2, 1])[rank])
        torch.testing.assert_close(weight.variance_token, of_tokens.var(0, correction=0))


RIGHT = [
    clipped_by_each_rank,
    unequal_batches,
    rows_sum_to_the_gradient,
    accumulation,
    unused_on_one_rank,
    empty_on_one_rank,
    empty_under_the_loss_on_one_rank,
    empty_on_all_ranks,
    without_terms_on_one_rank,
    tied_and_frozen,
    penalties,
    hooks_see_values_of_all_ranks,
    several_losses,
]

OF_TWO = [several_models_of_equal_names, zeros_of_unused_parameters]


@thorough
def test_values_are_those_of_one_process() -> None:
    in_processes(run_each, 3, RIGHT)
    in_processes(run_each, 2, OF_TWO)


def refused(run: Callable[[], None]) -> str:
    with pytest.raises(PackpropError) as raised:
        run()
    error = raised.value
    assert all((error.asked, error.where, error.why, error.instead))
    return str(error)


def refusals(rank: int) -> dict[str, str]:
    model, loss = built(), cross_entropy()
    x, y = data()[rank]
    found = {}

    def one_pass(*asked: Any, factor: float = 1.0, ranks: Any = "all", **options: Any) -> None:
        with packprop.backpack(*asked, ranks=ranks):
            (factor * loss(model(x), y)).backward(**options)

    norms = extensions.BatchL2Grad
    found["other extensions"] = refused(lambda: one_pass(extensions.Variance() if rank else norms()))
    found["other options"] = refused(lambda: one_pass(extensions.KFAC(1 + rank)))
    found["more extensions"] = refused(lambda: one_pass(norms(), *([extensions.Variance()] if rank else [])))
    found["one refuses"] = refused(lambda: one_pass(extensions.BatchGrad(subsampling=[4])))
    found["by hand"] = refused(lambda: one_pass(norms(), factor=1.0 + rank))
    found["BatchDotGrad"] = refused(lambda: one_pass(extensions.BatchDotGrad()))
    found["EKFAC"] = refused(lambda: one_pass(extensions.EKFAC()))
    found["HMP"] = refused(lambda: one_pass(extensions.HMP()))
    found["KFRA"] = refused(lambda: one_pass(extensions.KFRA()))
    found["create_graph"] = refused(lambda: one_pass(norms(), create_graph=True))

    def own_loss() -> None:
        with packprop.backpack(norms(), ranks="all"):
            (model(x).square().sum(1) * torch.arange(len(x))).sum().backward()

    found["own loss"] = refused(own_loss)

    def sums_and_means() -> None:
        with packprop.backpack(norms(), ranks="all"):
            out = model(x)
            (loss(out, y) + cross_entropy(reduction="sum")(out, y)).backward()

    found["sums and means"] = refused(sums_and_means)

    def of_no_model(made: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with packprop.backpack(norms(), ranks="all"):
                loss(made(x), y).backward()

        return run

    found["not extended"] = refused(of_no_model(network().double()))
    copies = [copy.deepcopy(model) for _ in range(2)]
    found["copies"] = refused(of_no_model(copies[rank % 2]))
    parameters = [*model.parameters()]
    assert not any(hasattr(p, "batch_l2") for p in parameters)
    one_pass(norms())  # and all goes on
    assert model[0].weight.batch_l2.shape == (len(x),)
    if rank == 1:
        built()
    found["more models"] = refused(lambda: one_pass(norms()))
    return found


@thorough
def test_what_cannot_be_put_together_is_refused_on_every_rank() -> None:
    first, *others = in_processes(refusals, 3)
    for found in others:
        assert found.keys() == first.keys()
    assert "rank 1" in first["other extensions"]
    assert "mc_samples=2" in first["other options"]
    assert "Variance" in first["more extensions"]
    assert "rank 1" in first["one refuses"]
    assert "index 4" in first["one refuses"]
    assert "the batch has 2 samples" in others[0]["one refuses"]
    assert "by hand" in first["by hand"]
    assert "share" in first["own loss"]
    assert "in no extended model" in first["not extended"]
    assert "several models have" in first["copies"]
    assert "rank 1" in first["more models"]
    assert "same order" in first["more models"]
    for name in ("BatchDotGrad", "EKFAC", "HMP", "KFRA"):
        assert name in first[name]
        assert "ranks='own'" in first[name]


class Fused(nn.Module):
    """Attention in one function, which cannot be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x)[:, None, None].expand(-1, 1, 3, -1).split(4, -1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.second(out.mean((1, 2)))  # type: ignore[no-any-return]  # a module's call is Any


def failures_in_the_pass(rank: int) -> dict[str, str]:
    """What only the first rank's work meets: the others have no samples, or another hook."""
    found = {}

    def one_pass(
        name: str, asked: Any, parallel: bool, sizes: tuple[int, ...] = (4, 0), **options: Any
    ) -> None:
        torch.manual_seed(0)
        model, loss = packprop.extend(Fused().double()), cross_entropy()
        called = nn.parallel.DistributedDataParallel(model) if parallel else model
        x, y = data(sizes)[rank]
        out = called(x)
        value = loss(out, y) if len(x) else out.sum() * 0
        try:
            with packprop.backpack(asked, ranks="all", **options):
                value.backward()
            found[name] = "nothing"
        except (PackpropError, ValueError) as error:
            found[name] = str(error)

    def hook(module: nn.Module) -> None:
        if rank == 0:
            raise ValueError("no room")

    for parallel in (False, True):
        one_pass(f"fused attention, {parallel}", extensions.DiagHessian(), parallel)
        one_pass(f"hook, {parallel}", extensions.Variance(), parallel, (4, 3), extension_hook=hook)
        one_pass(f"and goes on, {parallel}", extensions.Variance(), parallel)
    return found


@thorough
def test_no_rank_waits_for_one_that_fails_in_the_pass() -> None:
    first, second = in_processes(failures_in_the_pass, 2, seconds=60)
    for name, said in first.items():
        if "attention" in name:
            assert "attention" in said
            assert said in second[name]
        elif "hook" in name:
            assert (said, second[name]) == ("no room", "nothing")  # it came last, when values were exchanged
        else:
            assert (said, second[name]) == ("nothing", "nothing")


def several_groups(rank: int) -> str:
    """As if each parameter was too large to be merged together with others."""
    joint.AT_ONCE = 1
    model, loss = built(), cross_entropy()
    x, y = data()[rank]

    def hook(module: nn.Module) -> None:
        if rank == 1:
            raise ValueError("no room")

    try:
        with packprop.backpack(extensions.Variance(), ranks="all", extension_hook=hook):
            loss(model(x), y).backward()
    except (PackpropError, ValueError) as error:
        return str(error)
    return "nothing"


@thorough
def test_a_hook_that_fails_is_heard_by_those_who_merge_on() -> None:
    first, second, third = in_processes(several_groups, 3, seconds=60)
    assert second == "no room"
    assert "rank 1" in first
    assert "no room" in first
    assert first == third


def one_does_not_come(rank: int) -> str:
    model, loss = built(), cross_entropy()
    x, y = data()[rank]
    if rank == 1:
        loss(model(x), y).backward()
        return ""

    def run() -> None:
        with packprop.backpack(extensions.Variance(), ranks=AllRanks(timeout=1.0)):
            loss(model(x), y).backward()

    return refused(run)


@thorough
def test_a_rank_that_does_not_come_is_named() -> None:
    found = outcomes_of(one_does_not_come, 2, patient=True)
    assert found[0].error is None
    assert "did not come" in found[0].value or "not all ranks came within 1 s" in found[0].value


def test_bad_arguments() -> None:
    with pytest.raises(BadInput, match="no process group"):
        packprop.backpack(extensions.Variance(), ranks="all")
    with pytest.raises(BadInput, match="'own', 'all'"):
        packprop.backpack(extensions.Variance(), ranks="every")
    for wrong in (dict(share="half"), dict(share=-1.0), dict(share=True), dict(timeout=0)):
        with pytest.raises(BadInput):
            AllRanks(**wrong)


def test_ranks_may_take_other_samples() -> None:
    def said(chosen: list[int]) -> tuple[str, ...]:
        projected = extensions.Projected(extensions.BatchGrad(chosen), 8)
        return described(AllRanks(), [extensions.Variance(chosen), projected])

    assert said([0, 2]) == said([1])
    assert "dimension=8" in said([1])[1]


def test_shares_of_ranks() -> None:
    """By samples, in equal parts, or as only a rank knows it."""
    statements: Any = [SimpleNamespace(samples=samples) for samples in (1, 0, 3)]
    assert shares(AllRanks(share="samples"), statements) == [0.25, 0.0, 0.75]
    assert shares(AllRanks(share="equal"), statements) == [1 / 3] * 3
    assert all(map(math.isnan, shares(AllRanks(share=0.5), statements)))
