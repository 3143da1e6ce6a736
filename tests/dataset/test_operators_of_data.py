"""Operators over a data set against the dense matrix of one batch that holds all samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import packprop
from packprop import extensions, operators
from packprop.engine.memory import LiveBytes
from packprop.errors import BadInput, PackpropError, PackpropWarning
from tests.dataset.matrices import PROBLEMS, classes, convolution, dense, problem
from tests.references.running import assert_near
from tests.selection import one_in, thorough


def whole(operator: operators.Operator) -> Tensor:
    return operator @ torch.eye(operator.shape[0], dtype=operator.dtype)


@one_in(5)
@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_products_are_those_of_the_dense_matrix(name: str, matrix: Any) -> None:
    model, loss, data = problem(name)
    expected = dense(matrix, model, loss, data)
    operator = operators.of_data(model, loss, data, matrix, batch_size=4, progress=False)
    assert_near(whole(operator), expected, "matrix", 1e-9)
    vector = torch.randn(len(expected), dtype=torch.float64)
    assert_near(operator @ vector, expected @ vector, "product", 1e-9)
    assert_near(torch.tensor(operator.to_scipy() @ vector.numpy()), expected @ vector, "array", 1e-9)
    assert operator.readings == 3
    assert not any(packprop.engine.recording.switch.is_extended(module) for module in model.modules())


@thorough
@pytest.mark.parametrize("name", ["weights", "experts"])
def test_functions_of_products(name: str) -> None:
    """Traces, eigenvalues, densities and damped solutions; tests/curvature has more of them."""
    model, loss, data = problem(name)
    expected = dense("ggn", model, loss, data)
    operator = operators.of_data(model, loss, data, damping=0.05, batch_size=4, progress=False)
    damped = expected + 0.05 * torch.eye(len(expected), dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    found = operators.trace(operator, draws=400, generator=draw)
    assert abs(found.value - float(damped.trace())) < 4 * found.standard_error
    assert operator.readings == 1
    largest = operators.eigenvalues(operator, 2, tolerance=1e-3, generator=draw)
    assert_near(largest.values, torch.linalg.eigvalsh(damped).flip(0)[:2], "eigenvalues", 1e-3)
    density = operators.spectral_density(operator, steps=5, draws=3, generator=draw)
    mean = (density.points * density.weights).sum(1).mean()
    assert abs(float(mean) * len(damped) - float(damped.trace())) < 0.5 * float(damped.trace())
    right = torch.randn(len(damped), 3, dtype=torch.float64)
    solution = operators.solve(operator, right, tolerance=1e-9)
    assert_near(solution.solutions, torch.linalg.solve(damped, right), "solutions", 1e-6)


class Noisy(TensorDataset):
    """Draws from Python's and numpy's generators."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.random() + np.random.rand(), y  # noqa: NPY002  # as users do


def states(own: torch.Generator) -> list[Any]:
    _, numbers, place, *_ = np.random.get_state()  # noqa: NPY002  # it belongs to users
    return [torch.get_rng_state().tolist(), own.get_state().tolist(), random.getstate(), [*numbers], place]


