"""Kronecker factors beyond their definition: the empirical Fisher, and many draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME
from tests.references.oracle import Oracle
from tests.references.running import assert_near, backward, forward, results
from tests.selection import one_in


@pytest.mark.parametrize(
    ("name", "reduction", "terms"),
    [
        ("linear-deep", "mean", 3),
        ("linear-deep", "sum", 1),
        ("mse-vector", "mean", 6),
        ("conv2d-deep", "mean", 3),
    ],
)
def test_the_empirical_fisher_is_the_second_moment_of_gradients(name: str, reduction: str, terms: int) -> None:
    """Rows of grad_batch carry 1/terms of a mean; the Fisher carries it once, their outer product twice."""
    problem = BY_NAME[name].problem(3, reduction)
    backward(problem, extensions.KFAC(fisher="empirical"))
    rows = Oracle(problem).grad_batch
    checked = 0
    for parameter, factors in results(problem, "kfac").items():
        if parameter.endswith("bias"):
            flat = rows[parameter].flatten(1)
            assert_near(factors[0], terms * flat.T @ flat, parameter)
            checked += 1
            bias, weight = factors[0], parameter.replace("bias", "weight")
            assert_near(results(problem, "kfac")[weight][0], bias, weight)
    assert checked > 0


def test_terms_without_weight_take_no_part_in_the_empirical_fisher() -> None:
    problem = BY_NAME["ce-ignore-default"].problem(3)
    backward(problem, extensions.KFAC(fisher="empirical"))
    for factors in results(problem, "kfac").values():
        assert all(bool(factor.isfinite().all()) for factor in factors)


WEIGHTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mse": (F.mse_loss, {"reduction": "sum"}),  # a mean is divided by the sum of the weights
    "huber": (F.huber_loss, {}),
    "huber-sum": (F.huber_loss, {"reduction": "sum"}),
    "bce": (F.binary_cross_entropy_with_logits, {}),
}


@pytest.mark.parametrize("fisher", ["empirical", "exact", "sampled"])
@pytest.mark.parametrize(("function", "options"), WEIGHTED.values(), ids=WEIGHTED)
def test_a_weight_is_a_factor_on_each_term(function: Any, options: dict[str, Any], fisher: str) -> None:
    """A weight of two on each term is the factor two on the loss."""
    found = []
    for is_weighted in (False, True):
        torch.manual_seed(0)
        model, x, y = packprop.extend(nn.Linear(4, 3)), torch.randn(5, 4), torch.rand(5, 3)
        more = {"weight": torch.full((5, 3), 2.0)} if is_weighted else {}
        factor = 1.0 if is_weighted else 2.0
        with packprop.record():
            loss = factor * function(model(x), y, **options, **more)
        exact = fisher == "exact"
        asked = extensions.KFLR() if exact else extensions.KFAC(fisher=fisher)
        with packprop.backpack(asked):
            loss.backward()
        found.append(model.weight.kflr if exact else model.weight.kfac)
    for plain, weighted in zip(*found, strict=True):
        torch.testing.assert_close(weighted, plain)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_several_targets_of_an_entry_are_as_many_terms() -> None:
    """The Fisher of a mean is that of the sum, divided by the number of terms once."""
    model, x, y, found = packprop.extend(nn.Linear(4, 1)), torch.randn(5, 4), torch.rand(5, 3), []
    for reduction in ("mean", "sum"):
        with packprop.record():
            loss = F.huber_loss(model(x), y, reduction=reduction)
        with packprop.backpack(extensions.KFAC(fisher="empirical")):
            loss.backward()
        found.append(model.bias.kfac[0])
    torch.testing.assert_close(found[0], found[1] / y.numel())


def test_a_loss_of_unknown_scale_has_no_empirical_fisher() -> None:
    problem = BY_NAME["own-convex"].problem(3)
    with pytest.raises(PackpropError, match="divided by"):
        backward(problem, extensions.KFAC(fisher="empirical"))


@pytest.mark.parametrize("make", [extensions.KFAC, extensions.KFLR], ids=lambda make: make.__name__)
def test_choices_are_named(make: type) -> None:
    with pytest.raises(BadInput, match="'mixed', 'expand', 'reduce'"):
        make(approximation="all")
    with pytest.raises(BadInput, match="'sampled', 'empirical'"):
        extensions.KFAC(fisher="true")


@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
def test_many_draws_come_near_the_exact_factors(approximation: str) -> None:
    problem = BY_NAME["conv2d-deep"].problem(2)
    source = torch.Generator().manual_seed(0)
    asked = extensions.KFAC(20_000, generator=source, approximation=approximation)
    loss = forward(problem)
    with packprop.backpack(asked, extensions.KFLR(approximation=approximation)):
        loss.backward()
    for name, exact in results(problem, "kflr").items():
        for drawn, factor in zip(results(problem, "kfac")[name], exact, strict=True):
            assert_near(drawn, factor, name, 0.05)


SCALES = torch.linspace(0.5, 1.5, 5).double()[:, None]
SHARED: dict[str, Callable[[nn.Embedding, Tensor, Tensor], Tensor]] = {
    "[s]": lambda table, x, places: x + table(places),
    "[1, s]": lambda table, x, places: x + table(places.reshape(-1, 5)),
    "[s], subtracted": lambda table, x, places: x - 2 * x * table(places),
    "[s], expanded": lambda table, x, places: torch.cat([x, table(places).expand_as(x)], 1),
    "[s], scaled": lambda table, x, places: x + 0.3 * table(places) / 2,
    "[1, s], scaled by position": lambda table, x, places: x + (SCALES * table(places)).reshape(-1, 5, 4),
    "[s], of a tied table": lambda table, x, places: (
        torch.tanh(table((x * 9).long() % 7).sum(2)) + 0.3 * table(places)
    ),
    "[s], transposed": lambda table, x, places: (x.mT - 2 * table(places).mT).mT,
    "[s], taken twice": lambda table, x, places: taken_twice(x, table(places)),
}


def taken_twice(x: Tensor, looked_up: Tensor) -> Tensor:
    return torch.sin(x + looked_up) - x * looked_up


def positions_of(
    look_up: Callable[[nn.Embedding, Tensor, Tensor], Tensor], places: Tensor, table: nn.Embedding
) -> nn.Module:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body, self.head = table, nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            each = look_up(self.table, x, places)
            return self.head(torch.tanh(self.body(each)).mean(1))  # type: ignore[no-any-return]  # a layer's

    return Positions()


@one_in(5)
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("samples", [1, 3])
def test_rows_that_all_samples_share_are_looked_up_by_each(
    name: str, approximation: str, padding: int | None, samples: int
) -> None:
    """The factors are those of a table that is given an index for each sample."""
    x, target = torch.randn(samples, 5, 4).double(), torch.randint(3, (samples,))
    places = torch.arange(5)

    def asked() -> list[packprop.types.Extension]:
        source = torch.Generator().manual_seed(0)
        own = {"approximation": approximation}
        return [
            extensions.KFAC(2, generator=source, **own),
            extensions.KFLR(**own),
            extensions.EKFAC(fisher="exact", **own),
            extensions.DiagGGNExact(),
            extensions.BatchGrad(),
            extensions.BatchL2Grad(),
            extensions.Variance(),
        ]

    found = []
    for look_up in (SHARED[name], lambda table, x, index: SHARED[name](table, x, index.expand(len(x), 5))):
        torch.manual_seed(1)
        model = packprop.extend(positions_of(look_up, places, nn.Embedding(7, 4, padding)).double())
        with packprop.backpack(*asked()):
            nn.functional.cross_entropy(model(x), target).backward()
        found.append(model.table.weight)
    shared, each = found
    assert [factor.shape for factor in shared.kfac] == [(4, 4), (7, 7)]
    for attribute in ("kfac", "kflr"):
        for factor, expected in zip(getattr(shared, attribute), getattr(each, attribute), strict=True):
            torch.testing.assert_close(factor, expected)
    torch.testing.assert_close(packprop.kronecker.dense(shared.ekfac), packprop.kronecker.dense(each.ekfac))
    for attribute in ("grad", "grad_batch", "batch_l2", "variance", "diag_ggn_exact"):
        torch.testing.assert_close(getattr(shared, attribute), getattr(each, attribute))


def test_the_factors_of_shared_rows_are_those_of_one_hot_inputs() -> None:
    """A table is a linear map of one-hot inputs, whose factors the oracle defines."""
    x, target = torch.randn(3, 5, 4).double(), torch.randint(3, (3,))
    torch.manual_seed(1)
    model = packprop.extend(positions_of(SHARED["[s]"], torch.arange(5), nn.Embedding(7, 4)).double())
    with packprop.backpack(extensions.KFLR()):
        nn.functional.cross_entropy(model(x), target).backward()
    outputs, inputs = model.table.weight.kflr
    rows = torch.zeros(3, 5, 7).double()
    rows[:, range(5), range(5)] = 1
    torch.testing.assert_close(inputs, torch.einsum("nsi,nsj->ij", rows, rows) / 3)
    shift = torch.zeros(3, 4, dtype=torch.double, requires_grad=True)  # at all positions of one sample
    scores = model.head(torch.tanh(model.body(x + model.table(torch.arange(5)) + shift[:, None])).mean(1))
    expected = torch.zeros(4, 4).double()
    for row in scores:
        jacobian = torch.stack([torch.autograd.grad(c, shift, retain_graph=True)[0].sum(0) for c in row])
        p = row.detach().softmax(0)
        expected += jacobian.T @ (p.diag() - p.outer(p)) @ jacobian / 3
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("name", ["[s]", "[s], scaled", "[s], taken twice"])
def test_shared_rows_have_factors_in_checkpoints(name: str) -> None:
    """A checkpoint hands out the index once."""
    x, target = torch.randn(6, 5, 4).double().requires_grad_(), torch.randint(3, (6,))
    torch.manual_seed(1)
    model = packprop.extend(positions_of(SHARED[name], torch.arange(5), nn.Embedding(7, 4)).double())
    found = []
    for outputs in (model(x), checkpoint(model, x, use_reentrant=False)):
        with packprop.backpack(extensions.KFLR()):
            nn.functional.cross_entropy(outputs, target).backward()
        found.append(model.table.weight.kflr)
    for factor, expected in zip(*found, strict=True):
        torch.testing.assert_close(factor, expected)
