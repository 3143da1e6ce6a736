"""Products with the GGN of data by rows of its root, where they pay, equal those by differentiating twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packprop import operators
from packprop.applications.dataset import products
from packprop.engine.curvature import Product
from packprop.errors import PackpropError
from tests.dataset.matrices import dense
from tests.references.running import assert_near


class Routes:
    """Puts itself in the place of ``row_product``, and notes for each batch whether there are rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int | None = None) -> None:
        self.taken: list[bool] = []
        self._make, self._room = products.row_product, room
        monkeypatch.setattr(products, "row_product", self)

    def __call__(self, graph: Any, parameters: Any, count: int, room: int) -> Product | None:
        product = self._make(graph, parameters, count, self._room or room)
        self.taken.append(product is not None)
        return product


def convolutions() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, 3, stride=2),
        nn.Flatten(),
        nn.Linear(18, 3),
    )
    data = torch.randn(10, 1, 8, 8).double(), torch.randint(3, (10,))
    return nn.Sequential(*layers).double(), data


def matrix_of(model: nn.Module, data: Any, count: int | None = None, **options: Any) -> Tensor:
    operator = operators.of_data(model, nn.CrossEntropyLoss(), data, batch_size=4, progress=False, **options)
    vectors = torch.eye(operator.shape[0], dtype=operator.dtype)
    return operator @ vectors[:, :count]


def test_many_vectors_of_convolutions_go_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = convolutions()
    expected = dense("ggn", model, nn.CrossEntropyLoss(), data)
    routes = Routes(monkeypatch)
    assert_near(matrix_of(model, data), expected, "by rows", 1e-9)
    assert routes.taken == [True, True, True]
    assert_near(matrix_of(model, data, 1), expected[:, :1], "of one vector", 1e-9)
    assert routes.taken[3:] == [False, False, False]
    assert_near(matrix_of(model, data, memory="1GiB"), expected, "within a budget", 1e-9)
    assert len(routes.taken) == 6  # a budget counts bytes of what it knows: no rows


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_rows_keep_within_their_room(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """One or two of three columns at once; or no rows, if those of one column do not fit."""
    model, data = convolutions()
    expected = dense("ggn", model, nn.CrossEntropyLoss(), data)
    entries = sum(parameter.numel() for parameter in model.parameters())
    routes = Routes(monkeypatch, room=2 * 8 * 4 * entries * columns or 1)
    assert_near(matrix_of(model, data), expected, "matrix", 1e-9)
    assert routes.taken[0] is (columns > 0)


def test_some_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the chosen parameters; those that no batch reaches have zeros."""
    model, data = convolutions()
    model.beside = nn.Parameter(torch.ones(2, dtype=torch.float64))
    chosen = [model.beside, *model[0].parameters(), model[4].weight]
    routes = Routes(monkeypatch)
    rows = matrix_of(model, data, parameters=chosen)
    assert any(routes.taken)
    monkeypatch.setattr(products, "row_product", lambda *given: None)
    assert_near(rows, matrix_of(model, data, parameters=chosen), "matrix", 1e-9)
    assert not rows[:2].any()


def test_products_without_gradients_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rows fail, products differentiate twice."""
    model, data = convolutions()
    expected = dense("ggn", model, nn.CrossEntropyLoss(), data)

    def refused(*given: Any) -> Product:
        raise PackpropError("Rows were asked for.", "a function", "it has no gradients of samples", "none")

    monkeypatch.setattr(products, "row_product", refused)
    assert_near(matrix_of(model, data), expected, "matrix", 1e-9)


class Scaled(nn.Module):
    """A model with a parameter of no axes."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
        self.inner, self.scale = nn.Sequential(*layers), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)  # type: ignore[no-any-return]  # a tensor


def test_a_parameter_without_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = convolutions()[1]
    model, routes = Scaled().double(), Routes(monkeypatch)
    expected = dense("ggn", model, nn.CrossEntropyLoss(), data)
    assert_near(matrix_of(model, data), expected, "by rows", 1e-9)
    assert routes.taken == [True, True, True]


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = convolutions()
    model, data, routes = model.float(), (x.float(), y), Routes(monkeypatch)
    expected = matrix_of(model, data)
    with torch.autocast("cpu", torch.bfloat16):
        found = matrix_of(model, data)
    assert routes.taken == [True] * 6
    assert_near(found, expected, "by rows", 0.05)
