"""A head that is taken in chunks: several losses, each over some tokens of some samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import PackpropError, extensions
from packprop.engine.algebra.kronecker import Eigen
from packprop.engine.tensors.nesting import tensors_in
from tests.references.running import ROWS, Row, assert_near
from tests.selection import often, one_in

SAMPLES, TOKENS, WIDTH, WORDS = 3, 4, 5, 6
IGNORED = -100


class Chunked(nn.Module):
    """Tokens, running sums over positions, and a head whose loss is taken in chunks and added up.

    Args:
        by: What a chunk is: ``"all"`` tokens at once, some ``"tokens"`` of the flattened batch, some
            ``"times"`` of all samples, or some ``"samples"``.
        size: Of a chunk.
        checkpointed: Whether each chunk is in a checkpoint.
        mixes: Whether positions meet.
    """

    def __init__(self, by: str, size: int = 1, checkpointed: bool = False, mixes: bool = True) -> None:
        super().__init__()
        self.by, self.size, self.checkpointed, self.mixes = by, size, checkpointed, mixes
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.by == "all":
            return (x.flatten(0, 1),)
        if self.by == "tokens":
            return x.flatten(0, 1).split(self.size)
        return x.split(self.size, 1 if self.by == "times" else 0)

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, self.head.weight, self.head.bias)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)).tanh()
        if self.mixes:
            hidden = hidden.cumsum(1).tanh()
        total = hidden.new_zeros(())
        for some, words in zip(self.chunks(hidden), self.chunks(targets), strict=True):
            if self.checkpointed:
                total = total + checkpoint(self.loss_of, some, words, use_reentrant=False)
            else:
                total = total + self.loss_of(some, words)
        return total / (targets != IGNORED).sum()


def data(samples: int = SAMPLES, positions: int = TOKENS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, targets = torch.randint(WORDS, (2, samples, positions))
    targets[0, 1] = IGNORED
    return tokens, targets


def built(*args: object, **options: object) -> Chunked:
    torch.manual_seed(1)
    return Chunked(*args, **options).double()


def found(model: nn.Module, asked: packprop.extensions.Extension, *batch: Tensor) -> dict[str, list[Tensor]]:
    """What an extension gives; of an eigendecomposition its values."""
    loss = packprop.extend(model)(*batch)
    with packprop.backpack(asked):
        loss.backward()
    values = {name: getattr(p, asked.savefield) for name, p in model.named_parameters()}
    return {
        name: list(tensors_in(value.values if isinstance(value, Eigen) else value))
        for name, value in values.items()
    }


def by_loop(model: Chunked, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Gradients of single samples by plain autograd, one after the other."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    counted = (targets != IGNORED).sum()
    for sample in range(len(tokens)):
        own = tokens[sample : sample + 1], targets[sample : sample + 1]
        with packprop.disable():
            loss = model(*own) * (own[1] != IGNORED).sum() / counted
        for name, row in zip(rows, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            rows[name].append(row)
    return {name: torch.stack(each) for name, each in rows.items()}


def ways() -> Iterator[tuple[str, int]]:
    yield from product(["tokens"], [1, 3, 5, TOKENS, 8])
    yield from product(["times"], [1, 3])
    yield from product(["samples"], [1, 2])


exact = pytest.mark.parametrize("row", [row for row in ROWS if not row.sampled], ids=lambda row: row.name)
each_way = pytest.mark.parametrize(("by", "size"), ways(), ids=lambda value: str(value))
checkpoints = pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])


@one_in(3)
@checkpoints
@each_way
def test_gradients_of_single_samples(by: str, size: int, checkpointed: bool) -> None:
    model, batch = built(by, size, checkpointed), data()
    expected = by_loop(built("all"), *batch)
    norms = found(model, extensions.BatchL2Grad(), *batch)
    for name, (rows,) in found(model, extensions.BatchGrad(), *batch).items():
        assert_near(rows, expected[name], name)
        assert_near(norms[name][0], expected[name].flatten(1).square().sum(1), name)


@one_in(5)
@often(lambda row, by, size, checkpointed: by == "times" or not checkpointed)
@exact
@checkpoints
@pytest.mark.parametrize(("by", "size"), [("tokens", 5), ("times", 3), ("samples", 2)])
def test_chunks_are_the_loss_over_all_tokens(row: Row, by: str, size: int, checkpointed: bool) -> None:
    batch = data()
    expected, mine = found(built("all"), row(), *batch), found(built(by, size, checkpointed), row(), *batch)
    for name, wanted in expected.items():
        for part, value in zip(mine[name], wanted, strict=True):
            if row.attribute.startswith("sqrt"):  # columns stand in the order of the losses: compare S^T S
                part, value = (each.flatten(2).flatten(0, 1) for each in (part, value))
                part, value = part.T @ part, value.T @ value
            assert_near(part, value, name)


@pytest.mark.parametrize(("by", "size"), [("tokens", 5), ("times", 3)])
def test_draws_are_right_in_expectation(by: str, size: int) -> None:
    batch, many = data(), torch.Generator().manual_seed(0)
    expected = found(built("all"), extensions.DiagGGNExact(), *batch)
    model = built(by, size)
    mine = found(model, extensions.DiagGGNMC(mc_samples=4000, generator=many), *batch)
    factors = found(model, extensions.KFAC(mc_samples=4000, generator=many), *batch)
    exactly = found(built("all"), extensions.KFLR(), *batch)
    for name in expected:
        assert_near(mine[name][0], expected[name][0], name, 0.1)
        for factor, wanted in zip(factors[name], exactly[name], strict=True):
            assert_near(factor, wanted, name, 0.1)


def batch_of_rows() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WORDS)).double()
    return packprop.extend(model), torch.randn(SAMPLES, WIDTH).double(), torch.tensor([1, 0, 4])


SINGLE_ROWS = {
    "zip": lambda f, y: torch.stack(
        [F.cross_entropy(own, word) for own, word in zip(f, y, strict=True)]
    ).mean(),
    "select": lambda f, y: sum(F.cross_entropy(f[n], y[n]) for n in range(len(f))) / len(f),
    "slices": lambda f, y: sum(F.cross_entropy(f[n : n + 1], y[n : n + 1]) for n in range(len(f))) / len(f),
    "nll": lambda f, y: sum(map(F.nll_loss, f.log_softmax(1).unbind(), y.unbind())) / len(f),
    "probabilities": lambda f, y: sum(map(F.cross_entropy, f, F.one_hot(y, WORDS).to(f))) / len(f),
    "backwards": lambda f, y: sum(F.cross_entropy(f[n], y[n]) for n in reversed(range(len(f)))) / len(f),
}


@one_in(5)
@exact
@pytest.mark.parametrize("way", SINGLE_ROWS)
def test_losses_of_single_rows_are_the_loss_over_all_rows(row: Row, way: str) -> None:
    """Rows that a loop gives to the loss without an axis of samples are not one sample together."""
    if way == "nll" and row.order == 2:
        pytest.skip("nll_loss has no curvature")
    values = []
    for loss in (F.cross_entropy, SINGLE_ROWS[way]):
        model, x, y = batch_of_rows()
        asked = row()
        with packprop.record(), packprop.backpack(asked):
            loss(model(x), y).backward()
        values.append([getattr(p, asked.savefield) for p in model.parameters()])
    for wanted, found in zip(*values, strict=True):
        if row.attribute.startswith("sqrt"):  # columns stand in the order of the losses: compare S^T S
            wanted, found = (torch.einsum("cn...,cn...->n...", each, each) for each in (wanted, found))
        if isinstance(wanted, Eigen):
            wanted, found = wanted.values, found.values
        for mine, value in zip(tensors_in(found), tensors_in(wanted), strict=True):
            assert_near(mine, value, row.name)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([0, 2], id="some"),
        pytest.param([1, 0, 2], id="out-of-order"),
        pytest.param([0, 1, 2, 0], id="twice"),
    ],
)
def test_losses_of_single_rows_are_those_of_the_samples_that_they_are_taken_of(rows: list[int]) -> None:
    model, x, y = batch_of_rows()
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        f = model(x)
        sum(F.cross_entropy(f[n], y[n]) for n in rows).backward()
    with packprop.disable():
        terms = F.cross_entropy(model(x), y, reduction="none")
    for parameter in model.parameters():
        each = [torch.autograd.grad(term, parameter, retain_graph=True)[0] for term in terms]
        expected = torch.stack([row * rows.count(n) for n, row in enumerate(each)])
        assert_near(parameter.grad_batch, expected, "rows")


TAKEN_TWICE = {
    "rows": lambda f, y: sum(F.cross_entropy(f[n], y[n]) for n in range(len(f))),
    "slices": lambda f, y: sum(F.cross_entropy(f[n : n + 1], y[n : n + 1]) for n in range(len(f))),
    "chunks": lambda f, y: sum(
        F.cross_entropy(*pair, reduction="sum") for pair in zip(f.split(2), y.split(2), strict=True)
    ),
    "scaled rows": lambda f, y: sum(map(F.cross_entropy, (2 * f).unbind(), y)),
}


@one_in(2)
@pytest.mark.parametrize("way", TAKEN_TWICE)
@pytest.mark.parametrize("step", [0, -1])
def test_rows_of_one_step_are_samples(way: str, step: int) -> None:
    """``f = out[-1]`` has ``n`` rows: that it is one of several steps makes no samples of the steps."""
    model, _, y = batch_of_rows()
    x = torch.randn(2, SAMPLES, WIDTH).double()
    scale = 2 if way == "scaled rows" else 1
    for loss in (TAKEN_TWICE[way], lambda f, y: F.cross_entropy(scale * f, y, reduction="sum")):
        with packprop.record(), packprop.backpack(extensions.BatchGrad()):
            loss(model(x)[step], y).backward()
        rows = [p.grad_batch for p in model.parameters()]
        if loss is TAKEN_TWICE[way]:
            found = rows
    for mine, wanted in zip(found, rows, strict=True):
        assert_near(mine, wanted, way)


def test_a_declared_axis_is_counted_from_the_steps() -> None:
    """A time-first model whose samples are declared: its rows may be taken of one step, or of all."""
    found = []
    for axis, steps in ((1, range(2)), (1, range(1, 2)), (None, range(1, 2))):
        model, _, y = batch_of_rows()
        torch.manual_seed(2)
        x = torch.randn(2, SAMPLES, WIDTH).double()
        with packprop.record(sample_axis=axis), packprop.backpack(extensions.BatchGrad()):
            out = model(x)
            sum(F.cross_entropy(out[t][n], y[n]) for t in steps for n in range(SAMPLES)).backward()
        found.append([p.grad_batch for p in model.parameters()])
    for both, one, alone in zip(*found, strict=True):
        assert len(both) == len(one) == SAMPLES
        assert_near(one, alone, "one step")


@pytest.mark.parametrize("way", ["rows", "slices", "chunks"])
def test_rows_of_each_step_belong_to_the_samples_in_front(way: str) -> None:
    """``out[n][t]`` in two loops: ``n`` samples, as flattened positions are."""
    model, _, _ = batch_of_rows()
    x, y = torch.randn(SAMPLES, 4, WIDTH).double(), torch.randint(WORDS, (SAMPLES, 4))
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        out = model(x)
        sum(TAKEN_TWICE[way](out[n], y[n]) for n in range(SAMPLES)).backward()
    found = [p.grad_batch for p in model.parameters()]
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
    for mine, p in zip(found, model.parameters(), strict=True):
        assert_near(mine, p.grad_batch, way)


@pytest.mark.parametrize(
    "taken",
    [
        lambda out, y, mask: (out[-1][mask], y[mask]),
        lambda out, y, mask: (out[-1].flatten(0, 1)[mask.flatten()], y[mask]),
        lambda out, y, mask: (out[-1].flatten(0, 1)[2:7], y.flatten()[2:7]),
        lambda out, y, mask: (out[-1][1:].flatten(0, 1), y[1:].flatten()),
    ],
    ids=["mask", "flat mask", "slice", "rows"],
)
def test_rows_that_are_taken_of_one_step(taken: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """One loss over some positions of the samples: the steps are none of their axes."""
    model, _, _ = batch_of_rows()
    x, y = torch.randn(2, SAMPLES, 4, WIDTH).double(), torch.randint(WORDS, (SAMPLES, 4))
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        F.cross_entropy(*taken(model(x), y, mask), reduction="sum").backward()
    found = [p.grad_batch for p in model.parameters()]
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        F.cross_entropy(*taken(model(x[1:]), y, mask), reduction="sum").backward()
    for mine, p in zip(found, model.parameters(), strict=True):
        assert_near(mine, p.grad_batch, "rows")
        assert len(mine) in (2, SAMPLES)


def test_losses_of_single_rows_in_which_samples_meet() -> None:
    model, x, y = batch_of_rows()
    told = pytest.raises(PackpropError, match="mixed")
    with told, packprop.record(), packprop.backpack(extensions.BatchGrad()):
        sum(map(F.cross_entropy, model(x).cumsum(0), y)).backward()


def test_losses_of_single_numbers_are_refused() -> None:
    model, x, _ = batch_of_rows()
    told = pytest.raises(PackpropError, match="numbers have no axis")
    with told, packprop.record(), packprop.backpack(extensions.BatchGrad()):
        sum(F.mse_loss(row[0], torch.zeros_like(row[0])) for row in model(x)).backward()


def test_steps_of_one_sample_are_given_an_axis_of_samples() -> None:
    """Where a loss of each step is meant, and the inputs are one sequence."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(WIDTH, 4, batch_first=True), nn.Linear(4, WORDS)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    _, x, y = batch_of_rows()
    model = packprop.extend(Steps().double())
    told = pytest.raises(PackpropError, match="mixed")
    with told, packprop.record(), packprop.backpack(extensions.BatchGrad()):
        sum(map(F.cross_entropy, model(x), y)).backward()
    model.zero_grad()
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        sum(map(F.cross_entropy, model(x[None])[0], y)).backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad_batch, parameter.grad[None], name)


