"""EKFAC joins the blocks of a weight and of its bias in influence: against dense matrices of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import Refinement
from packprop.errors import BadInput
from packprop.extensions import EKFAC, BatchGrad, Projected
from tests.queries.small import QUERIES, SIZE, apart, by_row, ggn_blocks, gradients, influence, written
from tests.references.running import assert_near

DAMPING = 1e-2


def inputs_of(problem: Any) -> dict[str, Tensor]:
    """The inputs of both layers at all positions ``[n s, i]``, of a forward pass that knows no packprop."""
    model, x, _ = problem
    patches = F.unfold(x, 2).mT.flatten(0, 1)
    return {"0.": patches, "3.": model[:3](x).detach()}


def joined(problem: Any, result: Any, exact: bool = True) -> dict[str, Tensor]:
    """The dense matrix of each layer, over the entries of its weight, then of its bias."""
    found, blocks = {}, ggn_blocks(problem)
    for layer, inputs in inputs_of(problem).items():
        block = result["ekfac"][f"{layer}weight"]
        left, right = block.vectors
        along = inputs @ right
        shares = along.sum(0) / (along.square().sum(0) * len(inputs)).sqrt()
        bias = result["ekfac"][f"{layer}bias"]
        of_bias = blocks[f"{layer}bias"] if exact else packprop.kronecker.dense(bias)
        own = (left.mT @ of_bias @ left).diagonal()
        between = torch.zeros(*block.values.shape, len(own)).double()
        for o in range(len(own)):
            between[o, :, o] = shares * (block.values[o] * own[o]).clamp(min=0).sqrt()
        between = between.flatten(0, 1)
        middle = torch.cat(
            [
                torch.cat([block.values.flatten().diag(), between], 1),
                torch.cat([between.mT, own.diag()], 1),
            ]
        )
        basis = torch.block_diag(torch.kron(left, right), left)
        found[layer] = basis @ middle @ basis.mT
    return found


def expected(problem: Any, matrices: dict[str, Tensor]) -> Tensor:
    """``<g_z, (F + damping I)^-1 g_q>`` of all samples with each other."""
    flat, total = gradients(problem), torch.zeros(SIZE, SIZE).double()
    for layer, matrix in matrices.items():
        rows = torch.cat([flat[f"{layer}weight"], flat[f"{layer}bias"]], 1)
        total += rows @ torch.linalg.solve(matrix + DAMPING * torch.eye(len(matrix)).double(), rows.mT)
    return total


def test_both_have_one_inverse(tmp_path: Path) -> None:
    problem, result = written(tmp_path / "store", EKFAC(fisher="exact"))
    products = expected(problem, joined(problem, result))
    options: dict[str, Any] = {"curvature": result, "damping": DAMPING}
    found = influence(tmp_path / "store", problem, k=SIZE, **options)
    assert_near(by_row(found), products[QUERIES], "products", 1e-6)
    alone = packprop.self_influence(tmp_path / "store", **options)
    assert_near(alone, products.diagonal(), "of samples with themselves", 1e-6)
    options["curvature"] = apart(result["ekfac"])
    other = influence(tmp_path / "store", problem, k=SIZE, **options)
    assert not torch.allclose(by_row(other), products[QUERIES], rtol=1e-2)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
def test_the_matrix_is_positive(tmp_path: Path, fisher: Any) -> None:
    problem, result = written(tmp_path / "store", EKFAC(fisher=fisher))
    for layer, matrix in joined(problem, result, exact=False).items():
        values = torch.linalg.eigvalsh(matrix)
        assert float(values[0]) > -1e-12 * float(values[-1]), layer


def regression() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    data = 1 + torch.randn(SIZE, 4).double(), torch.randn(SIZE, 3).double()
    return nn.Linear(4, 3).double(), nn.MSELoss(), data


@pytest.mark.parametrize(
    "stored", [BatchGrad(), Projected(BatchGrad(), 30, seed=1)], ids=lambda each: each.name
)
def test_linear_regression_is_exact(tmp_path: Path, stored: Any) -> None:
    """Cotangents do not depend on inputs there: the matrix is the GGN itself, and refining changes nothing."""
    model, loss, data = regression()
    asked = [stored, EKFAC(fisher="exact")]
    result = packprop.compute(model, loss, data, asked, store=tmp_path / "store", progress=False)
    options: dict[str, Any] = {"k": SIZE, "damping": DAMPING, "curvature": result}
    found = packprop.influence(tmp_path / "store", model, loss, data, **options)
    refine = Refinement(data, tolerance=1e-10, width=1, progress=False)
    refined = packprop.influence(tmp_path / "store", model, loss, data, refine=refine, **options)
    assert_near(by_row(found), by_row(refined), "products", 1e-8)
    assert refined.data_readings == 1


class Sometimes(nn.Module):
    """Adds its bias or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adds = nn.Linear(4, 3), True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias if self.adds else None)


def test_queries_may_leave_the_bias_out(tmp_path: Path) -> None:
    """Their gradient is zero there, their product with the inverse is not."""
    _, loss, data = regression()
    model = Sometimes().double()
    asked = [BatchGrad(), EKFAC(fisher="exact")]
    result = packprop.compute(model, loss, data, asked, store=tmp_path / "store", progress=False)
    rows = {name: each.torch() for name, each in packprop.Store(tmp_path / "store")["grad_batch"].items()}
    model.adds = False
    found = packprop.influence(tmp_path / "store", model, loss, data, k=SIZE, damping=DAMPING, curvature=result)
    wide = torch.cat([data[0], torch.ones(SIZE, 1).double()], 1)
    moment = 2 / 3 * wide.mT @ wide / SIZE + DAMPING * torch.eye(5).double()
    stored = torch.cat([rows["linear.weight"], rows["linear.bias"][..., None]], 2)
    slopes = 2 * (data[0] @ model.linear.weight.mT - data[1]).detach()
    asking = slopes[:, :, None] * torch.cat([data[0], torch.zeros(SIZE, 1).double()], 1)[:, None]
    solved = asking @ torch.linalg.inv(moment)
    assert_near(by_row(found), torch.einsum("qoi,noi->qn", solved, stored), "products", 1e-8)


def test_inputs_that_are_all_equal_need_damping(tmp_path: Path) -> None:
    """Weight and bias cannot be told apart then: the matrix of both is singular, those of each are not."""
    torch.manual_seed(0)
    model, loss = nn.Linear(1, 2).double(), nn.MSELoss()
    data = torch.ones(4, 1).double(), torch.randn(4, 2).double()
    asked = [BatchGrad(), EKFAC(fisher="exact")]
    result = packprop.compute(model, loss, data, asked, store=tmp_path / "store", progress=False)
    with pytest.raises(BadInput, match=r"(?s)'weight' and 'bias'.*not positive beyond rounding"):
        packprop.influence(tmp_path / "store", model, loss, data, damping=0, curvature=result)
    packprop.influence(tmp_path / "store", model, loss, data, damping=0.1, curvature=result)
