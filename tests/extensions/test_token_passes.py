"""Quantities of single tokens in all kinds of passes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop import extensions
from packprop.errors import BadInput, PackpropError
from tests.references.running import assert_near
from tests.references.tokens import (
    CLASSES,
    IGNORED,
    PER_TOKEN,
    SAMPLES,
    TOKENS,
    WIDTH,
    Words,
    data,
    flattened,
    prepared,
    rows_of,
    run,
    terms_of,
)
from tests.selection import often, thorough


@thorough
@often(lambda kind: kind is extensions.BatchGrad)
@pytest.mark.parametrize("kind", [extensions.BatchGrad, extensions.BatchDiagGGNExact])
def test_any_number_of_columns_at_once_and_any_budget(kind: Any) -> None:
    model, batch = prepared()
    values = []
    for memory in (None, "60KiB", "1GiB"):
        asked = kind(per="token")
        words, targets, _ = batch
        model.zero_grad()
        with packprop.record():
            loss = flattened(model(words), targets)
        with packprop.backpack(asked, memory=memory):
            loss.backward()
        values.append(getattr(model.hidden.weight, asked.savefield))
    for value in values[1:]:
        assert_near(value, values[0], "hidden.weight")


def test_derivatives_of_statistics_of_tokens() -> None:
    model, batch = prepared(tied=True)
    named = dict(model.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        run(flattened, model, batch, *PER_TOKEN, create_graph=True)
    given = sum(p.batch_l2_token.sum() + p.variance_token.square().sum() for p in named.values())
    found = torch.autograd.grad(given, list(named.values()))
    words, targets, padding = batch
    with packprop.disable(), sdpa_kernel(SDPBackend.MATH):
        terms = terms_of(flattened, model(words, padding), targets).flatten()
        counted = (targets != IGNORED).flatten()
        rows = [
            torch.stack(parts)
            for parts in zip(
                *(torch.autograd.grad(term, list(named.values()), create_graph=True) for term in terms),
                strict=True,
            )
        ]
        wanted = sum(row.square().sum() + row[counted].var(0, correction=0).square().sum() for row in rows)
        expected = torch.autograd.grad(wanted, list(named.values()))
    for name, value, reference in zip(named, found, expected, strict=True):
        assert_near(value, reference, name)


def test_a_pass_to_some_parameters_and_inside_checkpoints() -> None:
    model, batch = prepared()
    rows = rows_of(flattened, model, batch)
    run(flattened, model, batch, *PER_TOKEN, inputs=[model.hidden.weight])
    assert_near(model.hidden.weight.grad_batch_token, rows["hidden.weight"], "hidden.weight")
    assert not hasattr(model.head.weight, "grad_batch_token")

    def checkpointed(scores: Tensor, targets: Tensor) -> Tensor:
        words, _, padding = batch
        again = torch.utils.checkpoint.checkpoint(model, words, padding, use_reentrant=False)
        return flattened(again, targets)

    run(checkpointed, model, batch, *PER_TOKEN)
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad_batch_token, rows[name], name)


def test_over_a_data_set_of_one_length() -> None:
    torch.manual_seed(0)
    model = Words().double()
    words, targets, _ = data()
    batches = [(words, targets), (words.flip(0), targets.flip(0))]
    result = packprop.compute(model, nn.CrossEntropyLoss(), batches, PER_TOKEN, progress=False)
    rows = result["grad_batch_token"]["language.hidden.weight"]
    assert rows.shape == (2 * SAMPLES, TOKENS, WIDTH, WIDTH)
    assert_near(rows[:SAMPLES], rows[SAMPLES:].flip(0), "hidden.weight")
    counted = torch.cat([targets, targets.flip(0)]) != IGNORED
    variance = result["variance_token"]["language.hidden.weight"]
    assert_near(variance, rows[counted].var(0, correction=0), "hidden.weight")


def test_over_a_data_set_of_several_lengths() -> None:
    model, loss = nn.Linear(3, CLASSES), nn.CrossEntropyLoss()

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.layer(x)
            return scores.mT

    batches = [(torch.randn(2, t, 3), torch.randint(CLASSES, (2, t))) for t in (4, 5)]
    packprop.compute(Flat(), loss, batches, [extensions.Variance(per="token")], progress=False)
    with pytest.raises(PackpropError, match="different lengths"):
        packprop.compute(Flat(), loss, batches, [extensions.BatchL2Grad(per="token")], progress=False)


def linear(shape: tuple[int, ...], loss: Callable[[Tensor], Tensor], extension: Any) -> nn.Module:
    """Run a pass through one layer."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Linear(5, 3))
    with packprop.backpack(extension), packprop.record():
        loss(model(torch.randn(*shape))).backward()
    return model


