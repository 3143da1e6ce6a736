"""``python -m benchmarks.recording``: what it costs to be extended where nothing is asked for; writes
``results/recording.json``.

Each model is trained plainly, extended, and watched by a torch-function mode and by hooks that do nothing, the
least that watching in Python can cost. These take turns within one process: a turn times a few steps (forward
pass, loss, backward pass) of each, in changing order. Seconds are those of the processor, for a machine that
others use, too. The median of the ratios counts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.measure import Spread
from benchmarks.problems import PROBLEMS as SUITES
from benchmarks.run import environment, write_results
from packprop import extend

Problem = tuple[nn.Module, Tensor, Tensor]


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention to earlier positions, then a small network for each."""
        samples, positions, width = x.shape
        parts = self.mix(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(samples, positions, self.heads, -1).transpose(1, 2) for p in parts)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(samples, positions, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Decoder(nn.Module):
    """A small language model in the manner of GPT-2."""

    def __init__(self, words: int = 1000, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, c, t]``."""
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(h))).transpose(1, 2)


class Excite(nn.Module):
    """Channels weighted by what is in all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The channels times their weights."""
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """An inverted residual block in the manner of MobileNetV3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide)),
            *(nn.Hardswish(), Excite(wide), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return x + self.body(x)


class Cells(nn.Module):
    """A loop over the cell of an LSTM."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the last step."""
        state = (x.new_zeros(len(x), self.cell.hidden_size), x.new_zeros(len(x), self.cell.hidden_size))
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


def decoder() -> Problem:
    """A language model and sentences."""
    return Decoder(), torch.randint(1000, (8, 64)), torch.randint(1000, (8, 64))


def mobile() -> Problem:
    """A convolutional network of many small functions, and images."""
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    body = nn.Sequential(stem, *(Inverted(16) for _ in range(8)))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    return model, torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def cells() -> Problem:
    """A loop over cells, and sequences."""
    return Cells(), torch.randn(16, 50, 64), torch.randint(10, (16,))


def perceptron() -> Problem:
    """Three wide layers."""
    layers = (nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(*layers), torch.randn(128, 256), torch.randint(10, (128,))


def of_a_suite(name: str) -> Problem:
    """The model and data of a suite of ``benchmarks.run``."""
    task = SUITES[name].build()
    return task.model, task.inputs, task.targets


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "decoder": decoder,
    "mobile": mobile,
    "cells": cells,
    "perceptron": perceptron,
    **{
        name: partial(of_a_suite, name)
        for name in (
            *("extension-hook", "small-perceptron", "small-language-model", "language-model"),
            *("recurrent-language-model", "vision-transformer", "convnext"),
        )
    },
}


class Empty(TorchFunctionMode):
    """Sees every torch function, and does nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Watched(nn.Module):
    """A module under an empty mode, with an empty hook on each part."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for part in module.modules():
            part.register_forward_pre_hook(lambda *_: None, with_kwargs=True)

    def forward(self, *args: Any) -> Any:
        """What the module returns."""
        with Empty():
            return self.module(*args)


def seconds_of(problem: Problem, loss_function: nn.Module, steps: int) -> float:
    """Seconds of the processor for a training step, on average over a few."""
    model, x, y = problem
    start = time.process_time()
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss_function(model(x), y).backward()
    return (time.process_time() - start) / steps


def measure(name: str, rounds: int, steps: int) -> dict[str, object]:
    """Seconds of a step, plain and extended, and the ratios of each turn."""
    torch.manual_seed(0)
    plain, extended, (model, x, y) = PROBLEMS[name](), PROBLEMS[name](), PROBLEMS[name]()
    extend(extended[0])
    sides = [
        (plain, nn.CrossEntropyLoss()),
        (extended, extend(nn.CrossEntropyLoss())),
        ((Watched(model), x, y), Watched(nn.CrossEntropyLoss())),
    ]
    for side in sides:
        seconds_of(*side, steps)
    shuffle, taken = random.Random(0), []
    for _ in range(rounds):
        order = [0, 1, 2]
        shuffle.shuffle(order)
        turn = {place: seconds_of(*sides[place], steps) for place in order}
        taken.append((turn[0], turn[1], turn[2]))
    return {
        "problem": name,
        "plain_seconds": vars(Spread.of([a for a, _, _ in taken])),
        "extended_seconds": vars(Spread.of([b for _, b, _ in taken])),
        "extended_over_plain": vars(Spread.of([b / a for a, b, _ in taken])),
        "empty_over_plain": vars(Spread.of([c / a for a, _, c in taken])),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="turns of each (default 41)")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="only this; repeatable")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    records = []
    for name in options.problem or PROBLEMS:
        record = measure(name, options.rounds, options.steps)
        records.append(record)
        print(json.dumps(record))
    if not options.problem:
        described = environment(options.threads, options.rounds, processes=1)
        write_results("recording", described, records=records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