def test_readings_draw_alike() -> None:
    """Dropout, a shuffled loader, and the generators of Python and numpy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double().train()
    own = torch.Generator().manual_seed(0)
    for generator in (None, own):
        loader = DataLoader(Noisy(*classes(4)), batch_size=3, shuffle=True, generator=generator)
        operator = operators.of_data(model, nn.CrossEntropyLoss(), loader, progress=False)
        vector = torch.randn(operator.shape[0], dtype=torch.float64)
        first = operator @ vector
        for _ in range(2):
            torch.randn(5)
            torch.randn(5, generator=own)
            before = states(own)
            assert torch.equal(operator @ vector, first)
            assert states(own) == before, "what the user draws is not changed"
            random.random()
            np.random.rand()  # noqa: NPY002  # as users do
        assert_near(whole(operator), whole(operator).mT, "symmetric", 1e-12)


def test_a_model_with_a_generator_draws_alike() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(x.shape, generator=self.source, dtype=x.dtype) < 0.5
            return super().forward(x * mask)

    model = Masked(4, 3).double()
    model.source = torch.Generator().manual_seed(0)
    operator = operators.of_data(model, nn.CrossEntropyLoss(), classes(4), progress=False)
    before = model.source.get_state()
    assert_near(whole(operator), whole(operator), "readings", 1e-12)
    assert torch.equal(model.source.get_state(), before)


def test_products_through_attention_in_a_checkpoint() -> None:
    """The kernel that is differentiated twice is in force again when the checkpoint calls its functions."""
    torch.manual_seed(0)
    weight, head = nn.Linear(4, 4), nn.Linear(4, 3)

    def attended(x: Tensor) -> Tensor:
        heads = weight(x).unflatten(-1, (2, 2)).transpose(-2, -3)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(-2, -3).flatten(-2)

    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.weight, self.head, self.checkpointed = weight, head, checkpointed

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(attended, x, use_reentrant=False) if self.checkpointed else attended(x)
            out: Tensor = self.head(hidden.mean(1))
            return out

    data = torch.randn(6, 5, 4), torch.randint(3, (6,))
    plain, through = (
        packprop.operators.of_data(Model(each), nn.CrossEntropyLoss(), data, "ggn", batch_size=3)
        for each in (False, True)
    )
    vectors = torch.randn(plain.shape[0], 8)
    assert_near(through @ vectors, plain @ vectors, "products", tolerance=1e-4)


def test_buffers_are_put_back() -> None:
    """Every batch begins with the buffers of the first one, as in ``compute``, also if it is refused."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).double()
    model, data = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)).double().train(), classes(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    operator = operators.of_data(model, nn.CrossEntropyLoss(), data, batch_size=3, progress=False)
    vector = torch.randn(operator.shape[0], dtype=torch.float64)
    first = operator @ vector
    assert torch.equal(operator @ vector, first)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().train()
    operator = operators.of_data(mixing, nn.CrossEntropyLoss(), data, batch_size=3, progress=False)
    for _ in range(2):
        with pytest.raises(PackpropError, match="BatchNorm1d"):
            operator @ torch.ones(operator.shape[0], dtype=torch.float64)
    assert not mixing[1].running_mean.any()


class Observed(nn.Module):
    """Divides by the largest entry so far, as an observer of a quantised model does."""

    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("most", torch.tensor(2.0).double())

    def forward(self, x: Tensor) -> Tensor:
        self.most.copy_(torch.maximum(self.most, x.detach().abs().max()))
        out: Tensor = self.layer(x / self.most)
        return out


def test_buffers_that_a_later_batch_changes_are_put_back() -> None:
    torch.manual_seed(0)
    model, loss, (x, y) = Observed(), nn.CrossEntropyLoss(), classes(4)
    x = (x / x.abs().max()).index_fill(0, torch.tensor([8]), 5.0)
    asked = extensions.SumGradSquared()
    found = [
        packprop.compute(model, loss, [(x[at], y[at]) for at in places], asked, progress=False)
        for places in ([slice(0, 4), slice(4, 7), slice(7, 10)], [slice(7, 10), slice(0, 4), slice(4, 7)])
    ]
    assert float(model.most) == 2.0
    assert found[0].loss == pytest.approx(found[1].loss)
    for name, value in found[0]["sum_grad_squared"].items():
        assert_near(value, found[1]["sum_grad_squared"][name], name)
    operator = operators.of_data(model, loss, (x, y), batch_size=4, progress=False)
    vector = torch.randn(operator.shape[0], dtype=torch.float64)
    assert torch.equal(operator @ vector, operator @ vector)
    assert float(model.most) == 2.0


@pytest.mark.parametrize("change", ["other storage", "in the forward pass"])
def test_changes_of_parameters_are_seen_after_a_product(change: str) -> None:
    """Buffers alone are put back; a product with other parameters is one of another matrix."""

    class Shrinking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x.detach())
            if change == "in the forward pass":
                self.extra.detach().mul_(0.5)
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Shrinking(4, 3)).double()
    model[0].register_parameter("extra", nn.Parameter(torch.ones(2).double()))
    operator = operators.of_data(
        model, nn.CrossEntropyLoss(), classes(4), progress=False, parameters=[model[0].weight]
    )
    vector = torch.ones(operator.shape[0], dtype=torch.float64)
    operator @ vector
    if change == "other storage":
        model[0].weight.data = model[0].weight.data * 2
    with pytest.raises(PackpropError, match="changed in place"):
        operator @ vector


