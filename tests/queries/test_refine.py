"""Queries that are refined by the data, against the inverse of the dense matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import Refinement
from packprop.engine.algebra.projections import Projection, projected
from packprop.engine.algebra.structures import Dense
from packprop.engine.memory import LiveBytes
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.extensions import EKFAC, KFLR, BatchGrad, Projected
from tests.dataset.matrices import PROBLEMS, classes, convolution, dense, problem
from tests.queries.small import by_row
from tests.references.running import assert_near
from tests.selection import one_in, thorough

DAMPING, QUERIES = 0.01, slice(0, 5)
LOSS = nn.CrossEntropyLoss()

Data = tuple[Tensor, Tensor]


def gradients(model: nn.Module, loss: Any, data: Data) -> Tensor:
    """Gradients of the samples' losses, summed over terms, from one backward pass for each."""
    found = []
    scale = 1.0
    for x, y in zip(*data, strict=True):
        value = loss(model(x[None]), y[None])
        if getattr(loss, "reduction", "mean") != "sum":
            weight = getattr(loss, "weight", None)
            scale = float(weight[y]) if weight is not None else float((y != -100).sum())
        slopes = torch.autograd.grad(
            value * scale, [*model.parameters()], materialize_grads=True, allow_unused=True
        )
        found.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(found)


def refined(folder: Path, model: nn.Module, loss: Any, data: Data, **options: Any) -> packprop.Influence:
    queries = data[0][QUERIES], data[1][QUERIES]
    more: dict[str, Any] = {"damping": DAMPING, "k": len(data[0])}
    return packprop.influence(folder, model, loss, queries, **(more | options))


def written(folder: Path, model: nn.Module, loss: Any, data: Data, *more: Any) -> Any:
    return packprop.compute(model, loss, data, [BatchGrad(), *more], store=folder, progress=False)


@one_in(5)
@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "recurrent"])
def test_products_are_those_of_the_dense_inverse(tmp_path: Path, name: str, matrix: Any) -> None:
    model, loss, data = problem(name)
    written(tmp_path / "store", model, loss, data)
    whole = dense(matrix, model, loss, data)
    damping = DAMPING if matrix == "ggn" else 0.1 - 2 * float(torch.linalg.eigvalsh(whole)[0].clamp(max=0))
    refine = Refinement(data, matrix, tolerance=1e-10, readings=200, batch_size=4, progress=False)
    found = refined(tmp_path / "store", model, loss, data, damping=damping, refine=refine)
    rows = gradients(model, loss, data)
    inverse = torch.linalg.inv(whole + damping * torch.eye(len(whole), dtype=torch.float64))
    assert_near(by_row(found), rows[QUERIES] @ inverse @ rows.mT, "products", 1e-6)
    assert found.residuals is not None
    assert found.residuals.shape == (5,)
    assert float(found.residuals.max()) <= 1e-10
    assert found.refined_by == matrix
    assert 0 < found.data_readings <= 200


@pytest.mark.parametrize("make", [EKFAC, KFLR], ids=str)
def test_curvature_is_the_preconditioner_and_changes_no_product(tmp_path: Path, make: Any) -> None:
    model, loss, data = problem("convolution")
    result = written(tmp_path / "store", model, loss, data, make())
    refine = Refinement(data, tolerance=1e-9, readings=100, batch_size=4, progress=False)
    plain = refined(tmp_path / "store", model, loss, data, refine=refine)
    found = refined(tmp_path / "store", model, loss, data, refine=refine, curvature=result)
    assert_near(by_row(found), by_row(plain), "products", 1e-5)
    assert found.curvature == make.savefield
    alone = refined(tmp_path / "store", model, loss, data, curvature=result)
    assert not torch.allclose(by_row(alone), by_row(plain), rtol=0.1)


