"""Quantities of single tokens against loops of plain autograd over the terms of the loss."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.testing import check_extension
from tests.references.running import assert_near
from tests.references.tokens import (
    CLASSES,
    IGNORED,
    LOSSES,
    PER_TOKEN,
    SAMPLES,
    TOKENS,
    WIDTH,
    Language,
    Loss,
    Named,
    Words,
    class_axis,
    data,
    flattened,
    in_pieces,
    prepared,
    regression,
    rows_of,
    run,
    weighted,
)
from tests.selection import one_in, thorough


@one_in(3)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("loss", LOSSES)
def test_against_loops_over_tokens(loss: Loss, tied: bool) -> None:
    model, batch = prepared(tied)
    run(loss, model, batch, *PER_TOKEN, extensions.BatchGrad())
    counted = torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    if loss is not regression:
        counted = batch[1] != IGNORED
    if loss is weighted:
        counted[0, 0] = False  # its weight is zero
    for name, rows in rows_of(loss, model, batch).items():
        parameter = dict(model.named_parameters())[name]
        assert_near(parameter.grad_batch_token, rows, name)
        assert_near(parameter.grad_batch_token.sum(1), parameter.grad_batch, name)
        assert_near(parameter.grad_batch_token.sum((0, 1)), parameter.grad, name)
        assert_near(parameter.batch_l2_token, rows.flatten(2).square().sum(2), name)
        assert_near(parameter.sum_grad_squared_token, rows.square().sum((0, 1)), name)
        assert_near(parameter.variance_token, rows[counted].var(0, correction=0), name)
        assert not parameter.grad_batch_token[~counted].any()
        assert not parameter.batch_l2_token[~counted].any()
    if loss in (flattened, class_axis, in_pieces):
        assert not counted.all()


def ggn_of(loss: Loss, model: nn.Module, batch: Any) -> Named:
    """Diagonals of the GGN of single tokens ``[n, t, *p]``, from Jacobians and Hessians of single terms."""
    words, targets, padding = batch
    with packprop.disable():
        scores = model(words, padding)
        hessian = torch.autograd.functional.hessian(lambda s: loss(s, targets), scores.detach())
    named, values = dict(model.named_parameters()), {}
    rows = [torch.autograd.grad(s, list(named.values()), retain_graph=True) for s in scores.flatten()]
    for name, parts in zip(named, zip(*rows, strict=True), strict=True):
        jacobians = torch.stack(parts).unflatten(0, scores.shape)
        values[name] = torch.stack(
            [
                torch.einsum("cd,c...,d...->...", hessian[n, t, :, n, t], jacobians[n, t], jacobians[n, t])
                for n, t in itertools.product(range(SAMPLES), range(TOKENS))
            ]
        ).unflatten(0, (SAMPLES, TOKENS))
    return values


@one_in(2)
@pytest.mark.parametrize("loss", [flattened, weighted, in_pieces, regression])
def test_curvature_against_loops_over_tokens(loss: Loss) -> None:
    model, batch = prepared(tied=True)
    run(loss, model, batch, extensions.BatchDiagGGNExact(per="token"), extensions.BatchDiagGGNExact())
    for name, diagonals in ggn_of(loss, model, batch).items():
        parameter = dict(model.named_parameters())[name]
        assert_near(parameter.diag_ggn_exact_batch_token, diagonals, name)
        if loss is not in_pieces:
            assert_near(parameter.diag_ggn_exact_batch_token.sum(1), parameter.diag_ggn_exact_batch, name)


@thorough
def test_sampled_curvature_comes_near() -> None:
    model, batch = prepared()
    generator = torch.Generator().manual_seed(0)
    run(flattened, model, batch, extensions.BatchDiagGGNMC(3000, generator=generator, per="token"))
    expected = ggn_of(flattened, model, batch)["hidden.bias"]
    value = model.hidden.bias.diag_ggn_mc_batch_token
    assert value.shape == (SAMPLES, TOKENS, WIDTH)
    assert not value[batch[1] == IGNORED].any()
    assert (value - expected).norm() < 0.1 * expected.norm()


@one_in(5)
@pytest.mark.parametrize(
    "extension",
    [
        *PER_TOKEN,
        extensions.BatchDiagGGNExact(per="token"),
        extensions.BatchDiagGGNMC(mc_samples=3, generator=torch.Generator().manual_seed(1), per="token"),
    ],
    ids=lambda extension: extension.name,
)
def test_laws(extension: Any) -> None:
    torch.manual_seed(0)
    words, targets, _ = data()
    on = Words(), nn.CrossEntropyLoss(), words, targets
    assert check_extension(extension, on=on).error < 1e-12


class TwoHeads(nn.Module):
    """Scores of words, and a number for each token; the heads share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.words, self.number = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.shared(x))
        return self.words(hidden), self.number(hidden)


