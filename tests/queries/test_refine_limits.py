"""Refined queries of unusual parameters, matrices, data and precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import Refinement
from packprop.errors import BadInput
from packprop.extensions import KFLR
from tests.dataset.matrices import classes, dense
from tests.queries.small import by_row
from tests.queries.test_refine import DAMPING, LOSS, QUERIES, gradients, refined, written
from tests.references.running import assert_near


class Scaled(nn.Module):
    """A model with a parameter of no axes, and one of no entries."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.none = (
            nn.Linear(3, 2),
            nn.Parameter(torch.tensor(2.0)),
            nn.Parameter(torch.empty(0, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x) + self.none.sum(0)


def test_parameters_without_axes_or_entries(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Scaled().double(), (torch.randn(7, 3).double(), torch.randint(2, (7,)))
    written(tmp_path / "store", model, LOSS, data)
    rows = gradients(model, LOSS, data)
    assert_near(packprop.self_influence(tmp_path / "store"), rows.square().sum(1), "squared norms", 1e-9)
    inverse = torch.linalg.inv(dense("ggn", model, LOSS, data) + DAMPING * torch.eye(9).double())
    refine = Refinement(data, tolerance=1e-10, readings=50, progress=False)
    found = by_row(refined(tmp_path / "store", model, LOSS, data, refine=refine))
    assert_near(found, rows[QUERIES] @ inverse @ rows.mT, "products", 1e-6)


class Sides(nn.Module):
    """A model that uses a layer only for positive inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.positive, self.last = nn.Linear(1, 2), nn.Linear(1, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.always(x)
        if (x > 0).any():
            hidden = hidden + self.positive(x) * (x > 0)
        return self.last(hidden.tanh())  # type: ignore[no-any-return]  # a tensor


@pytest.mark.parametrize("preconditioned", [False, True])
def test_parameters_that_no_stored_sample_depends_on(tmp_path: Path, preconditioned: bool) -> None:
    torch.manual_seed(0)
    model, data = Sides().double(), (torch.linspace(-1, 1, 8).double()[:, None], torch.randint(2, (8,)))
    stored = data[0][:4], data[1][:4]
    result = written(tmp_path / "store", model, LOSS, stored, KFLR())
    assert not any("positive" in name for name in packprop.Store(tmp_path / "store")["grad_batch"])
    rows = gradients(model, LOSS, data)
    inverse = torch.linalg.inv(dense("ggn", model, LOSS, data) + DAMPING * torch.eye(rows.shape[1]).double())
    options: dict[str, Any] = {"curvature": result["kflr"]} if preconditioned else {}
    refine = Refinement(data, tolerance=1e-10, readings=50, progress=False)
    queries = data[0][4:], data[1][4:]
    found = packprop.influence(
        tmp_path / "store", model, LOSS, queries, refine=refine, damping=DAMPING, k=4, **options
    )
    assert_near(by_row(found), rows[4:] @ inverse @ rows[:4].mT, "products", 1e-6)


def test_autocast_is_left_beside_the_passes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), classes(4)
    data = data[0].float(), data[1]
    written(tmp_path / "store", model, LOSS, data)
    with torch.autocast("cpu", torch.bfloat16):
        found = refined(tmp_path / "store", model, LOSS, data, refine=Refinement(data, progress=False))
    assert found.residuals is not None
    assert float(found.residuals.max()) <= 1e-3
    queries = {name: torch.randn(2, *each.shape) for name, each in model.named_parameters()}
    store = packprop.Store(tmp_path / "store")
    expected = store.top("grad_batch", queries, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(store.top("grad_batch", queries, 3).products, expected.products)


def test_data_without_terms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3).double(), classes(4)
    written(tmp_path / "store", model, LOSS, data)
    ignored = data[0], torch.full_like(data[1], -100)
    with pytest.raises(BadInput, match="a mean over no terms"):
        refined(tmp_path / "store", model, LOSS, data, refine=Refinement(ignored, progress=False))


def test_a_singular_matrix_is_not_indefinite_by_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    data = torch.randn(20, 4), torch.randint(3, (20,))
    written(tmp_path / "store", model, LOSS, data)
    refine = Refinement(data, tolerance=0.01, readings=40, progress=False)
    found = refined(tmp_path / "store", model, LOSS, data, refine=refine, damping=1e-9)
    assert found.residuals is not None
    assert float(found.residuals.max()) <= 0.01
