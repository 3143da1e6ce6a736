"""Rows that data put in any order are followed to their samples; what mixes samples is refused all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.samples.separation import levels
from packprop.engine.tensors.layout import layout_of_rows
from packprop.errors import PackpropError
from tests.cases.models.experts import Mixture
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import check
from tests.references.running import assert_near
from tests.selection import one_in


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of single samples."""
    packprop.extend(model)
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.MSELoss(reduction="sum"))(model(x), y).backward()
    return {name: p.grad_batch for name, p in model.named_parameters()}


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same by a loop."""
    found = []
    for n in range(len(x)):
        loss = nn.MSELoss(reduction="sum")(model(x[n : n + 1]), y[n : n + 1])
        gradients = torch.autograd.grad(
            loss, list(model.parameters()), materialize_grads=True, allow_unused=True
        )
        found.append(gradients)
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(rows) for name, rows in zip(names, zip(*found, strict=True), strict=True)}


@one_in(3)
@pytest.mark.parametrize("samples", [2, 5, 60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_more_samples_than_powers(samples: int, dtype: torch.dtype) -> None:
    """Samples are known by several digits where there are more of them than powers of two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Mixture(), nn.Linear(3, 2)).to(dtype)
    x, y = torch.randn(samples, 4, 3, dtype=dtype), torch.randn(samples, 4, 2, dtype=dtype)
    assert samples < 60 or len(levels(samples, 1e38)) < samples
    expected = one_by_one(model, x, y)
    for name, rows in rows_of(model, x, y).items():
        assert_near(rows, expected[name], name, 1e-10 if dtype == torch.float64 else 1e-4)


def test_rows_of_zeros_are_followed_by_nan() -> None:
    """A last layer of zeros lets nothing come back, and no sample's rows are taken for mixed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Mixture(), nn.Linear(3, 2)).double()
    nn.init.zeros_(model[2].weight)
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    expected = one_by_one(model, x, y)
    for name, rows in rows_of(model, x, y).items():
        assert_near(rows, expected[name], name)


def routed(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Rows are taken out of their order between two layers, and something is done to them."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.below(x)
        order = x[:, 0].argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return m.head(change(torch.tanh(m.inside(h[order])))[back])

    return Apply(forward, below=nn.Linear(3, 3), inside=nn.Linear(3, 3), head=nn.Linear(3, 2))


def test_rows_that_come_back_in_order() -> None:
    torch.manual_seed(0)
    model = routed(lambda h: h).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    expected = one_by_one(model, x, y)
    for name, rows in rows_of(model, x, y).items():
        assert_near(rows, expected[name], name)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h + h.roll(1, 0),
        lambda h: h - h.mean(0),
        lambda h: h.softmax(0),
        lambda h: h.cumsum(0),
        lambda h: F.batch_norm(h, None, None, training=True),
    ],
    ids=["sum-with-roll", "mean", "softmax", "cumsum", "batch-norm"],
)
def test_samples_that_meet_out_of_order_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PackpropError, match=r"mixed|mixes"):
        rows_of(routed(change).double(), torch.randn(5, 3).double(), torch.randn(5, 2).double())


@pytest.mark.parametrize(
    "change", [lambda h: h.flip(0), lambda h: h.roll(1, 0), lambda h: h[torch.tensor([1, 2, 0])]]
)
@pytest.mark.parametrize("behind", [False, True])
def test_a_batch_in_another_order(change: Callable[[Tensor], Tensor], behind: bool) -> None:
    """Rows of the loss say whose the rows are that a layer takes."""
    model = routed(change) if behind else Apply(lambda m, x: change(m.layer(x)), layer=nn.Linear(3, 2))
    check(model.double(), torch.randn(3, 3).double())


@pytest.mark.parametrize("shape", [(7,), (7, 2), (2, 7), (3, 7, 2)])
def test_front_form_and_back(shape: tuple[int, ...]) -> None:
    axis = shape.index(7)
    layout = layout_of_rows(axis, torch.tensor([2, 0, 2, 3, 0, 2, 3]), 4)
    tensor = torch.randn(shape)
    front = layout.to_front(tensor)
    assert front.shape == layout.front_shape(tensor.shape)
    assert front.shape[0] == 4
    assert (front[1] == 0).all()
    assert torch.equal(front[2].movedim(axis, 0), tensor.movedim(axis, 0)[[0, 2, 5]])
    assert torch.equal(layout.from_front(front), tensor)


def test_no_rows_at_all() -> None:
    layout = layout_of_rows(0, torch.zeros(0, dtype=torch.int64), 3)
    assert layout.to_front(torch.zeros(0, 2)).shape == (3, 1, 2)
    assert layout.from_front(torch.zeros(3, 1, 2)).shape == (0, 2)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_averages_over_positions_are_refused_where_their_number_differs(approximation: str) -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(3, 3), Mixture()))
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(3, 4, 3)), torch.randn(3, 4, 3))
    with (
        pytest.raises(PackpropError, match="different numbers of positions"),
        packprop.backpack(extensions.KFAC(approximation=approximation)),
    ):
        loss.backward()


def test_a_load_balancing_loss_is_split_by_tokens() -> None:
    """Fractions of tokens have no derivative: the loss is a sum over tokens, with these as they are."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 3), Mixture()).double())
    x, y = torch.randn(3, 4, 3).double(), torch.randn(3, 4, 3).double()

    def loss(fractions: Tensor | None, samples: slice) -> tuple[Tensor, Tensor]:
        made = model[0](x[samples])
        found = model[1](made)
        chances = model[1].gate(made).softmax(-1).flatten(0, 1)
        if fractions is None:
            fractions = F.one_hot(chances.topk(2, -1).indices, 4).double().mean((0, 1))
        aside = (fractions * chances.sum(0) / 12).sum()
        return nn.functional.mse_loss(found, y[samples], reduction="sum") / 36 + aside, fractions

    with packprop.record(x):
        whole, fractions = loss(None, slice(None))
    with packprop.backpack(extensions.BatchGrad()):
        whole.backward()
    for n in range(3):
        with packprop.disable():
            alone, _ = loss(fractions, slice(n, n + 1))
        gradients = torch.autograd.grad(
            alone, list(model.parameters()), materialize_grads=True, allow_unused=True
        )
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert_near(parameter.grad_batch[n], gradient, name)


class Chosen(nn.Module):
    """A row of a parameter for each sample, taken one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 3), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.stack([self.table[number] for number in ids])


CHOICE = torch.tensor([0, 3, 3, 1])


def test_rows_that_data_chose_meet_samples_later() -> None:
    model = packprop.extend(Chosen().double())
    x = torch.randn(4, 3).double()
    made, chosen = model(x, CHOICE)
    with packprop.record():
        loss = (made * chosen).square().sum()
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for n in range(4):
        with packprop.disable():
            one, row = model(x[n : n + 1], CHOICE[n : n + 1])
        gradients = torch.autograd.grad((one * row).square().sum(), list(model.parameters()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert_near(parameter.grad_batch[n], gradient, name)


def test_a_loss_of_rows_that_data_chose_is_a_penalty() -> None:
    """The graph shows parameters alone: no sample meets them."""
    model = packprop.extend(Chosen().double())
    made, chosen = model(torch.randn(4, 3).double(), CHOICE)
    first, second = torch.randn(2, 4, 3).double()
    score = packprop.extend(nn.MSELoss())
    with packprop.backpack(extensions.BatchGrad()):
        (score(chosen, first) + score(made, second)).backward()
    assert not hasattr(model.table, "grad_batch")
    assert model.table.grad is not None
