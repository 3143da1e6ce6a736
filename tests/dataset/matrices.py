"""Small models of several kinds with their data, and the dense matrices of their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, STEPS, WORDS = 10, 3, 5


class Attention(nn.Module):
    """An embedding, attention over positions, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.mixing = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation=F.gelu)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.mixing(self.embedding(words)))
        return out.flatten(0, 1)


class Experts(nn.Module):
    """Each sample goes to one of two experts, so that a batch may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, :1] > 0).to(x.dtype)
        return (1 - chosen) * self.experts[0](x).tanh() + chosen * self.experts[1](x).tanh()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))


class Recurrent(nn.Module):
    """The last output of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrence, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrence(x)[0][:, -1])
        return out


def classes(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, *shape, dtype=torch.float64), torch.randint(3, (N,))


def words() -> tuple[Tensor, Tensor]:
    targets = torch.randint(WORDS, (N, STEPS))
    targets[:4, 0] = -100
    return torch.randint(WORDS, (N, STEPS)), targets


def of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.flatten())


Problem = tuple[nn.Module, Any, tuple[Tensor, Tensor]]

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "convolution": lambda: (convolution(), nn.CrossEntropyLoss(label_smoothing=0.1), classes(1, 4, 4)),
    "sum": lambda: (nn.Sequential(nn.Linear(4, 3)), nn.CrossEntropyLoss(reduction="sum"), classes(4)),
    "weights": lambda: (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
        classes(4),
    ),
    "attention-tied": lambda: (Attention(), of_words, words()),
    "experts": lambda: (Experts(), nn.CrossEntropyLoss(), classes(4)),
    "recurrent": lambda: (Recurrent(), lambda f, y: 2 * F.mse_loss(f, F.one_hot(y, 3).double()), classes(2, 4)),
}


def problem(name: str) -> Problem:
    torch.manual_seed(0)
    model, loss, data = PROBLEMS[name]()
    return model.double().eval(), loss, data


def rows(outputs: Tensor, parameters: list[Tensor]) -> Tensor:
    """Derivatives of each entry in all parameters."""
    found = []
    for entry in outputs.flatten():
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        slopes = torch.autograd.grad(entry, parameters, **options)
        found.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(found)


def dense(matrix: str, model: nn.Module, loss: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    """The matrix, from the loss of one batch of all samples."""
    parameters = [*model.parameters()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        outputs = model(data[0])
        if matrix == "hessian":
            slopes = torch.autograd.grad(loss(outputs, data[1]), parameters, create_graph=True)
            return rows(torch.cat([slope.flatten() for slope in slopes]), parameters)
        at = outputs.detach()
        middle = torch.autograd.functional.hessian(lambda flat: loss(flat.view_as(at), data[1]), at.flatten())
        jacobian = rows(outputs, parameters)
    return jacobian.mT @ middle @ jacobian
