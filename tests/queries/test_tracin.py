"""Scores added up over checkpoints of training, against gradients of one sample at a time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import packprop
from packprop import Checkpoint
from packprop.errors import BadInput
from packprop.extensions import BatchGrad
from tests.queries.small import LOSS, QUERIES, SIZE, by_row, gradients, problem
from tests.references.running import assert_near

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
}


def trained(folder: Path, kind: str) -> tuple[Any, list[Checkpoint], Tensor]:
    """A model after some steps, checkpoints after each of them, and products from a loop over samples."""
    model, x, y = problem()
    optimizer = OPTIMIZERS[kind](model)
    checkpoints, products = [], torch.zeros(3, SIZE).double()
    for step in range(3):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        store = folder / f"{kind}{step}"
        packprop.compute(model, LOSS, (x, y), [BatchGrad()], store=store, progress=False)
        state, flat = copy.deepcopy(model.state_dict()), gradients((model, x, y))
        if kind == "sgd":
            rate = 0.5 / (1 + step)
            checkpoints.append(Checkpoint(store, state, rate))
            divisors = {name: torch.ones(rows.shape[1]).double() / rate for name, rows in flat.items()}
        else:
            curvature = packprop.optimizer_curvature(model, optimizer)
            checkpoints.append(Checkpoint(store, state, curvature=curvature, damping=0))
            divisors = {name: curvature[name].flatten() for name in flat}
        for name, rows in flat.items():
            products += rows[QUERIES] / divisors[name] @ rows.mT
    return (model, x, y), checkpoints, products


def called(checkpoints: list[Checkpoint], problem: Any, **options: Any) -> packprop.Influence:
    model, x, y = problem
    return packprop.tracin(checkpoints, model, LOSS, (x[QUERIES], y[QUERIES]), **options)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_products_are_added_up(tmp_path: Path, kind: str) -> None:
    trained_problem, checkpoints, products = trained(tmp_path, kind)
    before = copy.deepcopy(trained_problem[0].state_dict())
    groups = torch.tensor([0, 1, 1, 0, 2, 2, 0, 1, 0])
    found = called(checkpoints, trained_problem, k=SIZE, groups=groups)
    assert_near(by_row(found), products, "products", 1e-9)
    assert found.groups is not None
    assert_near(found.groups, torch.zeros(3, 3).double().index_add_(1, groups, products), "sums", 1e-9)
    assert (found.checkpoints, found.readings, found.samples) == (3, 3, SIZE)
    assert "added up over 3 checkpoints" in str(found)
    few = called(checkpoints, trained_problem, k=2)
    assert torch.equal(few.smallest.identifiers, found.smallest.identifiers[:, :2])
    after = trained_problem[0].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_one_checkpoint_is_influence(tmp_path: Path) -> None:
    trained_problem, checkpoints, _ = trained(tmp_path, "sgd")
    model, x, y = trained_problem
    last = dataclasses.replace(checkpoints[-1], rate=1.0)
    found = called([last], trained_problem, k=3)
    alone = packprop.influence(last.store, model, LOSS, (x[QUERIES], y[QUERIES]), k=3)
    assert torch.equal(found.largest.rows, alone.largest.rows)
    assert_near(found.largest.products, alone.largest.products, "products", 1e-12)
    once = iter([(x[QUERIES], y[QUERIES])])
    packprop.tracin([last], model, LOSS, once)


class Turning:
    """Batches that come in another order each time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.batches = [(x[:1], y[:1]), (x[1:], y[1:])]

    def __iter__(self) -> Iterator[Any]:
        self.batches = self.batches[::-1]
        return iter(self.batches)


def test_queries_have_the_same_order_at_all_checkpoints(tmp_path: Path) -> None:
    (model, x, y), checkpoints, _ = trained(tmp_path, "sgd")

    def products(queries: Any, number: int) -> Tensor:
        found = packprop.tracin(checkpoints[:number], model, LOSS, queries, k=SIZE)
        return found.largest.products

    def shuffled() -> Any:
        source = torch.Generator().manual_seed(1)
        return DataLoader(TensorDataset(x, y), 2, shuffle=True, generator=source)

    [*batches] = shuffled()
    assert torch.equal(products(shuffled(), 3), products(batches, 3))
    products(Turning(x, y), 1)
    with pytest.raises(BadInput, match="in another order"):
        products(Turning(x, y), 2)


def test_what_is_refused(tmp_path: Path) -> None:
    trained_problem, checkpoints, _ = trained(tmp_path, "sgd")
    model, x, y = trained_problem

    def refused(words: str, given: list[Checkpoint]) -> None:
        with pytest.raises(BadInput, match=words) as caught:
            called(given, trained_problem)
        assert all(caught.value.args)

    first, second, _ = checkpoints
    refused("nothing to add up", [])
    refused("checkpoint 1, rate=nan", [first, dataclasses.replace(second, rate=float("nan"))])
    text: Any = "0.1"
    refused("checkpoint 1, rate='0.1'", [first, dataclasses.replace(second, rate=text)])
    refused(
        "checkpoint 0, state(.|\n)*cannot take",
        [dataclasses.replace(first, state=nn.Linear(1, 1).state_dict())],
    )
    packprop.compute(model, LOSS, (x[:5], y[:5]), [BatchGrad()], store=tmp_path / "few", progress=False)
    refused(
        "checkpoint 1(.|\n)*not those of the first",
        [first, dataclasses.replace(second, store=tmp_path / "few")],
    )
    with pytest.raises(BadInput, match="2 checkpoints read them"):
        packprop.tracin(checkpoints[:2], model, LOSS, iter([(x, y)]))
    with pytest.raises(BadInput, match="the number of its group"):
        called(checkpoints, trained_problem, groups=[0, 1])
    unread = iter([(x, y)])
    with pytest.raises(BadInput, match="the number of its group"):  # before any work
        packprop.tracin([first], model, LOSS, unread, groups=[0, 1])
    assert next(unread) is not None
