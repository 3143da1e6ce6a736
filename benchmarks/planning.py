"""``python -m benchmarks.planning``: what plans predict beside what passes take; ``results/planning.json``.

For each problem, extension and budget: the peak that the plan predicts, the peak of tensor storage that is
counted in a real pass with that budget, the time over a pass without one, and the time that planning takes.
Then the plans themselves, printed: of the convolution tutorial's network at three budgets, and of a decoder
with 6.7 billion parameters that is never materialised.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import packprop
from benchmarks.decoder import Decoder
from benchmarks.measure import MIB
from benchmarks.problems import PROBLEMS, Task
from benchmarks.run import environment, write_results
from packprop import BadInput, extensions
from packprop.engine.memory.bytes import byte_text
from packprop.engine.memory.live import LiveBytes
from packprop.engine.memory.plan import BudgetTooSmall

ASKED = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.DiagGGNMC,
    extensions.KFAC,
)
NAMES = ("convolution", "auto-encoder", "extension-hook", "3c3d", "all-cnn-c")
SHARES = (1.0, 0.9, 0.7, 0.5)
"""Budgets, as parts of what the default takes above the least that is possible."""


STEPS = 3
"""Steps whose peak is measured, from the first one of a model."""


def passed(task: Task, model: nn.Module, extension: Any, plan: Any) -> float:
    """One step of a training loop, with the results of the one before still there; seconds."""
    model.zero_grad()
    start = time.perf_counter()
    loss = packprop.extend(task.loss)(model(task.inputs), task.targets)
    with packprop.backpack(extension, memory=plan):
        loss.backward()
    return time.perf_counter() - start


def points(name: str, rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured peaks of one problem."""
    found = []
    for make in ASKED:
        task = PROBLEMS[name].build()
        model = packprop.extend(task.model)
        batch = (task.inputs, task.targets)
        start = time.perf_counter()
        free = packprop.plan(model, task.loss, batch, [make()])
        planning = time.perf_counter() - start
        try:
            packprop.plan(model, task.loss, batch, [make()], memory=1)
        except BudgetTooSmall as error:
            least = min(free.peak, error.floor)
        seen = set()
        for share in SHARES:
            budget = int(least + share * (free.peak - least))
            plan = packprop.plan(model, task.loss, batch, [make()], memory=budget)
            if plan.chunk_sizes in seen:
                continue
            seen.add(plan.chunk_sizes)
            fresh = PROBLEMS[name].build()  # the first step of a model finds where the samples are
            running = packprop.extend(fresh.model)
            live = LiveBytes()
            live.own([*running.parameters(), fresh.inputs, fresh.targets], "there before")
            gc.collect()
            with live:
                for _ in range(STEPS):
                    passed(fresh, running, make(), plan)
            ratios = [
                passed(fresh, running, make(), plan) / passed(fresh, running, make(), None)
                for _ in range(rounds)
            ]
            found.append(
                {
                    "problem": name,
                    "extension": make.__name__,
                    "budget_bytes": budget,
                    "predicted_bytes": plan.peak,
                    "measured_bytes": live.peak,
                    "time_over_default": median(ratios),
                    "planning_seconds": planning,
                    "chunks": plan.chunk_sizes._asdict(),
                }
            )
            print(
                f"{name:15s}{make.__name__:15s}budget {byte_text(budget):>9s}"
                f"  predicted {byte_text(plan.peak):>9s}"
                f"  measured {byte_text(live.peak):>9s}  time {median(ratios):.2f} x",
                flush=True,
            )
    return found


def printed() -> dict[str, str]:
    """Plans as they print."""
    task = PROBLEMS["convolution"].build()
    asked = [extensions.BatchL2Grad(), extensions.DiagGGNExact()]
    batch, least = (task.inputs, task.targets), 0
    most = packprop.plan(task.model, task.loss, batch, asked, device="cuda").peak
    try:
        packprop.plan(task.model, task.loss, batch, asked, memory=1, device="cuda")
    except BudgetTooSmall as error:
        least = error.floor
    plans = {}
    for share in (1.0, 0.5, 0.0, -0.1):
        budget = int(least + share * (most - least))
        title = f"convolution tutorial on a GPU, BatchL2Grad and DiagGGNExact, memory={byte_text(budget)}"
        try:
            plan = packprop.plan(task.model, task.loss, batch, asked, memory=budget, device="cuda")
            plans[title] = str(plan)
        except BadInput as error:
            plans[title] = str(error)
    with torch.device("meta"):
        model = Decoder().bfloat16()
        tokens = torch.zeros(4, 2048, dtype=torch.long)
    start = time.perf_counter()
    plan = packprop.plan(
        model,
        nn.CrossEntropyLoss(),
        (tokens, tokens),
        [extensions.BatchL2Grad()],
        memory="80GiB",
        device="cuda",
    )
    seconds = time.perf_counter() - start
    count = sum(p.numel() for p in model.parameters())
    lines = str(plan).splitlines()
    text = "\n".join([*lines[:14], f" ... {len(plan.lines) - 16} lines of the same kind ...", *lines[-19:]])
    title = f"decoder, {count / 1e9:.1f} billion parameters in bfloat16, 4 x 2048 tokens, BatchL2Grad, 80 GiB"
    return plans | {f"{title}; planned in {seconds:.0f} s": text}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed pairs of passes (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    described = environment(options.threads, options.rounds, processes=1)
    found = [point for name in NAMES for point in points(name, options.rounds)]
    write_results("planning", described, plans=printed(), points=found)
    worst = max(abs(p["predicted_bytes"] / p["measured_bytes"] - 1) for p in found)
    print(f"largest difference {worst:.1%} over {len(found)} points, {MIB} bytes a MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
