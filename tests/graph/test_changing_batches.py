"""What an earlier batch has shown does not bind the next."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.samples.separation import random_powers
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import GatedMean, check, double, rows_of
from tests.references.running import assert_near, right_or_refused
from tests.selection import thorough


def test_signals_that_vanish_say_nothing_about_the_samples() -> None:
    """A head that starts at zero: the first pass has nothing to tell axes apart by."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.inner(x.transpose(0, 1)))
        return m.head(hidden.cumsum(0)).transpose(0, 1).mean(1)

    model = double(Apply(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 3)))
    nn.init.zeros_(model.head.weight)
    x = torch.randn(3, 3, 3).double()
    check(model, x)
    nn.init.normal_(model.head.weight)
    check(model, x)


def test_mixing_that_begins_later_is_noticed() -> None:
    """A gate that starts at zero hides a mean over the batch until it opens."""

    model = packprop.extend(double(GatedMean()))
    loss_function = packprop.extend(nn.MSELoss())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    for value in (0.0, 1.0):
        with torch.no_grad():
            model.gate.fill_(value)
        loss = loss_function(model(x), y)
        with (
            pytest.raises(PackpropError, match="sample"),
            packprop.backpack(extensions.BatchGrad()),
        ):
            loss.backward()


@pytest.mark.parametrize(("largest", "pairs"), [(1e38, 97), (65504.0, 17)])
def test_powers_that_tell_samples_apart(largest: float, pairs: int) -> None:
    """Each sample has its own, as far as they go, and another one in the next pass."""
    for samples in (2, pairs // 2 + 1, pairs, 2 * pairs):
        first, second = random_powers(samples, largest)
        assert len((first - second).unique()) == min(samples, pairs)
        assert (first + second).abs().max() <= 1
    assert not torch.equal(first, random_powers(samples, largest, 1)[0])


@pytest.mark.parametrize("samples", [60, 200])
def test_two_of_many_samples_that_meet_later(samples: int) -> None:
    """Two of those with the same powers in the first pass, between the looks for hidden mixing."""
    first, second = random_powers(samples, 1e38)
    alike = (first == first[:, None]) & ((second == second[:, None]) | (samples < 97))
    couple = alike.triu(1).nonzero()[0]
    model = packprop.extend(
        Apply(lambda m, x, a: m.head(a @ m.first(x).tanh()), first=nn.Linear(3, 4), head=nn.Linear(4, 2))
    )
    x, y, apart = torch.randn(samples, 3), torch.randn(samples, 2), torch.eye(samples)
    for _ in range(2):
        with packprop.backpack(extensions.BatchGrad()):
            F.mse_loss(model(x, apart), y).backward()
    apart[couple[0], couple[1]] = apart[couple[1], couple[0]] = 0.7
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        F.mse_loss(model(x, apart), y).backward()


def test_samples_that_meet_later_behind_a_mean_in_float16() -> None:
    """What comes back leaves the range of that precision, between the looks for hidden mixing."""

    def forward(m: nn.Module, x: Tensor, a: Tensor) -> Tensor:
        return m.head((a @ m.first(x).tanh().flatten(1)).view(4, 4096, 4).mean(1))

    model = packprop.extend(Apply(forward, first=nn.Linear(3, 4), head=nn.Linear(4, 2)).half())
    x, y = torch.randn(4, 4096, 3).half(), torch.randn(4, 2)
    for _ in range(2):
        with packprop.backpack(extensions.BatchGrad()):
            F.mse_loss(model(x, torch.eye(4).half()).float(), y, reduction="sum").backward()
    mixing = torch.full((4, 4), 0.3).half()
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        F.mse_loss(model(x, mixing).float(), y, reduction="sum").backward()


@thorough
def test_two_samples_that_meet_later_in_one_of_many_entries() -> None:
    """The sizes of their rows hardly change, between the looks for hidden mixing."""

    def forward(m: nn.Module, x: Tensor, a: Tensor) -> Tensor:
        h = m.first(x).tanh()
        return m.head(torch.cat([a @ h[:, :1], h[:, 1:]], 1))

    model = packprop.extend(Apply(forward, first=nn.Linear(2, 100_000), head=nn.Linear(100_000, 2)))
    x, y, apart = torch.randn(30, 2), torch.randn(30, 2), torch.eye(30)
    for _ in range(2):
        with packprop.backpack(extensions.BatchL2Grad()):
            F.mse_loss(model(x, apart), y).backward()
    close = random_powers(30, 1e38, 2)[0].argsort()[14:16]  # in the third pass
    apart[close[0], close[1]] = apart[close[1], close[0]] = 1.0
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchL2Grad()):
        F.mse_loss(model(x, apart), y).backward()


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        hidden = torch.tanh(self.layer(x[order]))
        return self.head(hidden[order.argsort()])


