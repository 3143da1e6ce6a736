"""``python -m benchmarks.monitor``: what ``packprop.Monitor`` costs; writes ``results/monitor.json``.

A plain training step beside loops that look at every 1st, 10th and 100th step, with the quantities that are
asked for by default. Steps that are monitored and steps that are not are timed by themselves, in turns with
plain ones. What a monitored step takes beyond a plain one, over n, is the price for looking at every n-th
step. What a step that is not monitored takes beyond a plain one is below what can be told from noise, and is
reported apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

import packprop
from benchmarks.measure import take_turns
from benchmarks.problems import PROBLEMS, Task
from benchmarks.run import environment, write_results

NAMES = ("sigmoid-mlp", "3c3d", "convolution", "language-model")
"""Problems."""

Step = Callable[[], None]


def training_step(task: Task) -> Step:
    """A plain step: forward pass, backward pass, a step of SGD whose rate changes nothing."""
    optimizer = torch.optim.SGD(task.model.parameters(), 1e-12)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(task.model(task.inputs), task.targets).backward()
        optimizer.step()

    return step


def watched(step: Step, monitor: packprop.Monitor, number: int | None) -> Step:
    """The same inside ``monitor.step()``: of a number whose turn it is not, or of one whose turn it is."""

    def inside() -> None:
        with monitor.step(number=number):
            step()

    return inside


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Seconds of a plain step, of one that is not monitored and of one that is; what loops of these take."""
    torch.manual_seed(0)
    task = PROBLEMS[name].build()
    step = training_step(task)
    monitor = packprop.Monitor(task.model, every=2, log=None)
    calls = {"plain": step, "not monitored": watched(step, monitor, 1), "monitored": watched(step, monitor, 0)}
    for call in [*calls.values()] * 2:
        call()
    timings = take_turns(calls, rounds)
    seconds = {name: timing.seconds.median for name, timing in timings.items()}
    other, own = (seconds[each] / seconds["plain"] for each in ("not monitored", "monitored"))
    return {
        "problem": name,
        "plain_seconds": seconds["plain"],
        "not_monitored_over_plain": other,
        "monitored_over_plain": own,
        "every": {str(every): 1 + (own - 1) / every for every in (1, 10, 100)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default 9)")
    parser.add_argument("--problems", nargs="+", default=NAMES, help="which ones")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [measured(name, options.rounds) for name in options.problems]
    print(json.dumps(found, indent=1))
    if not options.dry:
        write_results("monitor", environment(1, options.rounds, 1), problems=found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
