"""Functions by which data decide on the order of rows: what was seen is kept where samples stay in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import backpack, extend, extensions
from packprop.engine.samples import locating as samples
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import check, double
from tests.references.running import assert_rows_of_terms, right_or_refused
from tests.selection import one_in

BESIDE_THE_SAMPLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one position of each sample": lambda h, x: h[torch.arange(len(h)), x[..., 0].argmax(1)],
    "the same from the end": lambda h, x: h[torch.arange(4, device=h.device), -1 - x[..., 0].argmax(1)],
    "positions of all samples": lambda h, x: h[:, torch.randperm(6)].sum(1),
    "features": lambda h, x: h[..., torch.randperm(3)].sum(1),
    "positions in another order": lambda h, x: (
        h.gather(1, x.argsort(1)[:, :, :1].expand(-1, -1, 3)).cumsum(1).sum(1)
    ),
    "the largest": lambda h, x: h.topk(2, 1)[0].sum(1),
    "sorted": lambda h, x: h.sort(-1)[0].sum(1),
    "sorted from the end": lambda h, x: h.sort(dim=1, descending=True)[0].cumsum(1).mean(1),
    "selected": lambda h, x: h.index_select(1, torch.randperm(6)[:2]).sum(1),
    "added to positions": lambda h, x: (
        torch.zeros_like(h).index_add(1, torch.randint(6, (6,)), h).square().sum(1)
    ),
    "along one axis": lambda h, x: torch.take_along_dim(h, x.argsort(1), 1)[:, 0],
    "samples on the second axis": lambda h, x: h.transpose(0, 1)[torch.randperm(6)[:3]].sum(0),
}


@one_in(2)
@pytest.mark.parametrize("name", BESIDE_THE_SAMPLES)
def test_samples_that_stay_in_order_are_located_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other indices in the next pass change nothing about the samples."""
    model = double(
        Apply(
            lambda m, x: m.head(BESIDE_THE_SAMPLES[name](torch.tanh(m.first(x)), x)),
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    check(model, torch.randn(4, 6, 3).double(), seed=0)
    located = samples._find_locations
    calls: list[Any] = []
    monkeypatch.setattr(samples, "_find_locations", lambda *given: calls.append(given) or located(*given))
    check(model, torch.randn(4, 6, 3).double(), seed=1)
    assert not calls


AMONG_THE_SAMPLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "taken": lambda h, order: h[order],
    "taken behind another index": lambda h, order: h[:, :3][order, :],
    "selected": lambda h, order: h.index_select(0, order),
    "gathered": lambda h, order: h.gather(0, order[:, None].expand_as(h)),
    "assigned": lambda h, order: torch.zeros_like(h).index_copy(0, order.argsort(), h),
    "rows assigned": lambda h, order: assigned(h, order),
    "padded and taken": lambda h, order: torch.take_along_dim(h, order[:, None], 0),
}


def assigned(h: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[order.argsort()] = h
    return out


@pytest.mark.parametrize("name", AMONG_THE_SAMPLES)
def test_an_order_that_was_right_once(name: str) -> None:
    """An index that leaves the samples in order today may put them in another one tomorrow."""
    model = double(
        Apply(
            lambda m, x: m.head(AMONG_THE_SAMPLES[name](torch.tanh(m.first(x)), m.order)),
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    loss = packprop.extend(nn.MSELoss())
    packprop.extend(model)
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    model.order = torch.arange(4)
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    assert model.first.weight.grad_batch.shape[0] == 4
    model.order = torch.tensor([2, 0, 3, 1])
    with right_or_refused("mixed"):
        assert_rows_of_terms((model(x) - y).square() / y.numel(), loss(model(x), y), model.parameters())


INTO_PARAMETERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda table, h, order: table.index_add(0, order, h),
    "index_copy": lambda table, h, order: table.index_copy(0, order, h) * 1.0,
    "index_put": lambda table, h, order: table.index_put((order,), h),
    "scatter": lambda table, h, order: table.scatter(0, order[:, None].expand_as(h), h),
    "scatter_add": lambda table, h, order: (2 * table).scatter_add(0, order[:, None].expand_as(h), h),
}


@pytest.mark.parametrize("passes", [0, 1, 4])
@pytest.mark.parametrize("name", INTO_PARAMETERS)
def test_rows_that_data_put_into_parameters(name: str, passes: int) -> None:
    """A function whose first operand is made of parameters still puts the samples where data say."""
    model = Apply(lambda m, x: INTO_PARAMETERS[name](m.table, m.first(x), m.order), first=nn.Linear(3, 3))
    model.table = nn.Parameter(torch.randn(4, 3))
    packprop.extend(double(model))
    x, y = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    for order in [torch.arange(4)] * passes + [torch.tensor([2, 0, 3, 1])]:
        model.order = order
        model.zero_grad()
        out = model(x)
        loss = nn.functional.mse_loss(out, y, reduction="sum")
        assert_rows_of_terms((out - y).square(), loss, [model.first.weight, model.first.bias])


def test_rows_of_parameters_that_data_choose_are_located_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tables, in any order, move no samples."""
    model = Apply(lambda m, x: m.first(x) + m.table[m.order] + m.lookup(m.order), first=nn.Linear(3, 3))
    model.table, model.lookup = nn.Parameter(torch.randn(4, 3)), nn.Embedding(4, 3)
    packprop.extend(double(model))
    located = samples._find_locations
    calls: list[Any] = []
    monkeypatch.setattr(samples, "_find_locations", lambda *given: calls.append(given) or located(*given))
    counts = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        model.order = torch.tensor(order)
        out = model(torch.randn(4, 3).double())
        assert_rows_of_terms(out.square(), out.square().sum(), [model.first.weight, model.table])
        counts.append(len(calls))
    assert counts[0] == counts[-1]


def test_a_reordering_above_a_checkpoint_with_parameters() -> None:
    """Where it holds the samples is looked for through the checkpoint."""

    def go(through: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model = double(
            Apply(
                lambda m, x: m.head(through(m.inner, m.first(x).sort(-1)[0].relu())),
                first=nn.Linear(3, 3),
                inner=nn.Linear(3, 4),
                head=nn.Linear(4, 2),
            )
        )
        packprop.extend(model)
        loss = packprop.extend(nn.MSELoss())(model(torch.randn(4, 3).double()), torch.ones(4, 2).double())
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        return [value for p in model.parameters() for value in (p.grad_batch, p.diag_ggn_exact)]

    found = go(lambda module, h: checkpoint(module, h, use_reentrant=False))
    torch.testing.assert_close(found, go(lambda module, h: module(h)))


def test_features_in_another_order_and_samples_reversed() -> None:
    model = double(
        Apply(
            lambda m, x: m.head(
                m.first(x.gather(-1, torch.arange(3).flip(0).expand_as(x)) + x).index_select(
                    0, torch.tensor([1, 0])
                )
            ),
            first=nn.Linear(3, 4),
            head=nn.Linear(4, 2),
        )
    )
    check(model, torch.randn(2, 2, 3).double())


def test_positions_first_behind_features_in_another_order() -> None:
    """Twelve rows of the loss are six positions of two samples, and not two groups of six rows."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(2, 2)).double())
    x, y = torch.randn(2, 2, 3, 2).double(), torch.randn(6, 2, 2).double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(2).transpose(1, 2)
            out: Tensor = self.layer(x.gather(-1, torch.arange(2).roll(1).expand_as(x)))
            return out.transpose(0, 1).flatten(0, 1)

    whole = packprop.extend(Model(), sample_axis=1)
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.MSELoss())(whole(x), y.flatten(0, 1)).backward()
    weight = model[0].weight
    for n in range(2):
        with packprop.disable():
            share = (whole(x)[n::2] - y[:, n]).square().sum() / 24
        torch.testing.assert_close(weight.grad_batch[n], torch.autograd.grad(share, weight)[0])


FROM_THE_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "features by a list": lambda x: x[..., [1, 2, 2]],
    "positions by a list": lambda x: x[:, [2, 0, 3, 1, 5, 4]],
    "positions": lambda x: x[:, torch.randperm(6)],
    "selected": lambda x: x.index_select(1, torch.randperm(6)),
    "gathered": lambda x: x.gather(1, x.argsort(1)),
    "sorted": lambda x: x.sort(1)[0],
    "the largest": lambda x: x.topk(6, 1)[0],
    "repeated": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "by a mask": lambda x: x.masked_fill(x < 0, 0.1).index_put((x > 1,), torch.tensor(1.0).to(x)),
}


@one_in(3)
@pytest.mark.parametrize("size", [3, 4, 6])
@pytest.mark.parametrize("name", FROM_THE_INPUTS)
def test_batches_behind_positions_in_another_order(name: str, size: int) -> None:
    """Of a batch that is rolled, sample n is row n of what the loss takes."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.first(FROM_THE_INPUTS[name](x))
        return m.head((m.mix(h) * h.square()).mean(1))

    model = double(Apply(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 2), mix=nn.Identity()))
    x = torch.randn(size, 6, 3).double()
    check(model, x, seed=0)
    model.mix = Apply(lambda _, h: h.roll(1, 0) + h)
    loss = packprop.extend(nn.MSELoss())(packprop.extend(model)(x), torch.zeros(size, 2).double())
    with pytest.raises(PackpropError, match="sample"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    rolled = double(Apply(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 2), mix=nn.Identity()))
    check(Apply(lambda m, x: m.model(x).roll(1, 0), model=rolled), x, seed=0)


@pytest.mark.parametrize("function", [lambda t: t.topk(1)[0], lambda t: t.sort()[0]], ids=["topk", "sort"])
def test_a_tensor_without_axes_has_nothing_to_reorder(function: Any) -> None:
    """A scale that each sample has of its own."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 4).double()
    model = extend(
        Apply(lambda m, x: torch.stack([row * function(row.abs().max()) for row in m.a(x)]), a=layer)
    )
    x = torch.randn(5, 3).double()
    with backpack(extensions.BatchGrad()):
        extend(nn.MSELoss(reduction="sum"))(model(x), torch.zeros(5, 4).double()).backward()
    for n in range(5):
        row = layer(x[n])
        (expected,) = torch.autograd.grad((row * row.abs().max()).square().sum(), [layer.weight])
        torch.testing.assert_close(layer.weight.grad_batch[n], expected)
