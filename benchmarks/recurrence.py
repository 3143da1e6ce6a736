"""``python -m benchmarks.recurrence``: per-sample gradients of recurrent layers, beside plain passes and a loop
over single samples; writes ``results/recurrence.json``.

The three are timed in turns within one process, in changing order. Seconds are those of the processor, for a
machine that others use, too. The median of the ratios counts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.measure import Spread
from benchmarks.run import environment, write_results
from packprop import backpack, extend
from packprop.extensions import BatchGrad

FEATURES, SIZE, CLASSES = 32, 64, 10
SAMPLES = (16, 128)


class OfLayer(nn.Module):
    """A recurrent layer, and logits from its last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(FEATURES, SIZE, batch_first=True), nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, c]``."""
        return self.head(self.layer(x)[0][:, -1])


class OfCell(nn.Module):
    """A loop over a cell, and logits from its last state."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(FEATURES, SIZE), nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, c]``."""
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: OfLayer(nn.LSTM), 40),
    "gru": (lambda: OfLayer(nn.GRU), 40),
    "rnn": (lambda: OfLayer(nn.RNN), 40),
    "lstm-cells": (lambda: OfCell(nn.LSTMCell), 20),
    "gru-cells": (lambda: OfCell(nn.GRUCell), 20),
}
"""Models, and how many steps they take."""


def contestants(name: str, samples: int) -> dict[str, Callable[[], None]]:
    """A plain training pass, one with per-sample gradients, and a loop that takes each sample alone."""
    make, steps = PROBLEMS[name]
    x, y = torch.randn(samples, steps, FEATURES), torch.randint(CLASSES, (samples,))
    plain, extended = make(), extend(make())
    function, extended_function = nn.CrossEntropyLoss(), extend(nn.CrossEntropyLoss())
    parameters = list(plain.parameters())

    def run_plain() -> None:
        plain.zero_grad()
        function(plain(x), y).backward()

    def run_extended() -> None:
        extended.zero_grad()
        with backpack(BatchGrad()):
            extended_function(extended(x), y).backward()

    def run_loop() -> None:
        rows = [
            torch.autograd.grad(function(plain(x[n : n + 1]), y[n : n + 1]) / samples, parameters)
            for n in range(samples)
        ]
        for gradients in zip(*rows, strict=True):
            torch.stack(gradients)

    return {"plain": run_plain, "packprop": run_extended, "loop": run_loop}


def measure(name: str, samples: int, rounds: int) -> dict[str, object]:
    """Seconds of each contestant, and ratios to the plain pass of the same turn."""
    torch.manual_seed(0)
    runs = contestants(name, samples)
    for run in runs.values():
        run()
        run()
    shuffle = random.Random(0)
    taken: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        order = list(runs)
        shuffle.shuffle(order)
        for who in order:
            start = time.process_time()
            runs[who]()
            taken[who].append(time.process_time() - start)
    record: dict[str, object] = {"problem": name, "samples": samples, "steps": PROBLEMS[name][1]}
    for who, seconds in taken.items():
        ratios = [own / plain for own, plain in zip(seconds, taken["plain"], strict=True)]
        record[f"{who}_seconds"] = vars(Spread.of(seconds))
        record[f"{who}_over_plain"] = vars(Spread.of(ratios))
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrence", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="only this; repeatable")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    records = []
    for name in options.problem or PROBLEMS:
        for samples in SAMPLES:
            records.append(measure(name, samples, options.rounds))
            print(json.dumps(records[-1]))
    if not options.problem:
        described = environment(options.threads, options.rounds, processes=1)
        write_results("recurrence", described, records=records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