def test_tokens_of_two_losses_follow_each_other() -> None:
    torch.manual_seed(0)
    model = packprop.extend(TwoHeads().double())
    x, y, z = torch.randn(2, 3, 3).double(), torch.randint(5, (2, 3)), torch.randn(2, 3, 1).double()
    y[1, 2] = IGNORED
    with packprop.backpack(*PER_TOKEN, extensions.BatchGrad()), packprop.record():
        words, number = model(x)
        first, second = F.cross_entropy(words.mT, y), F.mse_loss(number, z)
        (second + 2 * first).backward()
    with packprop.disable():
        words, number = model(x)
        classes = 2 * F.cross_entropy(words.mT, y, reduction="none") / (y != IGNORED).sum().double()
        terms = torch.cat([classes, (number - z).square()[..., 0] / z.numel()], 1)
    counted = torch.ones(2, 6, dtype=torch.bool)
    counted[1, 2] = False
    for name, parameter in model.named_parameters():
        rows = [
            torch.autograd.grad(term, parameter, retain_graph=True, allow_unused=True)[0]
            for term in terms.flatten()
        ]
        known = torch.stack([torch.zeros_like(parameter) if row is None else row for row in rows])
        assert_near(parameter.grad_batch_token, known.unflatten(0, (2, 6)), name)
        assert_near(parameter.batch_l2_token, known.flatten(1).square().sum(1).view(2, 6), name)
        assert_near(parameter.sum_grad_squared_token, known.square().sum(0), name)
        assert_near(parameter.variance_token, known[counted.flatten()].var(0, correction=0), name)


def test_time_first_and_one_sample() -> None:
    torch.manual_seed(0)
    layer, head = nn.LSTM(3, 4).double(), nn.Linear(4, CLASSES).double()

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, head

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.layer(x)[0])
            return scores

    model = packprop.extend(Recurrent(), sample_axis=1)
    for samples in (SAMPLES, 1):
        x, y = torch.randn(TOKENS, samples, 3).double(), torch.randint(CLASSES, (TOKENS, samples))
        with packprop.backpack(extensions.BatchGrad(per="token")), packprop.record():
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        with packprop.disable():
            terms = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none") / y.numel()
        for name, parameter in model.named_parameters():
            rows = [torch.autograd.grad(term, parameter, retain_graph=True)[0] for term in terms]
            known = torch.stack(rows).unflatten(0, (TOKENS, samples)).transpose(0, 1)
            assert_near(parameter.grad_batch_token, known, name)


def test_nothing_counts() -> None:
    model, (words, targets, padding) = prepared()
    run(class_axis, model, (words, torch.full_like(targets, IGNORED), padding), *PER_TOKEN)
    for parameter in model.parameters():
        assert torch.equal(parameter.batch_l2_token, torch.zeros(SAMPLES, TOKENS).double())
        assert torch.equal(parameter.variance_token, torch.zeros_like(parameter))


def test_low_precision_hands_norms_over_in_float32() -> None:
    torch.manual_seed(0)
    model, batch = packprop.extend(Language(tied=True).bfloat16()), data()
    run(flattened, model, batch, *PER_TOKEN)
    weight = model.head.weight
    assert weight.grad_batch_token.dtype == torch.bfloat16
    assert weight.batch_l2_token.dtype == weight.variance_token.dtype == torch.float32
    assert_near(weight.grad_batch_token.sum((0, 1)), weight.grad, "head.weight", floor=1e-2, tolerance=2e-2)