def test_an_order_that_depends_on_the_data() -> None:
    """Rows of the inner layer belong to other samples in every batch."""
    model = double(Sorted())
    sorted_x = torch.tensor([[0.0, 1, 2], [1, -1, 3], [2, 0, 1], [3, 5, -2]]).double()
    for x in (sorted_x, sorted_x.flip(0), sorted_x[[2, 0, 3, 1]]):
        with right_or_refused("sample"):
            check(model, x)


def test_experts_that_see_some_rows() -> None:
    """Tokens of several samples, in numbers that depend on the data, through one layer."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(2, 2)
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, 2)
            weights = self.router(flat).softmax(-1)
            out = torch.zeros_like(flat)
            for k, expert in enumerate(self.experts):
                chosen = (weights.argmax(-1) == k).nonzero()[:, 0]
                value = expert(flat[chosen]) * weights[chosen, k, None]
                out = out.index_add(0, chosen, value)
            return out.view(x.shape)

    model = double(Experts())
    for seed in range(6):
        x = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(seed)).double()
        with right_or_refused("sample", "experts"):
            check(model, x)


def test_the_same_shapes_through_another_path() -> None:
    """Control flow that depends on the data: every pass is looked at by itself."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)) if x.sum() > 0 else x)

    model = double(Branching())
    for sign in (1.0, -1.0, 1.0):
        x = sign * torch.rand(3, 3).double()
        packprop.extend(model)
        target = torch.zeros(3, 3).double()
        for parameter in model.parameters():
            parameter.grad = None
            if hasattr(parameter, "grad_batch"):
                del parameter.grad_batch
        with packprop.backpack(extensions.BatchGrad()):
            packprop.extend(nn.MSELoss())(model(x), target).backward()
        for name, expected in rows_of(model, partial(model, x), target).items():
            parameter = model.get_parameter(name)
            if parameter.grad is None:
                assert not hasattr(parameter, "grad_batch")
            else:
                assert_near(parameter.grad_batch, expected, name)


def test_batch_sizes_that_change() -> None:
    model = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    for size in (4, 2, 1, 7, 4):
        check(model, torch.randn(size, 3).double())


def test_losses_that_change() -> None:
    """The same graph and shapes, another loss function or none: nothing is carried over."""
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))))
    x, labels = torch.randn(2, 3).double(), torch.tensor([0, 1])
    real = torch.rand(2, 2).double()
    for loss_function, target in (
        (nn.CrossEntropyLoss(), labels),
        (nn.MSELoss(), real),
        (nn.BCEWithLogitsLoss(), real),
        (F.mse_loss, real),
        (nn.CrossEntropyLoss(reduction="sum"), real),
        (nn.MSELoss(), real),
    ):
        recorded = isinstance(loss_function, nn.Module)
        if recorded:
            packprop.extend(loss_function)
        asked = [extensions.BatchGrad()] + [extensions.DiagGGNExact()] * recorded
        with packprop.backpack(*asked):
            loss_function(model(x), target).backward()
        whole = loss_function(model(x), target)
        gradients = torch.autograd.grad(whole, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert_near(parameter.grad_batch.sum(0), gradient, "rows")
