"""What `influence` holds, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop.engine.memory import LiveBytes
from packprop.extensions import KFLR, BatchGrad, Projected
from tests.queries.small import LOSS, QUERIES, SIZE, by_row, influence, written
from tests.references.running import assert_near
from tests.selection import often, thorough

SAMPLES, WIDTH = 300, 40


@thorough
@often(lambda dtype, projected, curvature: dtype == torch.float32 and projected == curvature)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("curvature", [False, True])
def test_a_budget_is_kept(tmp_path: Path, dtype: Any, projected: bool, curvature: bool) -> None:
    """What it takes beside model, data and curvature; and products are the same under any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    x, y = torch.randn(SAMPLES, WIDTH), torch.randint(3, (SAMPLES,))
    asked = Projected(BatchGrad(), 400, kind="kronecker") if projected else BatchGrad()
    with packprop.StoreWriter(tmp_path / "store", model, [asked], dtype=dtype) as writer:
        packprop.compute(model, LOSS, (x, y), [asked], store=writer, progress=False)
    blocks = packprop.compute(model, LOSS, (x, y), [KFLR()], progress=False)["kflr"]
    options: dict[str, Any] = dict(curvature=blocks, damping=0.1) if curvature else {}
    queries = x[:100], y[:100]

    def found(**more: Any) -> packprop.Influence:
        return packprop.influence(tmp_path / "store", model, LOSS, queries, k=3, **options, **more)

    budget, whole = 600_000, found()
    found(memory=budget)  # what is made once is there
    live = LiveBytes()
    with live:
        within = found(memory=budget)
    inverses = sum(t.numel() for block in blocks.values() for t in block) * 8 if curvature else 0
    answers = 2 * 3 * 100 * 24
    assert whole.readings == 1 < within.readings
    assert live.peak <= budget + 2 * inverses + answers
    assert_near(within.largest.products, whole.largest.products, "products", 1e-4)
    assert torch.equal(within.smallest.rows, whole.smallest.rows)


def test_budgets_that_are_too_small(tmp_path: Path) -> None:
    problem, _ = written(tmp_path / "store")
    with pytest.raises(packprop.BadInput, match=r"gradient of one query(.|\n)*more than its part"):
        influence(tmp_path / "store", problem, memory="3KB")
    with pytest.raises(packprop.BadInput, match="a row of the store"):
        influence(tmp_path / "store", problem, memory=100)
    model, x, y = problem
    with pytest.raises(packprop.BadInput, match=r"a batch of 9 queries(.|\n)*batches of at most 2"):
        packprop.influence(tmp_path / "store", model, LOSS, [(x, y)], memory="10KB")
    with pytest.raises(packprop.BadInput, match="no positive number of bytes"):
        influence(tmp_path / "store", problem, memory="much")
    small = influence(tmp_path / "store", problem, memory="10KB", k=SIZE)
    assert small.readings == 2
    assert influence(tmp_path / "store", problem, memory=None).readings == 1
    assert_near(by_row(small), by_row(influence(tmp_path / "store", problem, k=SIZE)), "products")


def state(model: nn.Module) -> list[Any]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]
    return [
        hooks,
        [(p.grad, sorted(vars(p))) for p in model.parameters()],
        [m.training for m in model.modules()],
    ]


def test_nothing_of_the_users_is_changed(tmp_path: Path) -> None:
    problem, result = written(tmp_path / "store", KFLR())
    kept = [block.clone() for blocks in result["kflr"].values() for block in blocks]
    gradient = problem[0][3].bias.grad = torch.ones(3).double()
    before, draws = state(problem[0]), torch.get_rng_state()
    influence(tmp_path / "store", problem, curvature=result, damping=0.1)
    assert state(problem[0]) == before
    assert problem[0][3].bias.grad is gradient
    assert gradient.tolist() == [1, 1, 1]
    assert torch.equal(torch.get_rng_state(), draws)
    now = [block for blocks in result["kflr"].values() for block in blocks]
    assert all(map(torch.equal, kept, now))


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": LOSS(self.inner(x), labels)}


def test_forms_of_queries(tmp_path: Path) -> None:
    problem, _ = written(tmp_path / "store")
    model, x, y = problem
    expected = by_row(influence(tmp_path / "store", problem, k=SIZE))
    data = torch.utils.data.TensorDataset(x[QUERIES], y[QUERIES])
    batches = [(x[2:3], y[2:3]), (x[:0], y[:0]), (x[3:5], y[3:5])]
    for queries in (data, torch.utils.data.DataLoader(data, 2), batches):
        found = packprop.influence(tmp_path / "store", model, LOSS, queries, k=SIZE)
        assert_near(by_row(found), expected, "products")
    one_by_one = packprop.influence(packprop.Store(tmp_path / "store"), model, LOSS, data, k=SIZE, batch_size=1)
    assert_near(by_row(one_by_one), expected, "products")
    whole, named = WithLoss(model), {"x": x, "labels": y}
    packprop.compute(whole, None, [named], [BatchGrad()], store=tmp_path / "whole", progress=False)
    some = {name: value[QUERIES] for name, value in named.items()}
    found = packprop.influence(tmp_path / "whole", whole, None, [some], k=SIZE)
    assert_near(by_row(found), expected, "products")


class Branches(nn.Module):
    """Which layer is used depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(2, 2).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.left if x[0, 0] > 0 else self.right)(x)
        return out


def test_parameters_that_are_not_used(tmp_path: Path) -> None:
    """Neither by the samples of the store, nor by a batch of queries."""
    torch.manual_seed(0)
    model, x, y = Branches(), torch.randn(6, 2).double(), torch.randint(2, (6,))
    x[:, 0] = torch.tensor([1, 1, 1, -1, -1, -1]).double()
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    packprop.compute(model, LOSS, batches, [BatchGrad()], store=tmp_path / "store", progress=False)
    products = by_row(packprop.influence(tmp_path / "store", model, LOSS, batches, k=6))
    assert products[:3, 3:].count_nonzero() == products[3:, :3].count_nonzero() == 0
    assert (products.diagonal() > 0).all()
    packprop.compute(model, LOSS, batches[:1], [BatchGrad()], store=tmp_path / "left", progress=False)
    with pytest.warns(packprop.PackpropWarning, match="for queries 3, 4, 5"):
        products = by_row(packprop.influence(tmp_path / "left", model, LOSS, batches, k=6))
    assert (products.shape, products[3:].count_nonzero()) == ((6, 3), 0)
