"""Small models whose parameters and inputs can be held in bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop.types import Extension
from tests.references.oracle import Problem

# Over the largest entry of a tensor: activations, their cotangents and, in squares, both of two factors were
# rounded.
NEAR = {torch.bfloat16: 3e-2, torch.float16: 4e-3}

SIZE = 6


class Attention(nn.Module):
    """Self-attention over three positions, and a layer on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one with second derivatives
            out: Tensor = self.head(x + self.attention(x, x, x, need_weights=False)[0]).mean(1)
        return out


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (linear, lambda: torch.randn(SIZE, 5)),
    "convolution": (convolution, lambda: torch.randn(SIZE, 2, 4, 4)),
    "embedding": (embedding, lambda: torch.randint(7, (SIZE, 2))),
    "attention": (Attention, lambda: torch.randn(SIZE, 3, 4)),
}


def problem(name: str, dtype: torch.dtype, held: torch.dtype) -> Problem:
    """A model in ``dtype``; all of its numbers can be held in ``held``."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    for parameter in model.parameters():  # no zeros and ones, which are easy
        nn.init.normal_(parameter, std=0.5)
    model = model.to(held).to(dtype)
    inputs = batch()
    inputs = inputs.to(held).to(dtype) if inputs.is_floating_point() else inputs
    targets, loss = torch.randint(3, (SIZE,)), nn.CrossEntropyLoss()
    return Problem.of_batch(model, loss, inputs, targets, SIZE)


def observed(
    found: Problem, loss: nn.Module, targets: Tensor, asked: Iterable[Extension], held: torch.dtype, mixed: bool
) -> Problem:
    """A problem after a pass with extensions; ``mixed``: its forward pass runs under autocast to ``held``."""
    packprop.extend(found.model)
    packprop.extend(loss)
    with torch.autocast("cpu", dtype=held, enabled=mixed):
        value = loss(found.model(found.inputs), targets)
    with packprop.backpack(*asked):
        value.backward()
    return found
