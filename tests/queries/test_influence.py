"""`influence`: products are those of the direct formula, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions, kronecker
from packprop.extensions import EKFAC, KFLR, BatchGrad, DiagGGNExact, DiagHessian, Projected
from tests.queries.small import LOSS, QUERIES, SIZE, apart, by_row, ggn_blocks, gradients, influence, written
from tests.references.running import assert_near
from tests.selection import one_in, thorough

DAMPING = 1e-2


def direct(flat: dict[str, Tensor], blocks: dict[str, Tensor], damping: float = DAMPING) -> Tensor:
    """``sum over parameters of <g_z, (F + damping I)^-1 g_q>``: ``[q, n]``."""
    total = torch.tensor(0.0).double()
    for name, rows in flat.items():
        matrix = blocks[name] + damping * torch.eye(rows.shape[1]).double()
        total = total + torch.linalg.solve(matrix, rows[QUERIES].mT).mT @ rows.mT
    return total


def test_plain_products(tmp_path: Path) -> None:
    problem, _ = written(tmp_path / "store")
    found = influence(tmp_path / "store", problem, k=SIZE)
    flat = torch.cat([*gradients(problem).values()], 1)
    assert_near(by_row(found), flat[QUERIES] @ flat.mT, "products")
    identifiers = packprop.Store(tmp_path / "store").identifiers
    assert identifiers.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 9]
    assert torch.equal(found.largest.identifiers, identifiers[found.largest.rows])
    assert (found.curvature, found.damping, found.samples) == (None, None, SIZE)
    assert (len(found), found.readings) == (3, 1)
    few = influence(tmp_path / "store", problem, k=2)
    assert torch.equal(few.largest.rows, found.largest.rows[:, :2])
    assert torch.equal(few.smallest.rows, found.smallest.rows[:, :2])


def dense_factors(value: Any) -> Tensor:
    return torch.kron(*value) if len(value) == 2 else value[0]


@one_in(2)
@pytest.mark.parametrize(
    ("extension", "dense"),
    [
        (KFLR(), dense_factors),
        (KFLR(approximation="expand"), dense_factors),
        (EKFAC(fisher="exact"), kronecker.dense),
        (DiagGGNExact(), lambda value: value.flatten().diag()),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_preconditioned_products(tmp_path: Path, extension: Any, dense: Callable[[Any], Tensor]) -> None:
    """The inverse of each block plus damping is that of the dense matrix."""
    problem, result = written(tmp_path / "store", extension)
    options: Any = {"k": SIZE, "curvature": apart(result[extension]), "damping": DAMPING}
    found = influence(tmp_path / "store", problem, **options)
    blocks = {name: dense(value) for name, value in result[extension].items()}
    assert_near(by_row(found), direct(gradients(problem), blocks), "products", 1e-9)
    whole = influence(tmp_path / "store", problem, **(options | {"curvature": result}))
    assert (whole.curvature, whole.damping) == (extension.savefield, DAMPING)


def test_products_with_the_curvature_of_a_loop(tmp_path: Path) -> None:
    """Diagonals and blocks of biases are exact: nothing of packprop is in the reference."""
    problem, result = written(tmp_path / "store", DiagGGNExact(), KFLR())
    flat, blocks = gradients(problem), ggn_blocks(problem)
    found = influence(tmp_path / "store", problem, k=SIZE, curvature=result["diag_ggn_exact"], damping=DAMPING)
    diagonals = {name: block.diag().diag() for name, block in blocks.items()}
    assert_near(by_row(found), direct(flat, diagonals), "with diagonals", 1e-9)
    biases = {name: block for name, block in result["kflr"].items() if name.endswith("bias")}
    weights = {name: torch.ones_like(p) for name, p in problem[0].named_parameters() if name.endswith("weight")}
    found = influence(tmp_path / "store", problem, k=SIZE, curvature={**biases, **weights}, damping=DAMPING)
    units = {name: torch.eye(value.numel()).double() for name, value in weights.items()}
    assert_near(by_row(found), direct(flat, {**blocks, **units}), "with blocks of biases", 1e-9)


def test_a_sum_is_a_mean_times_its_terms(tmp_path: Path) -> None:
    """Curvature has the scale of its loss: products with that of a sum are those of a mean, divided by N."""
    problem, _ = written(tmp_path / "store")
    model, x, y = problem
    total = packprop.compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), [KFLR()], progress=False)
    mean = packprop.compute(model, LOSS, (x, y), [KFLR()], progress=False)
    one = influence(tmp_path / "store", problem, k=SIZE, curvature=total, damping=SIZE * DAMPING)
    other = influence(tmp_path / "store", problem, k=SIZE, curvature=mean, damping=DAMPING)
    assert_near(one.largest.products * SIZE, other.largest.products, "products", 1e-9)


def test_factors_share_the_damping_if_asked(tmp_path: Path) -> None:
    problem, result = written(tmp_path / "store", KFLR())
    found = influence(tmp_path / "store", problem, k=SIZE, curvature=result, damping=DAMPING, factored=True)
    flat = gradients(problem)
    expected = torch.tensor(0.0).double()
    for name, rows in flat.items():
        inverse = dense_factors(kronecker.inverse(result["kflr"][name], DAMPING))  # type: ignore[arg-type]  # values are factors
        expected = expected + rows[QUERIES] @ inverse @ rows.mT
    assert_near(by_row(found), expected, "products", 1e-9)
    exact = influence(tmp_path / "store", problem, k=SIZE, curvature=result, damping=DAMPING)
    assert not torch.allclose(by_row(found), by_row(exact), rtol=1e-2)


@one_in(2)
@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "kronecker"])
@pytest.mark.parametrize("curvature", [None, "kflr"])
def test_queries_are_projected_after_preconditioning(tmp_path: Path, kind: Any, curvature: str | None) -> None:
    asked = Projected(BatchGrad(), 24, kind=kind, seed=3)
    problem, result = written(tmp_path / "store", KFLR(), stored=asked)
    options = {} if curvature is None else dict(curvature=result[curvature], damping=DAMPING)
    found = influence(tmp_path / "store", problem, k=SIZE, **options)
    stored, queries = torch.zeros(SIZE, 24).double(), torch.zeros(3, 24).double()
    for name, rows in gradients(problem).items():
        shape = problem[0].get_parameter(name).shape
        matrix = asked.matrix(name, shape, torch.float64).flatten(1)
        stored += rows @ matrix.mT
        wanted = rows[QUERIES]
        if curvature is not None:
            block = dense_factors(result[curvature][name])
            wanted = torch.linalg.solve(block + DAMPING * torch.eye(len(block)).double(), wanted.mT).mT
        queries += wanted @ matrix.mT
    assert_near(by_row(found), queries @ stored.mT, "products", 1e-9)
    assert found.quantity == "grad_batch_projected"


@thorough
def test_projected_products_are_right_in_expectation(tmp_path: Path) -> None:
    """The mean over seeds is within four standard errors of the products without projection."""
    problem, result = written(tmp_path / "whole", KFLR())
    options: Any = dict(k=SIZE, curvature=result, damping=DAMPING)
    exact = by_row(influence(tmp_path / "whole", problem, **options))
    model, x, y = problem
    seen = []
    for seed in range(24):
        folder = tmp_path / str(seed)
        asked = [Projected(BatchGrad(), 64, seed=seed)]
        packprop.compute(model, LOSS, (x, y), asked, store=folder, progress=False)
        seen.append(by_row(influence(folder, problem, **options)))
    products = torch.stack(seen)
    error = products.std(0) / len(seen) ** 0.5
    assert ((products.mean(0) - exact).abs() < 4 * error).all()
    assert (error < exact.abs().max() / 10).all()


class Orders(nn.Module):
    """Weights that keep the fan-in first, with as many rows as columns, so that no shape gives them away."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.up = nn.ConvTranspose1d(2, 2, 1, bias=False)
        self.grouped = nn.Conv1d(2, 4, 1, groups=2)

    def forward(self, index: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.table(index).reshape(-1, 2, 4)))
        out: Tensor = self.grouped(hidden)
        return out.flatten(1)