WITHOUT_POSITIONS = {
    "classes": ((4, 5), lambda out: F.cross_entropy(out, torch.tensor([0, 1, 2, 0]))),
    "one sample": ((1, 5), lambda out: F.cross_entropy(out, torch.tensor([0]))),
    "entries": ((4, 5), lambda out: F.mse_loss(out, torch.zeros_like(out))),
}


@pytest.mark.parametrize("name", sorted(WITHOUT_POSITIONS))
def test_losses_without_positions_are_refused(name: str) -> None:
    shape, loss = WITHOUT_POSITIONS[name]
    with pytest.raises(PackpropError, match="no axis of positions") as caught:
        linear(shape, loss, extensions.BatchGrad(per="token"))
    assert 'per="token"' in caught.value.asked
    assert "whose input has shape" in caught.value.where
    assert 'per="sample"' in caught.value.instead


def test_an_axis_of_one_position_is_one() -> None:
    model = linear((4, 5), lambda out: F.mse_loss(out[:, None], out.new_zeros(4, 1, 3)), PER_TOKEN[0])
    assert model.weight.grad_batch_token.shape == (4, 1, 3, 5)
    model = linear((4, 5), lambda out: F.mse_loss(out[..., None], out.new_zeros(4, 3, 1)), PER_TOKEN[0])
    assert model.weight.grad_batch_token.shape == (4, 3, 3, 5)


REFUSED = {
    "its terms are not known": lambda out: out.square().sum(),
    "without passing a recorded loss": lambda out: F.mse_loss(out, torch.zeros_like(out)) + out.square().sum(),
    "not linear in the loss": lambda out: (
        F.mse_loss(out, torch.zeros_like(out), reduction="none").sum((1, 2)).exp().sum()
    ),
    "at different positions": lambda out: F.l1_loss(out, torch.zeros_like(out)),
    "several losses share the rows": lambda out: sum(
        F.mse_loss(piece, torch.zeros_like(piece)) for piece in out.flatten(0, 1).split(3)
    ),
}


@pytest.mark.parametrize("why", sorted(REFUSED))
def test_refused(why: str) -> None:
    with pytest.raises(PackpropError, match=why):
        linear((4, 2, 5), REFUSED[why], extensions.BatchL2Grad(per="token"))


def test_hooks_may_look_but_not_change() -> None:
    model, batch = prepared()
    seen: list[Tensor] = []
    for change in (None, 2.0):

        def hooked(scores: Tensor, targets: Tensor, change: float | None = change) -> Tensor:
            scores.register_hook(seen.append if change is None else lambda grad: change * grad)
            return flattened(scores, targets)

        if change is None:
            run(hooked, model, batch, *PER_TOKEN)
            assert len(seen) == 1
        else:
            with pytest.raises(PackpropError, match="which changed the gradient"):
                run(hooked, model, batch, *PER_TOKEN)


def test_bad_arguments() -> None:
    for kind in (extensions.BatchL2Grad, extensions.BatchDiagGGNMC):
        with pytest.raises(BadInput, match="choose from 'sample', 'token'"):
            kind(per="word")
    with pytest.raises(TypeError):
        extensions.BatchDotGrad(per="token")
