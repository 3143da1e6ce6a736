"""Shapes that mislead: axes as long as the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply, Raw
from tests.graph.one_by_one import check, double
from tests.references.running import assert_near, right_or_refused
from tests.selection import one_in


@one_in(2)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Linear(4, 4), id="linear"),
        pytest.param(
            lambda: Apply(
                lambda m, x: m.b(m.a(x).tanh().transpose(1, 2)).transpose(1, 2),
                a=nn.Linear(4, 4),
                b=nn.Linear(4, 4),
            ),
            id="mixer",
        ),
        pytest.param(
            lambda: Apply(
                lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh().cumsum(0)).transpose(0, 1),
                a=nn.Linear(4, 4),
                b=nn.Linear(4, 4),
            ),
            id="time-first",
        ),
        pytest.param(
            lambda: Raw(
                lambda m, x: torch.tanh(x.permute(2, 0, 1) @ m.w).permute(1, 2, 0) + m.b,
                w=(4, 4),
                b=(4, 4),
            ),
            id="permuted",
        ),
        pytest.param(lambda: nn.Conv1d(4, 4, 3, padding=1), id="convolution"),
        pytest.param(lambda: nn.LayerNorm((4, 4)), id="layer-norm"),
        pytest.param(lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), id="spectral-norm"),
        pytest.param(lambda: Raw(lambda m, x: (m.w @ x.flatten(1).T).T, w=(4, 16)), id="weight-first"),
        pytest.param(
            lambda: Apply(lambda m, x: m.a(x.transpose(0, 1))[0].transpose(0, 1), a=nn.GRU(4, 4)),
            id="recurrent-time-first",
        ),
    ],
)
def test_every_axis_as_long_as_the_batch(model: Callable[[], nn.Module]) -> None:
    check(double(model()), torch.randn(4, 4, 4).double())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_batch_sizes_that_divide_other_axes(size: int) -> None:
    model = Apply(
        lambda m, x: (
            m.b(m.a(x.reshape(-1, 2)).tanh().view(x.shape[0], 4, 6).transpose(0, 1)).mean(0) + m.c(x.mean(1))
        ),
        a=nn.Linear(2, 6),
        b=nn.Linear(6, 2),
        c=nn.Linear(2, 2),
    )
    check(double(model), torch.randn(size, 4, 2).double())


def first_and_head() -> dict[str, nn.Module]:
    return {"first": nn.Linear(3, 3), "head": nn.Linear(3, 2)}


@one_in(2)
@pytest.mark.parametrize(
    ("times", "size", "axis"),
    [
        *((times, size, 1) for times, size in [(2, 4), (4, 8), (3, 6), (4, 4), (6, 3)]),
        *((times, size, 0) for times, size in [(2, 4), (4, 8), (3, 6), (4, 4), (6, 3)]),
    ],
)
def test_chunks_of_a_time_first_batch_are_no_samples(times: int, size: int, axis: int) -> None:
    """As many time steps as divide the number of samples: groups of samples are no samples."""

    def forward(m: Raw, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        h = torch.cat([part * m.w for part in h.chunk(2, axis)], axis)
        return m.head(torch.tanh(h).sum(0))

    model = Raw(forward, w=(3,))
    for name, layer in first_and_head().items():
        model.add_module(name, layer)
    with right_or_refused("sample"):  # a chunk of samples does not hold all of them
        check(double(model), torch.randn(times, size, 3).double())


@one_in(3)
@pytest.mark.parametrize(("times", "size"), [(1, 4), (2, 4), (4, 8), (3, 6), (4, 4), (6, 3), (5, 3)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_time_first_recurrence(kind: Any, times: int, size: int) -> None:
    """As many time steps as divide the number of samples: nothing but the layer says which axis is which."""
    model = double(Apply(lambda m, x: m.head(m.layer(x)[0][-1]), layer=kind(3, 2), head=nn.Linear(2, 2)))
    x, y = torch.randn(times, size, 3).double(), torch.randn(size, 2).double()
    loss = nn.MSELoss(reduction="sum")
    rows = [
        torch.autograd.grad(loss(model(x[:, n : n + 1]), y[n : n + 1]), model.layer.weight_hh_l0)[0]
        for n in range(size)
    ]
    packprop.extend(model), packprop.extend(loss)
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    assert_near(model.layer.weight_hh_l0.grad_batch, torch.stack(rows), "rows")


@pytest.mark.parametrize("size", [3, 5])
def test_attention_over_the_batch_as_the_first_function(size: int) -> None:
    """Without ``batch_first`` samples are time: they are mixed behind the first projection."""
    model = double(Apply(lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(4, 2)))
    packprop.extend(model)
    out = model(torch.randn(size, 4, 4).double())
    loss = packprop.extend(nn.MSELoss())(out, torch.zeros_like(out.detach()))
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert "in_proj_weight" in caught.value.where
    assert "sample_axis" in caught.value.instead


def test_first_states_and_layers() -> None:
    """Layers of a recurrence that divide the number of samples are none, nor those of its first states."""
    layer = nn.GRU(3, 2, 2)
    model = double(Apply(lambda m, x, h: m.head(m.layer(x, h)[0][-1]), layer=layer, head=nn.Linear(2, 2)))
    x, h, y = (torch.randn(*shape).double() for shape in [(3, 4, 3), (2, 4, 2), (4, 2)])
    loss = nn.MSELoss(reduction="sum")
    rows = [
        torch.autograd.grad(loss(model(x[:, n : n + 1], h[:, n : n + 1]), y[n : n + 1]), layer.weight_hh_l0)[0]
        for n in range(4)
    ]
    packprop.extend(model), packprop.extend(loss)
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x, h), y).backward()
    assert_near(layer.weight_hh_l0.grad_batch, torch.stack(rows), "rows")


def test_a_recurrence_that_is_given_what_another_module_made() -> None:
    """It says itself where its samples are, whatever axis the first module has them on."""
    first, second = nn.Linear(3, 3).double(), nn.GRU(3, 2).double()
    x, y = torch.randn(4, 2, 3).double(), torch.randn(4, 2).double()
    loss = nn.MSELoss(reduction="sum")

    def forward(x: Tensor) -> Tensor:
        out: Tensor = second(first(x).transpose(0, 1))[0][-1]
        return out

    rows = [torch.autograd.grad(loss(forward(x[n : n + 1]), y[n : n + 1]), first.weight)[0] for n in range(4)]
    for module in (first, second, loss):
        packprop.extend(module)
    with packprop.backpack(extensions.BatchGrad()):
        loss(forward(x), y).backward()
    assert_near(first.weight.grad_batch, torch.stack(rows), "rows")


def test_a_recurrent_function_with_keywords() -> None:
    layer = nn.LSTM(3, 2).double()
    x, y = torch.randn(3, 4, 3).double(), torch.randn(4, 2).double()
    state = torch.zeros(1, 4, 2).double()
    options = {"num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False, "batch_first": False}
    packprop.extend(layer)
    with packprop.record(x):
        out = torch.lstm(x, (state, state), layer._flat_weights, has_biases=True, **options)[0][-1]
        loss = nn.functional.mse_loss(out, y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert layer.weight_hh_l0.grad_batch.shape == (4, 8, 2)


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_and_positions_that_meet_need_no_declaration(steps: int) -> None:
    """A recurrence, and attention, say which axis is time."""

    def rows_of(model: nn.Module, x: Tensor) -> list[int]:
        packprop.extend(double(model))
        out = model(x)
        with packprop.backpack(extensions.BatchGrad()):
            packprop.extend(nn.MSELoss())(out, torch.zeros_like(out)).backward()
        return [len(parameter.grad_batch) for parameter in model.parameters()]

    torch.manual_seed(0)
    first = Apply(lambda m, x: m.head(m.first(x)[0][-1]), first=nn.LSTM(3, 3), head=nn.Linear(3, 2))
    assert set(rows_of(first, torch.randn(steps, 4, 3).double())) == {4}
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    attention = Apply(lambda m, x: m.head(m.first(x)).flatten(0, 1), first=layer, head=nn.Linear(4, 2))
    assert set(rows_of(attention, torch.randn(steps, 4, 4).double())) == {steps}


AVERAGED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), lambda out: out.mean(0)),
    "as many features as samples": (lambda: nn.Linear(4, 5), (5, 4), lambda out: out.sum(0)),
    "without a bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4), lambda out: out.mean(0)),
    "one sample": (lambda: nn.Linear(4, 3), (1, 4), lambda out: out.mean(0)),
    "positions": (lambda: nn.Linear(4, 3), (5, 2, 4), lambda out: out.mean((0, 1))),
    "transposed": (lambda: nn.Linear(4, 3), (5, 4), lambda out: out.T),
    "convolution": (lambda: nn.Conv2d(2, 3, 2), (5, 2, 3, 3), lambda out: out.mean((0, 2, 3))),
    "table": (lambda: nn.Embedding(4, 3), (5,), lambda out: out.mean(0)),
}


@pytest.mark.parametrize("case", AVERAGED)
@pytest.mark.parametrize("extension", [extensions.BatchGrad(), extensions.DiagGGNExact()], ids=repr)
def test_features_are_no_samples(case: str, extension: packprop.Extension) -> None:
    """A mean over the batch leaves the features in front."""
    make, shape, mean = AVERAGED[case]
    layer = packprop.extend(make()).double()
    x = torch.randint(4, shape) if case == "table" else torch.randn(shape).double()
    found = mean(layer(x))
    loss = F.mse_loss(found, torch.randn(found.shape).double())
    with (
        pytest.raises(PackpropError, match="the samples are mixed there") as caught,
        packprop.backpack(extension),
    ):
        loss.backward()
    assert "weight" in caught.value.where
    assert "remove statistics over the batch" in caught.value.instead
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_each_sample_may_own_a_row_of_the_weight() -> None:
    """The weight stands on the left, so that its rows lead."""
    weight, x = nn.Parameter(torch.randn(3, 2).double()), torch.randn(5, 2).double()
    found, target = weight @ x.T, torch.randn(3, 5).double()
    with packprop.backpack(extensions.BatchGrad()):
        F.mse_loss(found, target).backward()
    gradients = 2 / 15 * (found.detach() - target) @ x
    for number, row in enumerate(weight.grad_batch):  # type: ignore[attr-defined]  # packprop's
        torch.testing.assert_close(row[number], gradients[number])
        assert row.norm() == row[number].norm()
