"""The loss of each token of one sample: found where the outputs give the loss, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.applications.reports.profile.said import Said, said_of

TOKENS = torch.tensor([[3, 0, 1, 4, 2, 2]])
SOME = torch.tensor([[3, -100, 1, 4, -100, 2]])


class Table(nn.Module):
    """Logits of the next token from each token alone."""

    def __init__(self, arranged: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.arranged = nn.Embedding(5, 5), arranged

    def forward(self, tokens: Tensor) -> Any:
        return self.arranged(self.table(tokens))


class Own(Table):
    """A model that shifts the labels and computes its loss itself, as those of Hugging Face do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.table(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def said(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> Said:
    return said_of("Asked.", model, loss, inputs, targets, torch.device("cpu"))


def one_by_one(inputs: Tensor, targets: Tensor) -> list[float | None]:
    """One token at a time; the model knows no others."""
    logits = Table()(inputs)[0].detach().double().log_softmax(1)
    return [
        None if token == -100 else -float(logits[place, token])
        for place, token in enumerate(targets[0].tolist())
    ]


@pytest.mark.parametrize("targets", [TOKENS.flip(1), SOME], ids=["all", "some left out"])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Table(), over_tokens),
        (Table(), lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")),
        (Table(lambda logits: logits.transpose(1, 2)), nn.CrossEntropyLoss()),
        (Table(lambda logits: {"logits": logits}), lambda out, y: over_tokens(out["logits"], y)),
        (Table().bfloat16(), over_tokens),
    ],
    ids=["last axis", "sum", "second axis", "mapping", "bfloat16"],
)
def test_losses_of_tokens(model: nn.Module, loss: Any, targets: Tensor) -> None:
    found = said(model, loss, TOKENS, targets)
    expected = one_by_one(TOKENS, targets)
    assert found.token_losses is not None
    near = 1e-2 if next(model.parameters()).dtype is torch.bfloat16 else 1e-5
    assert found.token_losses == [None if each is None else pytest.approx(each, rel=near) for each in expected]
    right = int((Table()(TOKENS).argmax(-1) == targets).sum())
    assert found.output == f"{right} of {sum(each is not None for each in expected)} tokens right"


def test_a_model_that_shifts_the_labels_itself() -> None:
    found = said(Own(), None, {"input_ids": TOKENS, "labels": SOME}, None)
    expected = one_by_one(TOKENS[:, :-1], SOME[:, 1:])
    assert found.token_losses == [None, *(None if each is None else pytest.approx(each) for each in expected)]
    assert found.loss == pytest.approx(sum(filter(None, expected)) / 3)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.3)


@pytest.mark.parametrize(
    ("model", "loss", "targets"),
    [
        (Table(), smoothed, TOKENS),
        (Table(), lambda logits, y: 3 * over_tokens(logits, y), TOKENS),
        (Table(), lambda logits, y: logits.sum(), TOKENS + 3),
        (Table(), lambda logits, y: logits.sum(), torch.full_like(TOKENS, -100)),
        (Table(), lambda logits, y: (logits - y).square().mean(), torch.randn(1, 6, 5)),
        (Table(lambda logits: logits[:, :4]), lambda logits, y: over_tokens(logits, y[:, :4]), TOKENS),
    ],
    ids=["smoothed", "scaled", "no classes", "all left out", "numbers", "other length"],
)
def test_nothing_is_said_of_tokens_where_their_losses_are_not_the_loss(
    model: nn.Module, loss: Any, targets: Tensor
) -> None:
    found = said(model, loss, TOKENS, targets)
    assert found.loss == pytest.approx(float(loss(model(TOKENS), targets)))
    assert (found.output, found.token_losses) == (None, None)
