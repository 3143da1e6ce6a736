"""Terms that begin where no recorded loss does: on a second output, on activations, in a scalar output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions
from tests.references.refusals import check, refused
from tests.references.running import assert_near
from tests.selection import one_in

SAMPLES, TIMES, WIDTH, CLASSES = 3, 6, 4, 5
Second = Callable[[Any, Tensor], Tensor]


class Two(nn.Module):
    """A recorded loss is computed from the first output; ``second`` makes the other one."""

    def __init__(self, second: Second) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(WIDTH, width) for width in (WIDTH, CLASSES, CLASSES))
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        return self.a(hidden.mean(1)), self.second(self, hidden)


def ready(second: Second, times: int) -> tuple[Any, Tensor, Tensor]:
    model = packprop.extend(Two(second).double())
    return model, torch.randn(SAMPLES, times, WIDTH).double(), torch.randint(CLASSES, (SAMPLES,))


def square(out: Tensor) -> Tensor:
    return out.square().sum()


TERMS: list[Any] = [
    pytest.param(lambda m, h: m.b(h), square, id="samples-first"),
    pytest.param(lambda m, h: m.b(h.transpose(0, 1)), square, id="time-first"),
    pytest.param(lambda m, h: m.b(h.transpose(0, 1)).square().sum(), lambda out: 2 * out, id="scalar"),
    pytest.param(lambda m, h: h.square().mean(-1), lambda out: out.sum(), id="activations"),
    pytest.param(lambda m, h: m.b(h.transpose(0, 1)).log_softmax(-1), "ctc", id="ctc"),
]


@one_in(2)
@pytest.mark.parametrize("times", [6, SAMPLES, 4])
@pytest.mark.parametrize(("second", "term"), TERMS)
def test_rows_are_those_of_the_whole_loss(second: Second, term: Any, times: int) -> None:
    model, x, y = ready(second, times)
    words = torch.randint(1, CLASSES, (SAMPLES, 1))
    loss_function = packprop.extend(nn.CrossEntropyLoss(reduction="sum"))

    def whole(x: Tensor, y: Tensor, words: Tensor, loss_function: Any) -> Tensor:
        out, other = model(x)
        if term != "ctc":
            return loss_function(out, y) + term(other)
        lengths = [torch.full((len(x),), length) for length in (times, 1)]
        return loss_function(out, y) + F.ctc_loss(other, words, *lengths, reduction="sum")

    for _ in range(2):
        with packprop.backpack(extensions.BatchGrad()):
            whole(x, y, words, loss_function).backward()
    parts = [torch.as_tensor(i) for i in range(SAMPLES)]
    with packprop.disable():
        losses = [whole(x[i, None], y[i, None], words[i, None], F.cross_entropy) for i in parts]
    for name, parameter in model.named_parameters():
        rows = [
            torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)[0] for loss in losses
        ]
        if rows[0] is not None:
            assert_near(parameter.grad_batch, torch.stack(rows), name)


@pytest.mark.parametrize(
    ("second", "term"),
    [
        pytest.param(lambda m, h: m.b(h - h.mean(0)), square, id="in-the-model"),
        pytest.param(lambda m, h: m.b(h), lambda out: out.mean(0).square().sum(), id="behind-it"),
        pytest.param(
            lambda m, h: m.b(h.mean(1)).softmax(1).mean(0).square().sum(), lambda out: out, id="scalar"
        ),
        pytest.param(lambda m, h: h, lambda out: out.mean(0).square().sum(), id="activations"),
    ],
)
def test_terms_that_mix_samples_are_refused(second: Second, term: Any) -> None:
    """As the balancing losses of experts do."""
    model, x, y = ready(second, TIMES)
    out, other = model(x)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y) + term(other)
    check(refused(loss, extensions.BatchGrad(), model=model), "mix")


def test_a_penalty_on_the_output_itself() -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Tanh()).double())
    x, y = torch.randn(SAMPLES, WIDTH).double(), torch.randint(CLASSES, (SAMPLES,))
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    out = model(x)
    with packprop.backpack(extensions.BatchGrad()):
        (loss_function(out, y) + out.square().mean()).backward()
    assert_near(model[0].weight.grad_batch.sum(0), model[0].weight.grad, "rows")
    out = model(x)
    loss = loss_function(out, y) + out.mean(0).square().sum()
    check(refused(loss, extensions.BatchGrad(), model=model), "mixes the samples")


@pytest.mark.parametrize(
    "function", [F.triplet_margin_loss, F.cosine_embedding_loss], ids=["triplet", "cosine"]
)
def test_a_model_that_returns_a_scalar_of_a_function_without_a_rule(function: Any) -> None:
    """What the message says is so, and helps."""

    class Own(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.layer, self.whole = nn.Linear(3, 2), whole

        def forward(self, x: Tensor) -> Any:
            out = self.layer(x)
            last = torch.ones(4) if function is F.cosine_embedding_loss else -out
            return function(out, out.flip(1), last) if self.whole else (out, out.flip(1), last)

    model = packprop.extend(Own(True))
    x = torch.randn(4, 3)
    check(refused(model(x), extensions.BatchGrad(), model=model), "packprop has a rule for", "outside of it")
    outside = packprop.extend(Own(False))
    with packprop.backpack(extensions.BatchGrad()):
        function(*outside(x)).backward()
    assert_near(outside.layer.weight.grad_batch.sum(0), outside.layer.weight.grad, "rows", 1e-5)


class TestRowsOfAnotherBatch:
    """A term over other rows than those of the loss: nothing in the graph says whose they are."""

    @pytest.mark.parametrize("shape", [(12, 3), (7, 3), (2, 6, 3)])
    def test_is_refused(self, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        model = packprop.extend(nn.Linear(3, 6))
        x, y = torch.randn(6, 3), torch.randint(6, (6,))
        with packprop.record():
            loss = F.cross_entropy(model(x), y) + model(torch.randn(shape)).square().mean()
        with (
            pytest.raises(PackpropError, match="nothing shows whose they are"),
            packprop.backpack(extensions.BatchGrad()),
        ):
            loss.backward()

    def test_is_right_if_the_sample_of_each_row_is_declared(self) -> None:
        torch.manual_seed(0)
        model = packprop.extend(nn.Linear(3, 6).double())
        x, y = torch.randn(6, 3).double(), torch.randint(6, (6,))
        rows, sample = torch.randn(12, 3).double(), torch.arange(12) % 6
        with packprop.record(documents=torch.arange(6)):
            loss = F.cross_entropy(model(x), y)
        with packprop.record(documents=sample):
            loss = loss + F.mse_loss(model(rows), torch.zeros(12, 6).double())
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        for n in range(6):
            own = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1], reduction="sum") / 6
            own = own + model(rows[sample == n]).square().sum() / 72
            (expected,) = torch.autograd.grad(own, [model.weight])
            torch.testing.assert_close(model.weight.grad_batch[n], expected)


AGGREGATES = [
    lambda out: F.mse_loss(out.mean(), torch.zeros(())),
    lambda out: F.huber_loss(out.sum(), torch.ones(())),
    lambda out: F.cross_entropy(out.mean(0), torch.tensor(1)),
]


@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=["mean", "sum", "classes"])
def test_a_loss_of_a_number_of_the_batch_does_not_make_it_one_sample(aggregate: Any, is_module: bool) -> None:
    class Own(nn.Module):
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            total: Tensor = (out - y).square().sum(1).mean() + aggregate(out)
            return total

    model = packprop.extend(nn.Linear(3, 2))
    loss = packprop.extend(Own()) if is_module else Own()
    value = loss(model(torch.randn(5, 3)), torch.randn(5, 2))
    with pytest.raises(PackpropError, match="sample"), packprop.backpack(extensions.BatchGrad()):
        value.backward()