def test_a_loss_of_the_model_itself_and_some_parameters() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolution().double()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.inner(x), labels)}

    torch.manual_seed(0)
    model = WithLoss()
    x, y = classes(1, 4, 4)
    batches = [{"x": x[:6], "labels": y[:6]}, {"x": x[6:], "labels": y[6:]}]
    chosen = [model.inner.get_submodule("3").weight]
    operator = operators.of_data(model, None, batches, parameters=chosen, progress=False)
    expected = dense("ggn", model.inner, nn.CrossEntropyLoss(), (x, y))[10:64, 10:64]
    assert_near(whole(operator), expected, "block", 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    model, loss, data = problem("convolution")
    expected = dense("ggn", model, loss, data)
    low = model.to(dtype)
    operator = operators.of_data(low, loss, (data[0].to(dtype), data[1]), batch_size=4, progress=False)
    assert operator.dtype == torch.float32
    assert_near(whole(operator).double(), expected, "matrix", 1e-5 if dtype == torch.float32 else 0.1)


def test_a_budget_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 4))
    data = torch.randn(100, 30), torch.randint(4, (100,))
    vectors = torch.randn(sum(p.numel() for p in model.parameters()), 40)
    expected = operators.of_data(model, nn.CrossEntropyLoss(), data, progress=False) @ vectors
    budget = 2_500_000
    operator = operators.of_data(
        model, nn.CrossEntropyLoss(), data, batch_size=50, memory=budget, progress=False
    )
    parts = vectors.split([p.numel() for p in model.parameters()])
    pieces = [part.mT.reshape(40, *p.shape) for part, p in zip(parts, model.parameters(), strict=True)]
    live = LiveBytes()
    live.own([*model.parameters(), *pieces], "")
    with live:
        found = operator.product(pieces)
    assert_near(torch.cat([each.flatten(1) for each in found], 1).mT, expected, "products", 1e-4)
    assert live.peak <= budget
    with pytest.raises(BadInput, match="give at least"):
        operators.of_data(model, nn.CrossEntropyLoss(), data, memory=500_000, progress=False) @ vectors


def test_no_convergence_and_indefinite_matrices_are_told() -> None:
    model, loss, data = problem("convolution")
    operator = operators.of_data(model, loss, data, damping=1e-4, batch_size=4, progress=False)
    right = torch.randn(operator.shape[0], dtype=torch.float64)
    with pytest.warns(PackpropWarning, match="largest residual is"):
        found = operators.solve(operator, right, steps=2)
    assert found.steps == 2
    assert float(found.residuals[0]) > 1e-6
    hessian = operators.of_data(model, loss, data, "hessian", batch_size=4, progress=False)
    with pytest.raises(PackpropError, match=r"use the GGN.* above minus the least eigenvalue is enough"):
        operators.solve(hessian, right)
    least = float(operators.eigenvalues(hessian, which="smallest").values[0])
    assert least < 0
    damped = operators.of_data(
        model, loss, data, "hessian", damping=-1.01 * least, batch_size=4, progress=False
    )
    assert float(operators.solve(damped, right, tolerance=1e-3, steps=500).residuals.max()) <= 1e-3


class OnceOnly(IterableDataset[Any]):
    """Batches, as they come."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()


def test_bad_input() -> None:
    model, loss, data = problem("convolution")
    first = next(model.parameters())
    wrong: Any = "fisher"
    with pytest.raises(BadInput, match="can be read once"):
        operators.of_data(model, loss, iter([data]))
    with pytest.raises(BadInput, match="no such matrix"):
        operators.of_data(model, loss, data, wrong)
    with pytest.raises(BadInput, match="counted twice"):
        operators.of_data(model, loss, data, parameters=[first, first])
    with pytest.raises(BadInput, match="that is not in the model"):
        operators.of_data(model, loss, data, parameters=[nn.Parameter(torch.ones(2))])
    with pytest.raises(BadInput, match="a parameter with requires_grad=False"):
        operators.of_data(model, loss, data, parameters=[first.requires_grad_(False)])
    first.requires_grad_()
    with pytest.raises(BadInput, match="would have no rows"):
        operators.of_data(model, loss, data, parameters=[])
    operator = operators.of_data(model, loss, data, progress=False)
    with pytest.raises(BadInput, match="the operator has"):
        operators.solve(operator, torch.ones(3))
    with pytest.raises(BadInput, match="not finite"):
        operators.solve(operator, torch.full((operator.shape[0],), torch.nan))
    with pytest.raises(BadInput, match="tolerance"):
        operators.solve(operator, torch.ones(operator.shape[0]), tolerance=0)
    with pytest.raises(BadInput, match="draws=0"):
        operators.trace(operator, 0)
    with pytest.raises(BadInput, match="which='fisher'"):
        operators.eigenvalues(operator, which=wrong)
    with pytest.raises(BadInput, match="width=0"):
        operators.spectral_density(operator, 2, 1).at(torch.zeros(1), 0)
    with torch.no_grad():
        first.mul_(2)
    with pytest.raises(PackpropError, match="changed in place"):
        operator @ torch.ones(operator.shape[0])
    mixing = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().train()
    with pytest.raises(PackpropError, match="BatchNorm"):
        operators.of_data(mixing, nn.CrossEntropyLoss(), classes(4), progress=False) @ torch.ones(43)