def test_factors_find_the_order_of_entries(tmp_path: Path) -> None:
    """A list of factors does not say where a parameter keeps its entries; an `Eigen` does."""
    torch.manual_seed(0)
    model, index, y = Orders().double(), torch.randint(8, (SIZE,)), torch.randint(16, (SIZE,))
    data = index, y
    asked = [BatchGrad(), KFLR(), EKFAC(fisher="exact")]
    result = packprop.compute(model, LOSS, data, asked, store=tmp_path / "store", progress=False)
    eigen = {}
    for name, corrected in result["ekfac"].items():
        assert isinstance(corrected, kronecker.Eigen)
        factors = result["kflr"][name]
        eigen[name] = kronecker.eigen(factors)._replace(order=corrected.order)  # type: ignore[arg-type]  # values are factors
    options: Any = dict(k=SIZE, damping=DAMPING)
    by_factors = packprop.influence(tmp_path / "store", model, LOSS, data, curvature=result["kflr"], **options)
    by_eigen = packprop.influence(tmp_path / "store", model, LOSS, data, curvature=eigen, **options)
    assert_near(by_row(by_factors), by_row(by_eigen), "products", 1e-9)
    flat, total = gradients((model, index, y)), torch.tensor(0.0).double()
    for name, rows in flat.items():
        factors = result["kflr"][name]
        if name in ("table.weight", "up.weight"):  # [i, o] in memory
            inputs = factors[1].diag() if factors[1].dim() == 1 else factors[1]
            block = torch.kron(inputs, factors[0])
        elif name == "grouped.weight":
            block = torch.kron(*factors)
        else:
            block = factors[0]
        solved = torch.linalg.solve(block + DAMPING * torch.eye(len(block)).double(), rows.mT).mT
        total = total + solved @ rows.mT
    assert_near(by_row(by_factors), total, "products", 1e-9)


