"""Samples that cannot be told apart, and losses that are no sum over them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.passes.nothing import knows_nothing
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.references.mixing import MIXING
from tests.references.refusals import batch, check, each_row, network, refused
from tests.references.running import FIRST_ORDER, ROWS, SECOND_ORDER, Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("layer", "word"),
    [
        pytest.param(lambda: nn.BatchNorm1d(4), "BatchNorm1d", id="batch-norm"),
        pytest.param(lambda: nn.BatchNorm1d(4, track_running_stats=False), "BatchNorm1d", id="no-statistics"),
    ],
)
def test_batch_norm_in_training_mode(row: Row, layer: Callable[[], nn.Module], word: str) -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), layer(), nn.Linear(4, 2)).train())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with pytest.raises(PackpropError) as caught, packprop.backpack(row()):
        loss.backward()
    check(caught.value, word, "'1'", "eval()")
    assert not any(hasattr(p, row.attribute) for p in model.parameters())


@pytest.mark.parametrize("mix", MIXING)
def test_samples_mixed_after_the_last_parameter(mix: Callable[[Tensor], Tensor]) -> None:
    """Four samples, four outputs: the axis of the outputs must not be taken for the samples'."""
    model = packprop.extend(Apply(lambda m, x: mix(torch.tanh(m.first(x))), first=nn.Linear(3, 4)))
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.randn(4, 4))
    check(refused(loss, extensions.BatchGrad(), model=model), "sample", "first")


@each_row
def test_the_error_says_what_was_asked_for(row: Row) -> None:
    """The extension's own name: someone who asks for Kronecker factors has not heard of single samples."""
    layers = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}
    model = packprop.extend(Apply(lambda m, x: m.b(MIXING[0].values[0](m.a(x))), **layers))
    x, y = batch()
    error = refused(packprop.extend(nn.CrossEntropyLoss())(model(x), y), row(), model=model)
    assert row().name in error.asked
    assert "single samples" in error.asked


def test_a_loss_of_one_row_has_one_sample() -> None:
    """The loss sees one sample where the model saw four."""
    model = packprop.extend(network())
    x, _ = batch()
    with packprop.backpack(packprop.extensions.BatchGrad()):
        packprop.extend(nn.CrossEntropyLoss())(model(x).mean(0, keepdim=True), torch.tensor([1])).backward()
    assert all(torch.allclose(p.grad_batch, p.grad[None]) for p in model.parameters())


@each_row
def test_targets_that_broadcast(row: Row) -> None:
    """``[N, 1]`` against ``[N]`` compares every sample with every target."""
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x, _ = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the same thing
        loss = packprop.extend(nn.MSELoss())(model(x), torch.randn(4))
    if row.order == 2:
        check(refused(loss, row(), model=model), "[4, 1]", "[4]")
    else:  # each row of outputs still has a gradient of its own
        with packprop.backpack(row()):
            loss.backward()
        assert all(hasattr(p, row.attribute) for p in model.parameters())


@each_row
def test_inputs_that_disagree_on_the_number_of_samples(row: Row) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return (self.left(x)[:, None] * self.right(z)[None]).flatten(0, 1)

    model = packprop.extend(Pairs())
    out = model(torch.randn(2, 3), torch.randn(3, 3))
    loss = packprop.extend(nn.MSELoss())(out, torch.zeros(6, 2))
    check(refused(loss, row(), model=model), "sample")


@each_row
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch(row: Row, reduction: str) -> None:
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.MSELoss(reduction=reduction))
    loss = loss_function(model(torch.zeros(0, 3)), torch.zeros(0, 2))
    if not knows_nothing(row()):
        check(refused(loss, row(), model=model), "empty")
        return
    with packprop.backpack(row()):
        loss.backward()
    for parameter in model.parameters():
        value = getattr(parameter, row.attribute)
        value = value(torch.ones_like(parameter)) if callable(value) else value
        assert 0 in value.shape or not value.nan_to_num().any()  # no rows, or sums of none; the variance is NaN
        assert parameter.grad.shape == parameter.shape


@each_row
def test_a_loss_that_is_no_scalar(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss(reduction="none"))(model(x), y)
    with pytest.raises(RuntimeError, match="scalar"), packprop.backpack(row()):
        loss.backward()  # torch's own error
    assert not any(hasattr(p, row.attribute) for p in model.parameters())


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_is_subtracted(row: Row) -> None:
    """The Hessian of a negated loss is negative: it has no real square root."""
    model = packprop.extend(network())
    x, y = batch()
    loss = -packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    check(refused(loss, row(), model=model), "negative")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_is_bent_afterwards(row: Row) -> None:
    """``exp(loss)`` is not the loss scaled: its curvature has another term, between samples too."""
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y).exp()
    check(refused(loss, row(), model=model), "loss")


@pytest.mark.parametrize("row", FIRST_ORDER, ids=lambda row: row.name)
def test_a_subtracted_loss_has_gradients(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(row()):
        (-packprop.extend(nn.CrossEntropyLoss())(model(x), y)).backward()
    assert all(hasattr(p, row.attribute) for p in model.parameters())