@one_in(3)
@often(lambda samples, positions, mixes, checkpointed, declared: (samples, positions) == (2, 2))
@pytest.mark.parametrize("declared", [None, 0])
@checkpoints
@pytest.mark.parametrize("mixes", [False, True], ids=["apart", "mixing"])
@pytest.mark.parametrize(("samples", "positions"), [(2, 2), (2, 4), (3, 2), (4, 4), (4, 3)])
def test_no_position_is_taken_for_a_sample(
    samples: int, positions: int, mixes: bool, checkpointed: bool, declared: int | None
) -> None:
    """Where nothing tells chunks of samples from chunks of time, it has to be said which they are."""
    batch = data(samples, positions)
    expected = by_loop(built("all", mixes=mixes), *batch)
    for by, size in product(["tokens", "samples", "times"], [1, 2, positions, 2 * positions]):
        model = packprop.extend(built(by, size, checkpointed, mixes), sample_axis=declared)
        told = mixes or by == "times" or declared == 0
        with nullcontext() if told else suppress(PackpropError):
            for name, (rows,) in found(model, extensions.BatchGrad(), *batch).items():
                assert_near(rows, expected[name], name)


def test_samples_that_are_mixed_are_refused() -> None:
    """Rows of one sample behind another one's are no rows of samples in turn."""
    model = built("tokens", 5)
    forward = model.body.forward
    model.body.forward = lambda x: forward(x + x.roll(1, 0))
    with pytest.raises(PackpropError, match="mixed"):
        found(model, extensions.BatchGrad(), *data())


@pytest.mark.parametrize(("by", "size"), [("tokens", 5), ("times", 3)])
def test_a_plan_for_chunks_of_tokens_is_refused(by: str, size: int) -> None:
    """Chunks of time hold all samples, which a plan can count on."""
    model, asked = packprop.extend(built(by, size)), extensions.BatchL2Grad()
    batch = data()
    if by == "times":
        assert packprop.plan(model, None, batch, [asked]).peak > 0
    else:
        with pytest.raises(PackpropError, match=r"only data tell[^$]*dim=1"):
            packprop.plan(model, None, batch, [asked])