def test_stores_of_half_precision(tmp_path: Path) -> None:
    problem, result = written(tmp_path / "store", KFLR(), dtype=torch.bfloat16)
    found = influence(tmp_path / "store", problem, k=SIZE, curvature=result, damping=DAMPING)
    blocks = {name: dense_factors(value) for name, value in result["kflr"].items()}
    expected = direct(gradients(problem), blocks)
    assert found.largest.products.dtype == torch.float32
    assert ((by_row(found) - expected).abs() < 1e-2 * expected.abs().max()).all()


def test_negative_curvature_needs_more_damping(tmp_path: Path) -> None:
    problem, result = written(tmp_path / "store", DiagHessian())
    least = min(float(value.min()) for value in result["diag_h"].values())  # type: ignore[union-attr]  # values are tensors
    assert least < 0
    with pytest.raises(packprop.BadInput, match="not positive") as caught:
        influence(tmp_path / "store", problem, curvature=result, damping=-least / 2)
    enough = float(caught.value.instead.split()[-1])
    found = influence(tmp_path / "store", problem, k=SIZE, curvature=result, damping=max(enough, -3 * least))
    blocks = {name: value.flatten().diag() for name, value in result["diag_h"].items()}  # type: ignore[union-attr]  # values are tensors
    assert_near(by_row(found), direct(gradients(problem), blocks, found.damping or 0), "products", 1e-9)


def test_each_store_keeps_its_own_gradients(tmp_path: Path) -> None:
    """Where a store has both kinds, the exact ones are taken unless others are asked for."""
    problem, _ = written(tmp_path / "unused")
    model, x, y = problem
    asked = [Projected(BatchGrad(), 8), BatchGrad(), extensions.BatchL2Grad()]
    packprop.compute(model, LOSS, (x, y), asked, store=tmp_path / "store", progress=False)
    assert influence(tmp_path / "store", problem).quantity == "grad_batch"
    assert influence(tmp_path / "store", problem, quantity="grad_batch_projected").quantity != "grad_batch"


class Tempered(nn.Module):
    """A model with a parameter that has no axes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(16, 3), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1)) * self.temperature
        return out


@pytest.mark.parametrize("extension", [None, DiagGGNExact(), KFLR(), EKFAC(fisher="exact")], ids=str)
def test_a_parameter_without_axes(tmp_path: Path, extension: Any) -> None:
    torch.manual_seed(0)
    model, x, y = Tempered().double(), torch.randn(SIZE, 1, 4, 4).double(), torch.randint(3, (SIZE,))
    more = [] if extension is None else [extension]
    asked, store = [BatchGrad(), *more], tmp_path / "store"
    result = packprop.compute(model, LOSS, (x, y), asked, store=store, progress=False)
    rows = packprop.Store(store)["grad_batch"]
    flat = {name: array.torch().reshape(SIZE, -1) for name, array in rows.items()}
    assert flat["temperature"].shape == (SIZE, 1)
    options = {} if extension is None else {"curvature": apart(result[extension]), "damping": DAMPING}
    found = influence(store, (model, x, y), k=SIZE, **options)
    if extension is None:
        expected = torch.cat([*flat.values()], 1)[QUERIES] @ torch.cat([*flat.values()], 1).mT
    else:
        values = result[extension]
        dense = {
            name: block if isinstance(block, Tensor) else kronecker.dense(block)
            for name, block in values.items()
        }
        sizes = {name: each.shape[1] for name, each in flat.items()}
        blocks = {
            name: block.flatten().diag() if isinstance(values[name], Tensor) else block.reshape(sizes[name], -1)
            for name, block in dense.items()
        }
        expected = direct(flat, blocks)
    assert_near(by_row(found), expected, "products", 1e-9)


def test_a_default_device_moves_no_groups(tmp_path: Path) -> None:
    """``torch.set_default_device`` belongs to the user's program."""
    (model, x, y), _ = written(tmp_path)
    groups = [row % 3 for row in range(SIZE)]
    expected = influence(tmp_path, (model, x, y), k=2, groups=groups)
    rows = packprop.Store(tmp_path).rows_of([3, 5])
    with torch.device("meta"):
        found = influence(tmp_path, (model, x, y), k=2, groups=groups)
        assert torch.equal(packprop.Store(tmp_path).rows_of([3, 5]), rows)
    assert found.groups is not None
    assert expected.groups is not None
    assert torch.equal(found.groups, expected.groups)
