"""Models, losses and batches of the steps, each built anew from its name on the device that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import packprop
from benchmarks.decoder import Decoder
from benchmarks.problems import (
    CausalModel,
    ClassesSecond,
    First,
    Task,
    adapted,
    random_images,
    random_vectors,
    tokens,
)
from packprop.engine.tensors.nesting import map_tensors


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


def _convolutions(width: int = 8) -> nn.Module:
    """Batch normalisation in evaluation mode among convolutions, one of them in groups."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, groups=2),
        nn.GroupNorm(2, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(10),
    ).eval()


def _recurrent(kind: type[nn.RNNBase]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Embedding(11, 6),
        kind(6, 8, num_layers=2, batch_first=True),
        First(),
        nn.Linear(8, 5),
        ClassesSecond(),
    )


def _decoder(words: int, layers: int, width: int, heads: int, hidden: int) -> Callable[[], nn.Module]:
    return lambda: Decoder(layers, width, heads, hidden, words)


def _adapted_decoder(
    words: int, layers: int, width: int, heads: int, hidden: int, key_heads: int, rank: int
) -> Callable[[], nn.Module]:
    return lambda: adapted(Decoder(layers, width, heads, hidden, words, key_heads), rank)


def _gpt(words: int, width: int, heads: int, layers: int, length: int) -> Callable[[], nn.Module]:
    return lambda: CausalModel(words, width, heads, layers, length)


class TokenLoss(nn.CrossEntropyLoss):
    """Cross entropy of logits ``[n, c, t]`` as ``[n*t, c]``: GPUs are slow if classes do not lie together."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().forward(logits.mT.flatten(0, 1), targets.flatten())


class Maker(NamedTuple):
    """Makes a model, its inputs and targets, and its loss."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss


SMALL: dict[str, Maker] = {
    "mlp": Maker(_mlp, lambda: random_vectors(6, 12, 10)),
    "convolutions": Maker(_convolutions, lambda: random_images(4, size=9)),
    "lstm": Maker(_recurrent(nn.LSTM), lambda: tokens(4, 5, 6)),
    "gru": Maker(_recurrent(nn.GRU), lambda: tokens(4, 5, 6)),
    "gpt": Maker(_gpt(13, 16, 2, 2, 6), lambda: tokens(4, 13, 6)),
    "llama": Maker(_decoder(13, 2, 16, 2, 24), lambda: tokens(4, 13, 6), TokenLoss),
    "adapters": Maker(
        _adapted_decoder(13, 2, 16, 4, 24, key_heads=2, rank=2), lambda: tokens(4, 13, 6), TokenLoss
    ),
}
"""For values: every kind of node, few numbers."""

MEDIUM: dict[str, Maker] = {
    "mlp": Maker(
        lambda: nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ),
        lambda: random_vectors(256, 784, 10),
    ),
    "convolutions": Maker(lambda: _convolutions(64), lambda: random_images(64, size=32)),
    "gpt": Maker(_gpt(8192, 256, 4, 4, 256), lambda: tokens(8, 8192, 256), TokenLoss),
}
"""For bytes, kernels and graphs: a few milliseconds each."""

LARGE: dict[str, Maker] = {
    "gpt2": Maker(_gpt(50257, 768, 12, 12, 1024), lambda: tokens(32, 50257, 1024), TokenLoss),
    "llama-1b": Maker(_decoder(32000, 16, 2048, 32, 5632), lambda: tokens(16, 32000, 1024), TokenLoss),
    "qwen-7b, adapters": Maker(
        _adapted_decoder(152064, 28, 3584, 28, 18944, key_heads=4, rank=16),
        lambda: tokens(8, 152064, 1024),
        TokenLoss,
    ),
}
"""For speed, in bfloat16: GPT-2's shape with a head of its own, 163 million parameters; 953 million; and the
shape of Qwen2.5-7B, frozen, with adapters of rank 16 at all linear layers of the blocks."""


def built(makers: dict[str, Maker], name: str, device: str, dtype: torch.dtype = torch.float32) -> Task:
    """Build a task; the same weights on every device unless it is large, rounded to the precision."""
    maker = makers[name]
    torch.manual_seed(0)
    inputs, targets = maker.data()
    with torch.device(device if makers is LARGE else "cpu"):
        made = maker.model()
    if any(isinstance(p, nn.UninitializedParameter) for p in made.parameters()):
        made(inputs)
    task = Task(made, maker.loss(), inputs, targets)
    return moved(task, device, dtype)


def moved(task: Task, device: str, dtype: torch.dtype) -> Task:
    """Move a task; numbers that are no classes take the precision."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    return replace(
        task,
        model=task.model.to(device, dtype),
        inputs=map_tensors(move, task.inputs),
        targets=move(task.targets),
    )


def passed(task: Task, *asked: Any, memory: Any = None) -> Tensor:
    """One forward and backward pass of an extended model; returns the loss."""
    task.model.zero_grad()
    loss: Tensor = task.loss(task.model(task.inputs), task.targets)
    if asked:
        with packprop.backpack(*asked, memory=memory):
            loss.backward()
    else:
        loss.backward()
    return loss.detach()


def extended(task: Task) -> Task:
    """Extend a task's model and loss; its passes without extensions cost what they cost before."""
    packprop.extend(task.model)
    packprop.extend(task.loss)
    return task


def source() -> torch.Generator:
    """The same draws on every device: they come from the CPU."""
    return torch.Generator().manual_seed(0)
