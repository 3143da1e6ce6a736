"""``python -m benchmarks.locating``: what it costs to find the samples; writes ``results/locating.json``.

They are looked for in the first pass, and in every pass of a model whose values keep the samples apart: here by
a mean over the batch behind a gate in a buffer that is zero. The same model with the batch itself behind that
gate is its measure: it computes as much, and its samples are looked for once. Both take turns in one process.
Seconds are those of the processor, for a machine that others use, too; medians count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.measure import Spread
from benchmarks.run import environment, write_results
from packprop import backpack, extend
from packprop.extensions import BatchGrad, BatchL2Grad
from packprop.types import Extension


class Gated(nn.Module):
    """Something of the whole batch, or of each sample, behind a closed gate.

    Args:
        below: What comes before the gate.
        head: What comes after it.
        over_batch: Whether it is the mean over the batch.
    """

    def __init__(self, below: nn.Module, head: nn.Module, over_batch: bool) -> None:
        super().__init__()
        self.below, self.head, self.over_batch = below, head, over_batch
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """What the head makes of it."""
        h = self.below(x)
        return self.head(h + self.gate * (h.mean(0) if self.over_batch else h))


def perceptron(over_batch: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Three wide layers, and 128 inputs."""
    below = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = Gated(below, nn.Linear(512, 10), over_batch)
    return model, torch.randn(128, 256), torch.randint(10, (128,))


def convolutional(over_batch: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Two convolutions, and 32 small images."""
    below = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU())
    model = Gated(below, nn.Sequential(nn.Flatten(), nn.Linear(2048, 10)), over_batch)
    return model, torch.randn(32, 1, 28, 28), torch.randint(10, (32,))


PROBLEMS: dict[str, Callable[[bool], tuple[nn.Module, Tensor, Tensor]]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
}


class Stepper:
    """Steps with gradients of single samples of one model, or with another quantity."""

    def __init__(self, name: str, over_batch: bool, quantity: type[Extension] = BatchGrad) -> None:
        torch.manual_seed(0)
        self.quantity = quantity
        self.model, self.x, self.y = PROBLEMS[name](over_batch)
        self.loss = extend(nn.CrossEntropyLoss())
        extend(self.model)

    def seconds(self, steps: int = 1) -> float:
        """Seconds of the processor for a step, on the average over a few."""
        start = time.process_time()
        for _ in range(steps):
            self.model.zero_grad(set_to_none=True)
            with backpack(self.quantity()):
                self.loss(self.model(self.x), self.y).backward()
        return (time.process_time() - start) / steps


def measure(name: str, rounds: int, steps: int) -> dict[str, object]:
    """Seconds of first and later steps, where samples are looked for once and in every pass."""
    once, always, norms = Stepper(name, False), Stepper(name, True), Stepper(name, False, BatchL2Grad)
    first, later, each, first_norms = [], [], [], []
    for stepper in (once, always, norms):
        stepper.seconds(steps)
    for turn in range(rounds):
        pair = (once, always) if turn % 2 else (always, once)
        taken = {stepper: stepper.seconds(steps) for stepper in pair}
        later.append(taken[once])
        each.append(taken[always] / taken[once])
        first.append(Stepper(name, False).seconds() / taken[once])
        first_norms.append(Stepper(name, False, BatchL2Grad).seconds() / norms.seconds(steps))
    return {
        "problem": name,
        "step_seconds": vars(Spread.of(later)),
        "first_over_later": vars(Spread.of(first)),
        "norms_first_over_later": vars(Spread.of(first_norms)),
        "every_pass_over_once": vars(Spread.of(each)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.locating", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="turns of each (default 21)")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn (default 10)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    records = []
    for name in PROBLEMS:
        record = measure(name, options.rounds, options.steps)
        records.append(record)
        print(json.dumps(record))
    write_results("locating", environment(options.threads, options.rounds, processes=1), records=records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
