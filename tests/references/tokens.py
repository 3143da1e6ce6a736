"""A small language model, its losses, and their terms one after the other by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions

SAMPLES, TOKENS, WIDTH, CLASSES = 3, 4, 6, 7
IGNORED = -100


class Language(nn.Module):
    """A causal transformer of one block, with a mask of padding and a head that is tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.places = nn.Parameter(0.3 * torch.randn(TOKENS, WIDTH))
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(words) + self.places
        query, key, value = self.projections(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        mask = torch.ones(TOKENS, TOKENS).tril().bool()
        if padding is not None:
            mask = mask & ~padding[:, None, None]
        attended = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
        scores: Tensor = self.head(x + torch.tanh(self.hidden(attended)))
        return scores


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Words, targets and padding: one sample is whole, one is padded, one has an ignored token inside."""
    words = torch.randint(CLASSES, (SAMPLES, TOKENS))
    targets = torch.randint(CLASSES, (SAMPLES, TOKENS))
    padding = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
    padding[1, 2:] = True
    targets[1, 2:] = IGNORED
    targets[2, 1] = IGNORED
    return words, targets, padding


def flattened(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def class_axis(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.mT, targets, reduction="sum")


def weighted(scores: Tensor, targets: Tensor) -> Tensor:
    """One's own mean of terms, with weights of one's own."""
    terms = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    weights = torch.linspace(0, 2, terms.numel()).to(terms) * (targets.flatten() != IGNORED)
    return (weights * terms).sum() / weights.sum()


def in_pieces(scores: Tensor, targets: Tensor) -> Tensor:
    """Two positions of all samples at a time."""
    pairs = zip(scores.split(2, 1), targets.split(2, 1), strict=True)
    pieces = [F.cross_entropy(s.flatten(0, 1), y.flatten(), reduction="sum") for s, y in pairs]
    return 0.5 * (pieces[1] + pieces[0])


def likelihoods(scores: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(scores.log_softmax(-1).flatten(0, 1), targets.flatten())


def regression(scores: Tensor, targets: Tensor) -> Tensor:
    """A row of numbers for each token; none is ignored."""
    return F.mse_loss(scores, F.one_hot(targets.clamp(min=0), CLASSES).to(scores))


LOSSES = [flattened, class_axis, weighted, in_pieces, likelihoods, regression]
Loss = Callable[[Tensor, Tensor], Tensor]
Named = dict[str, Tensor]


def terms_of(loss: Loss, scores: Tensor, targets: Tensor) -> Tensor:
    """The terms of a loss, each by itself ``[n, t]``."""
    if loss is regression:
        hot = F.one_hot(targets.clamp(min=0), CLASSES).to(scores)
        return (scores - hot).square().sum(-1) / scores.numel()
    counted = targets != IGNORED
    chosen = targets.clamp(min=0)[..., None]
    terms = -scores.log_softmax(-1).gather(-1, chosen)[..., 0] * counted
    if loss is weighted:
        weights = torch.linspace(0, 2, terms.numel()).to(terms).view_as(terms) * counted
        return weights * terms / weights.sum()
    number = int(counted.sum())
    factors = {flattened: 1 / number, likelihoods: 1 / number, in_pieces: 0.5}
    return terms * factors.get(loss, 1.0)


def rows_of(loss: Loss, model: nn.Module, batch: Any) -> Named:
    """Gradients of single tokens ``[n, t, *p]``, one after the other."""
    with packprop.disable():
        words, targets, padding = batch
        terms = terms_of(loss, model(words, padding), targets)
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(term, list(named.values()), retain_graph=True) for term in terms.flatten()]
    return {
        name: torch.stack(parts).unflatten(0, (SAMPLES, TOKENS))
        for name, parts in zip(named, zip(*rows, strict=True), strict=True)
    }


def run(loss: Loss, model: nn.Module, batch: Any, *asked: Any, **options: Any) -> None:
    words, targets, padding = batch
    model.zero_grad()
    with packprop.backpack(*asked), packprop.record():
        loss(model(words, padding), targets).backward(**options)


def prepared(tied: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return packprop.extend(Language(tied).double()), data()


PER_TOKEN = [
    kind(per="token")
    for kind in (
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.SumGradSquared,
        extensions.Variance,
    )
]


class Words(nn.Module):
    """A language model for `check_extension`: one input."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language(tied=True)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.language(words)
        return scores.mT
