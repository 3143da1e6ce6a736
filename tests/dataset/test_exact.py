"""Values of many samples: weights, empty batches, digits; and that nothing else is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import packprop
from packprop import BadInput, extensions
from packprop.applications.dataset.parts import Part
from packprop.applications.dataset.state import MergedResults
from packprop.engine.algebra.monoid import Moments
from packprop.types import Extension
from tests.dataset.small import EXACT, SIZE, compute, small
from tests.references.running import assert_all_near
from tests.selection import often, one_in, thorough


def test_empty_batches_count_for_nothing() -> None:
    """First, between others, and last; with nothing else there is no result."""
    model, (x, y) = small()
    asked = [make() for make in EXACT]
    expected = compute(model, nn.CrossEntropyLoss(), [(x, y)], *asked)
    empty = x[:0], y[:0]
    batches = [empty, (x[:3], y[:3]), empty, (x[3:], y[3:]), empty]
    found = compute(model, nn.CrossEntropyLoss(), batches, *asked)
    assert (found.samples, found.loss) == (SIZE, pytest.approx(expected.loss))
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)
    with pytest.raises(BadInput, match="the data hold no sample"):
        compute(model, nn.CrossEntropyLoss(), [empty, empty], *asked)


@one_in(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["classes", "mse", "bce"])
def test_weights_of_samples(kind: str, reduction: str) -> None:
    """A batch counts for as much as its samples weigh, not for as many as they are."""
    torch.manual_seed(0)
    model, (x, y) = small()
    weights = torch.rand(SIZE).double()

    def classes(f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(f, target, torch.tensor([0.1, 3.0]).double(), reduction=reduction)

    def squares(f: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        wanted, weight = target
        return F.mse_loss(f, wanted, reduction=reduction, weight=weight[:, None].expand_as(f))

    def binary(f: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        wanted, weight = target
        return F.binary_cross_entropy_with_logits(f, wanted, weight[:, None], reduction=reduction)

    loss = {"classes": classes, "mse": squares, "bce": binary}[kind]
    wanted: Any = y if kind == "classes" else (torch.rand(SIZE, 2).double(), weights)

    def batch(start: int, stop: int) -> Any:
        return x[start:stop], y[start:stop] if kind == "classes" else tuple(t[start:stop] for t in wanted)

    asked = [make() for make in EXACT]
    found = compute(model, loss, [batch(0, 2), batch(2, 3), batch(3, SIZE)], *asked)
    packprop.extend(model)
    with packprop.record():
        value = loss(model(x), wanted)
    with packprop.backpack(*asked):
        value.backward()
    assert found.loss == pytest.approx(value.item(), rel=1e-12)
    for extension in asked:
        expected = {name: getattr(p, extension.savefield) for name, p in model.named_parameters()}
        assert_all_near(found[extension], expected, extension.savefield)


def merged(extension: Extension, batches: Any) -> MergedResults:
    """What results of one parameter become after many batches, without the passes that make them."""
    results, part = MergedResults([extension]), Part(extension, range(1))
    for value, samples in batches:
        results.add("w", torch.float32, samples, 1.0, {part: [value]})
        results.samples += samples
    results.terms, results.loss, results.reduction = 1.0, 0.0, "sum"
    return results


@thorough
@often(lambda offset: offset == 1e4)
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_millions_of_samples_lose_no_digits(offset: float) -> None:
    """Four million samples in float32, whose mean is many times their deviation."""
    torch.manual_seed(0)
    count, size = 4000, 1000
    moments, squares = [], []
    first = second = torch.zeros(3, dtype=torch.float64)
    for _ in range(count):
        rows = (offset + torch.randn(size, 3)).double()
        mean = rows.mean(0)
        moments.append((Moments(size, mean.float(), (rows - mean).square().sum(0).float()), size))
        squares.append((rows.square().sum(0).float(), size))
        first, second = first + (rows - offset).sum(0), second + (rows - offset).square().sum(0)
    exact = second / (count * size) - (first / (count * size)).square()
    variance = merged(extensions.Variance(), moments).result()["variance"]["w"]
    assert isinstance(variance, Tensor)
    assert variance.dtype == torch.float32
    torch.testing.assert_close(variance.double(), exact, rtol=1e-5, atol=0.0)
    total = merged(extensions.SumGradSquared(), squares).result()["sum_grad_squared"]["w"]
    assert isinstance(total, Tensor)
    expected = second + 2 * offset * first + offset**2 * count * size
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0.0)


def test_the_variance_of_a_whole_run_in_single_precision() -> None:
    """200,000 samples in batches of 100; gradients of the bias are targets minus a constant."""
    torch.manual_seed(0)
    targets = 1000 + torch.randn(200_000, 1)
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    data, loss = (torch.ones_like(targets), targets), nn.MSELoss(reduction="sum")
    found = compute(model, loss, data, extensions.Variance(), batch_size=1000)
    exact = 4 * targets.double().var(0, correction=0)
    torch.testing.assert_close(found["variance"]["bias"].double(), exact, rtol=2e-6, atol=0.0)


class Shapes(TorchDispatchMode):
    """The shapes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made.append((str(function), out.shape))
        return out


@pytest.mark.parametrize("asked", [extensions.BatchL2Grad, extensions.KFLR])
def test_gradients_of_weights_are_not_computed(asked: Any) -> None:
    """Norms and factors need none: no product of the shape of a weight is made, as a plain pass makes it."""
    model = nn.Sequential(nn.Linear(31, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 2))
    x, y, shapes = torch.randn(20, 31), torch.randint(2, (20,)), Shapes()
    weights = {(37, 31), (29, 37)}
    with shapes:
        nn.CrossEntropyLoss()(model(x), y).backward()
    assert weights <= {tuple(shape) for name, shape in shapes.made if "mm" in name}
    shapes.made.clear()
    model.zero_grad(set_to_none=True)
    with shapes:
        compute(model, nn.CrossEntropyLoss(), (x, y), asked(), batch_size=10)
    products = {tuple(shape) for name, shape in shapes.made if "mm" in name or "linear" in name}
    assert len(products) > 2
    assert not weights & products
    assert all(parameter.grad is None for parameter in model.parameters())
