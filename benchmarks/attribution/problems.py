"""Small models with data on which they are trained again and again, on parts of it, from the same start."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.examples import load_digits

WORDS, LENGTH, SOURCES = 12, 12, 6
"""Of the synthetic text: words, those in a sequence, and chains that sequences come from."""

Data = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """A decoder of one block: causal attention of two heads, a perceptron, a head on all positions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Logits ``[n, t, words]``."""
        x = self.words(words) + self.places.weight[: words.shape[1]]
        q, k, v = (
            part.unflatten(2, (2, -1)).transpose(1, 2)
            for part in self.mixed(F.layer_norm(x, x.shape[2:])).chunk(3, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        x = x + self.narrow(F.gelu(self.wide(F.layer_norm(x, x.shape[2:]))))
        out: Tensor = self.head(x)
        return out


class ByToken(nn.Module):
    """The mean cross entropy of all tokens."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of logits ``[n, t, words]`` and targets ``[n, t]``."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def perceptron() -> nn.Module:
    """64, 32 and 10 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def convolutions() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def of_digits(trained: int, queries: int) -> tuple[Data, Data]:
    """Digits to train on, and others."""
    images, digits = load_digits()
    order = torch.randperm(len(digits))
    images, digits = images[order].view(-1, 1, 8, 8), digits[order]
    return (images[:trained], digits[:trained]), (images[-queries:], digits[-queries:])


def of_text(trained: int, queries: int) -> tuple[Data, Data]:
    """Sequences of some Markov chains, each with words that it likes to follow each other."""
    chains = (2.0 * torch.randn(SOURCES, WORDS, WORDS)).softmax(-1)
    count = trained + queries
    source = torch.randint(SOURCES, (count,))
    words = [torch.randint(WORDS, (count,))]
    for _ in range(LENGTH):
        words.append(torch.multinomial(chains[source, words[-1]], 1)[:, 0])
    text = torch.stack(words, 1)
    inputs, targets = text[:, :-1], text[:, 1:]
    return (inputs[:trained], targets[:trained]), (inputs[trained:], targets[trained:])


@dataclass(frozen=True)
class Problem:
    """A model with its data.

    Args:
        model: Makes the model.
        data: Makes the data to train on, and the queries.
        loss: Reduces by mean.
        trained: How many samples it is trained on.
        queries: How many other samples are asked for.
        steps: Steps of training.
        rate: The learning rate in the beginning.
        penalty: The factor of the L2 penalty, which is the damping of every method.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Data, Data]]
    loss: nn.Module
    trained: int
    queries: int
    steps: int
    rate: float = 2e-2
    penalty: float = 1e-3


PROBLEMS = {
    "digits, perceptron": Problem(perceptron, of_digits, nn.CrossEntropyLoss(), 500, 100, 400),
    "digits, convolutions": Problem(convolutions, of_digits, nn.CrossEntropyLoss(), 500, 100, 400),
    "text, decoder": Problem(LanguageModel, of_text, ByToken(), 300, 60, 400, 1e-2, 1e-2),
}


def trained(problem: Problem, start: nn.Module, data: Data, chosen: Tensor) -> nn.Module:
    """A copy of a model that is trained on the samples that are chosen ``[n]``, all in each step, by Adam."""
    model = copy.deepcopy(start)
    x, y = data[0][chosen], data[1][chosen]
    parameters = [*model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=problem.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.steps)
    for _ in range(problem.steps):
        optimizer.zero_grad()
        penalty = torch.stack([p.square().sum() for p in parameters]).sum()
        (problem.loss(model(x), y) + problem.penalty / 2 * penalty).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def losses(problem: Problem, model: nn.Module, data: Data) -> Tensor:
    """The loss of each sample ``[q]``: of a sequence, the mean over its tokens."""
    outputs = model(data[0])
    entries = F.cross_entropy(outputs.movedim(-1, 1), data[1], reduction="none")
    return entries.flatten(1).mean(1) if entries.dim() > 1 else entries


def subsets(count: int, samples: int) -> Tensor:
    """Random halves ``[m, n]``."""
    return torch.rand(count, samples).argsort(1) < samples // 2


def ranks(values: Tensor) -> Tensor:
    """Ranks along the last axis."""
    return values.argsort(-1).argsort(-1).double()


def datamodeling_score(foretold: Tensor, actual: Tensor, weights: Tensor | None = None) -> Tensor:
    """Rank correlations ``[q]`` over subsets of what is foretold and what came, both ``[q, m]``.

    ``weights``: how often each subset counts; ranks are those of all.
    """
    weights = torch.ones(foretold.shape[1]).double() if weights is None else weights
    share = weights / weights.sum()
    centred = []
    for each in (ranks(foretold), ranks(actual)):
        apart = each - (each * share).sum(1, keepdim=True)
        centred.append(apart / (apart.square() * share).sum(1, keepdim=True).sqrt())
    return (centred[0] * centred[1] * share).sum(1)


def bootstrapped(
    foretold: Sequence[Tensor], actual: Tensor, draws: int = 1000
) -> list[tuple[float, float, float]]:
    """Mean score, and the ends of its 95 % interval, over subsets and queries drawn anew; for each method."""
    generator = torch.Generator().manual_seed(0)
    queries, count = actual.shape
    found: list[list[float]] = [[] for _ in foretold]
    for _ in range(draws):
        drawn = torch.randint(count, (count,), generator=generator)
        weights = torch.bincount(drawn, minlength=count).double()
        which = torch.randint(queries, (queries,), generator=generator)
        for values, each in zip(found, foretold, strict=True):
            values.append(float(datamodeling_score(each[which], actual[which], weights).mean()))
    ends = [torch.tensor(values).quantile(torch.tensor([0.025, 0.975])).tolist() for values in found]
    means = [float(datamodeling_score(each, actual).mean()) for each in foretold]
    return [(mean, low, high) for mean, (low, high) in zip(means, ends, strict=True)]