def test_a_table_that_no_query_looks_up() -> None:
    """The order of the entries of its factors is not known, and does not matter."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Embedding(7, 3), nn.Embedding(5, 3), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            found = self.one(x[:, 0])
            out: Tensor = self.head(found + self.two(x[:, 1]) if x.shape[1] > 1 else found)
            return out

    torch.manual_seed(0)
    model = Two().double()
    data = torch.randint(5, (12, 2)), torch.randint(4, (12,))
    queries = data[0][:2, :1], data[1][:2]
    options: dict[str, Any] = {"damping": 0.1, "k": 12}
    options["refine"] = Refinement(data, tolerance=1e-9, readings=60, progress=False)
    factors = packprop.compute(model, LOSS, data, [KFLR()], progress=False)
    found, expected = (
        by_row(packprop.influence(data, model, LOSS, queries, curvature=each, **options))
        for each in (factors, None)
    )
    assert_near(found, expected, "products", 1e-6)


def test_random_vectors_beside_a_few_queries_save_readings(tmp_path: Path) -> None:
    model, loss, data = problem("convolution")
    written(tmp_path / "store", model, loss, data)

    def found(width: int) -> packprop.Influence:
        refine = Refinement(data, tolerance=1e-6, readings=50, width=width, progress=False)
        return refined(tmp_path / "store", model, loss, data, refine=refine)

    narrow, wide = found(1), found(20)
    assert wide.data_readings < narrow.data_readings
    assert_near(by_row(wide), by_row(narrow), "products", 1e-3)


def test_projected_stores(tmp_path: Path) -> None:
    """Queries are refined first, and projected after that."""
    model, loss, data = problem("convolution")
    stored = [Projected(BatchGrad(), 50, seed=3)]
    packprop.compute(model, loss, data, stored, store=tmp_path / "store", progress=False)
    refine = Refinement(data, tolerance=1e-10, readings=100, progress=False)
    found = refined(tmp_path / "store", model, loss, data, refine=refine)
    rows = gradients(model, loss, data)
    whole = dense("ggn", model, loss, data)
    solved = torch.linalg.solve(
        whole + DAMPING * torch.eye(len(whole), dtype=torch.float64), rows[QUERIES].mT
    ).mT
    store = packprop.Store(tmp_path / "store")
    projection = Projection(**store.arrays("grad_batch_projected")[""].header.projection)
    assert projection.dimension == 50
    pieces = solved.split([p.numel() for p in model.parameters()], 1)
    parts = [
        projected(Dense(piece.reshape(1, 5, *p.shape)), projection, name, p.shape)
        for piece, (name, p) in zip(pieces, model.named_parameters(), strict=True)
    ]
    expected = torch.stack(parts).sum(0) @ store["grad_batch_projected"].torch().double().mT
    assert_near(by_row(found), expected, "products", 1e-6)


@thorough
def test_a_budget_is_kept_by_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    data = torch.randn(24, 40), torch.randint(3, (24,))
    written(tmp_path / "store", model, LOSS, data)
    queries = data[0][:10], data[1][:10]
    refine = Refinement(data, tolerance=1e-4, readings=100, batch_size=8, progress=False)

    def found(**more: Any) -> packprop.Influence:
        options: dict[str, Any] = {"damping": 0.3, "refine": refine, "k": 3, **more}
        return packprop.influence(tmp_path / "store", model, LOSS, queries, **options)

    whole, budget = found(), 400_000
    live = LiveBytes()
    with live:
        within = found(memory=budget)
    assert within.readings > 1
    assert whole.readings == 1
    assert_near(within.largest.products, whole.largest.products, "products", 1e-3)
    graph = 8 * 4 * 40 * 8  # the activations of a batch, which do not count
    assert live.peak <= budget + graph
    with pytest.raises(BadInput, match="one query that is refined"):
        found(memory=60_000)


KILL = "KILL_IN_READING"


class Killed(Exception):
    pass


class Batches:
    """Batches that end with an exception in the reading that the environment names."""

    def __init__(self, data: Data) -> None:
        self.data, self.readings = data, 0

    def __iter__(self) -> Iterator[Data]:
        self.readings += 1
        yield self.data[0][:6], self.data[1][:6]
        if os.environ.get(KILL) == str(self.readings):
            raise Killed
        yield self.data[0][6:], self.data[1][6:]


@pytest.mark.parametrize("memory", ["500MiB", 60_000])
def test_work_goes_on_where_it_was_ended(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packprop.applications.dataset.checkpoint.SHARE", 0)  # after each reading
    model, loss, data = problem("convolution")
    result = written(tmp_path / "store", model, loss, data, EKFAC(fisher="exact"))

    def found(batches: Batches, folder: str | None, **more: Any) -> packprop.Influence:
        kept = None if folder is None else tmp_path / folder
        refine = Refinement(batches, tolerance=1e-8, width=1, checkpoint=kept, progress=False)
        options = {"curvature": result, "memory": memory, "refine": refine, **more}
        return refined(tmp_path / "store", model, loss, data, **options)

    plain = Batches(data)
    expected = found(plain, None)
    steps = expected.data_readings
    assert steps > 5
    last = steps - 2
    monkeypatch.setenv(KILL, str(last))
    with pytest.raises(BadInput, match="Killed"):
        found(Batches(data), "work")
    monkeypatch.delenv(KILL)
    again = Batches(data)
    went_on = found(again, "work")
    assert torch.equal(went_on.largest.products, expected.largest.products)
    assert again.readings == steps - last + 1
    assert went_on.data_readings == steps
    at_once = Batches(data)
    assert torch.equal(found(at_once, "work").largest.products, expected.largest.products)
    assert at_once.readings == 0
    with pytest.raises(BadInput, match="other queries"):
        packprop.influence(
            tmp_path / "store",
            model,
            loss,
            (data[0][2:7], data[1][2:7]),
            curvature=result,
            damping=DAMPING,
            memory=memory,
            k=len(data[0]),
            refine=Refinement(again, tolerance=1e-8, width=1, checkpoint=tmp_path / "work", progress=False),
        )
    with pytest.raises(BadInput, match="by its matrix"):
        found(Batches(data), "work", damping=0.02)


def test_no_convergence_is_told_and_what_was_found_is_kept(tmp_path: Path) -> None:
    model, loss, data = problem("convolution")
    written(tmp_path / "store", model, loss, data)
    with pytest.warns(PackpropWarning, match="largest residual is"):
        found = refined(tmp_path / "store", model, loss, data, refine=Refinement(data, readings=2, width=1))
    assert found.residuals is not None
    assert float(found.residuals.max()) > 1e-3
    assert found.data_readings == 2
    assert "largest residual" in str(found)
    assert found.to_dict()["residuals"] == found.residuals.tolist()


def test_a_checkpoint_belongs_to_the_rows_of_a_store(tmp_path: Path) -> None:
    model, loss, data = problem("convolution")
    written(tmp_path / "store", model, loss, data)
    written(tmp_path / "other", model, loss, (data[0].flip(0), data[1]))
    refine = Refinement(data, checkpoint=tmp_path / "work", progress=False)
    refined(tmp_path / "store", model, loss, data, refine=refine)
    with pytest.raises(BadInput, match="store: rows"):
        refined(tmp_path / "other", model, loss, data, refine=refine)


def test_bad_input(tmp_path: Path) -> None:
    model, loss, data = problem("convolution")
    written(tmp_path / "store", model, loss, data)

    def found(**options: Any) -> packprop.Influence:
        return refined(tmp_path / "store", model, loss, data, **options)

    with pytest.raises(PackpropError, match="use the GGN"):
        found(refine=Refinement(data, "hessian"), damping=1e-5)
    with pytest.raises(BadInput, match="can be read once"):
        found(refine=iter([data]))
    with pytest.raises(BadInput, match="damping=None"):
        found(refine=data, damping=None)
    with pytest.raises(BadInput, match="readings=0"):
        found(refine=Refinement(data, readings=0))
    with pytest.raises(BadInput, match="tolerance=0"):
        found(refine=Refinement(data, tolerance=0))
    wrong: Any = "fisher"
    with pytest.raises(BadInput, match="no such matrix"):
        found(refine=Refinement(data, wrong))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(BadInput, match="other files: file"):
        found(refine=Refinement(data, checkpoint=tmp_path / "other"))


@pytest.mark.parametrize("refine", [False, True])
def test_queries_without_gradient(tmp_path: Path, refine: bool) -> None:
    torch.manual_seed(0)
    model, loss = convolution().double(), nn.CrossEntropyLoss(ignore_index=2)
    data = classes(1, 4, 4)
    written(tmp_path / "store", model, loss, data)
    options: dict[str, Any] = {"damping": DAMPING, "refine": Refinement(data, progress=False)} if refine else {}
    x = data[0][:3]
    with pytest.warns(PackpropWarning, match="for queries 1, the gradient of their loss is zero"):
        found = packprop.influence(tmp_path / "store", model, loss, (x, torch.tensor([0, 2, 1])), **options)
    assert not found.largest.products[1].any()
    assert found.largest.products[0].any()
    with pytest.raises(BadInput, match="all queries"):
        packprop.influence(tmp_path / "store", model, loss, (x, torch.tensor([2, 2, 2])), **options)
