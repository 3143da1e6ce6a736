"""A head that gives log-probabilities alone, by a function of its own, as trainers of language models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import assert_rows_of_terms

WORDS, WIDTH, CHUNK = 11, 6, 4
IGNORED = -100


class LogProbabilities(torch.autograd.Function):
    """As ``ChunkedLogProbFunction`` of trl: a few words at a time, and outputs that are asked for at times."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        scores = torch.cat([(hidden.to(ctx.dtype) @ part.to(ctx.dtype).T) for part in weight.split(CHUNK)], 1)
        scores = scores.to(torch.promote_types(hidden.dtype, torch.float32))
        total, correct = scores.logsumexp(1), scores.argmax(1) == targets
        ctx.save_for_backward(hidden, weight, targets, total)
        ctx.mark_non_differentiable(correct)
        spread = total - (scores.softmax(1) * scores).sum(1) if entropy else None
        return scores.gather(1, targets[:, None])[:, 0] - total, spread, None, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given, (hidden, weight, targets, total) = gradients[0], ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden, dtype=total.dtype)
        of_weight = torch.zeros_like(weight, dtype=total.dtype)
        for start in range(0, WORDS, CHUNK):
            part = weight[start : start + CHUNK].to(ctx.dtype)
            scores = (hidden.to(ctx.dtype) @ part.T).to(total.dtype)
            hit = torch.arange(start, start + len(part)) == targets[:, None]
            slope = (given[:, None] * (hit.to(total.dtype) - (scores - total[:, None]).exp())).to(ctx.dtype)
            of_hidden += slope.to(total.dtype) @ part.to(total.dtype)
            of_weight[start : start + CHUNK] += slope.to(total.dtype).T @ hidden.to(total.dtype)
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None, None


class LanguageModel(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor, entropy: bool = True) -> dict[str, Any]:
        hidden, targets = self.body(self.table(tokens)).tanh(), labels.clamp(min=0).flatten()
        found = LogProbabilities.apply(hidden.flatten(0, 1), self.head.weight, targets, entropy)
        chosen, spread, _, correct = (None if each is None else each.view(labels.shape) for each in found)
        return {"log_probs": chosen.masked_fill(labels == IGNORED, 0), "entropy": spread, "correct": correct}


def batch() -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(WORDS, (4, 8)), torch.randint(WORDS, (4, 8))
    labels[1, 5:] = labels[3, 2:] = IGNORED
    return tokens, labels


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_each_sample_has_its_gradient(tied: bool, entropy: bool) -> None:
    """Outputs that are ``None``, or that nothing takes, need no place for the samples."""
    torch.manual_seed(0)
    model, (tokens, labels) = packprop.extend(LanguageModel(tied).double()), batch()
    terms = -model(tokens, labels, entropy)["log_probs"].sum(1) / (labels != IGNORED).sum()
    loss = -model(tokens, labels, entropy)["log_probs"].sum() / (labels != IGNORED).sum()
    assert_rows_of_terms(terms, loss, model.parameters())


def test_its_rounding_is_not_taken_for_a_backward_function_that_is_not_linear() -> None:
    """Under autocast it computes in bfloat16, and what it takes and gives is in float32."""
    torch.manual_seed(0)
    model, (tokens, labels) = packprop.extend(LanguageModel(tied=True)), batch()
    rows = []
    for low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = -model(tokens, labels)["log_probs"].sum()
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        rows.append(model.table.weight.grad_batch)
    assert 0 < (rows[0] - rows[1]).abs().amax() < 0.05 * rows[1].abs().amax()


class Coarse(torch.autograd.Function):
    """Rounds gradients, more than any precision does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        step = gradient.abs().amax() / 7
        return (gradient / step).round() * step


def test_rounding_beyond_the_lowest_precision_is_refused() -> None:
    layer = nn.Linear(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = Coarse.apply(packprop.extend(layer)(torch.randn(4, 3)).float())
    with (
        pytest.raises(PackpropError, match="not linear"),
        packprop.backpack(extensions.BatchGrad()),
    ):
        packprop.extend(nn.MSELoss())(out, torch.randn(4, 2)).backward()
