"""``python -m benchmarks.store``: writing, searching, reading and projecting; ``results/store.json``.

Writing: projected gradients of 100,000 samples, 4,096 numbers each, in half precision. The same passes run with
and without writing them, some batches of each in turn; the rate with writing over the rate without. Searching:
the exact ten largest inner products of 100 queries in that store. Reading: all rows of that store, from disk
and from the page cache, and the search: time with checksums over time without (rows are compared when they are
first read, and not again). Projecting: a pass with Kronecker projections over a plain one, for the language
model of the suites (4 blocks of width 256, 256 tokens, 8 samples), in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import packprop
from benchmarks.measure import Spread
from benchmarks.problems import PROBLEMS
from benchmarks.run import environment, write_results
from packprop.extensions import BatchGrad, Projected

DIMENSION, BATCH = 4096, 500


def perceptron() -> nn.Module:
    """Whose pass takes less than that of almost anything else."""
    layers = [nn.Linear(3 * 32 * 32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def convolutions() -> nn.Module:
    """A small network for small images."""
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 8 * 8, 10))


MODELS = (perceptron, convolutions)


def writing(make: Callable[[], nn.Module], folder: Path, samples: int) -> dict[str, Any]:
    """Seconds for passes over the same batches with and without writing, in turns of some batches."""
    torch.manual_seed(0)
    model = packprop.extend(make())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    asked = Projected(BatchGrad(), DIMENSION, kind="kronecker")
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    turn = 10

    def drop() -> None:
        for parameter in model.parameters():
            del parameter.grad_batch_projected

    def passes(finish: Callable[[], None]) -> float:
        start = time.perf_counter()
        for _ in range(turn):
            model.zero_grad()
            loss = loss_function(model(x), y)
            with packprop.backpack(asked):
                loss.backward()
            finish()
        return time.perf_counter() - start

    with ExitStack() as stack:
        writer = stack.enter_context(packprop.StoreWriter(folder, model, [asked], dtype=torch.float16))
        runs = {"without": drop, "with": lambda: writer.write(terms=BATCH)}
        passes(drop)
        for number in range(samples // BATCH // turn):
            for name in sorted(runs, reverse=number % 2 == 0):  # each is first as often as the other
                seconds[name].append(passes(runs[name]))
        start = time.perf_counter()
        writer.commit()
        rest = time.perf_counter() - start
    without, written = sum(seconds["without"]), sum(seconds["with"]) + rest
    store = packprop.Store(folder)
    assert store.samples == samples
    return {
        "model": make.__name__,
        "samples": samples,
        "dimension": DIMENSION,
        "bytes": samples * DIMENSION * 2,
        "seconds_without": without,
        "seconds_with": written,
        "seconds_of_last_commit": rest,
        "rate_with_over_without": without / written,
        "by_turn": vars(Spread.of([a / b for a, b in zip(*seconds.values(), strict=True)])),
    }


def searching(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds for the ten largest inner products of 100 queries, of rows that are in the page cache."""
    store, queries = packprop.Store(folder), torch.randn(100, DIMENSION)
    store.top("grad_batch_projected", queries, 10)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        store.top("grad_batch_projected", queries, 10)
        seconds.append(time.perf_counter() - start)
    return {"samples": store.samples, "queries": 100, "k": 10, "seconds": vars(Spread.of(seconds))}


def reading(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds for reading all rows, and for a search, with checksums over without, in turns."""
    queries = torch.randn(100, DIMENSION)

    def forget() -> None:
        """Have the system drop what it keeps of the files."""
        for path in folder.rglob("*.npy"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(store: packprop.Store) -> None:
        for _ in store["grad_batch_projected"].blocks():
            pass

    def search(store: packprop.Store) -> None:
        store.top("grad_batch_projected", queries, 10)

    def seconds(work: Callable[[packprop.Store], None], cold: bool, compared: bool) -> float:
        store = packprop.Store(folder)
        for part in store["grad_batch_projected"]._parts:
            part._unread[:] = compared
        if cold:
            forget()
        start = time.perf_counter()
        work(store)
        return time.perf_counter() - start

    found = []
    for what, work, cold in (
        ("rows from the disk", read, True),
        ("rows from the page cache", read, False),
        ("search from the disk", search, True),
        ("search from the page cache", search, False),
    ):
        seconds(work, False, True)
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            for compared in (True, False) if number % 2 else (False, True):
                taken[compared].append(seconds(work, cold, compared))
        pairs = [a / b for a, b in zip(taken[True], taken[False], strict=True)]
        found.append(
            {
                "what": what,
                "seconds_without": vars(Spread.of(taken[False])),
                "with_over_without": vars(Spread.of(pairs)),
            }
        )
    return found


def projecting(rounds: int) -> list[dict[str, Any]]:
    """Processor time of passes with projections over plain ones, in turns."""
    task = PROBLEMS["language-model"].build()
    model, loss_function = packprop.extend(task.model), packprop.extend(task.loss)

    def step(extension: Any) -> float:
        model.zero_grad()
        start = time.process_time()
        loss = loss_function(model(task.inputs), task.targets)
        if extension is None:
            loss.backward()
        else:
            with packprop.backpack(extension):
                loss.backward()
        return time.process_time() - start

    asked: dict[str, Any] = {"plain": None} | {
        f"kronecker, d = {d}": Projected(BatchGrad(), d, kind="kronecker") for d in (1024, DIMENSION)
    }
    for extension in asked.values():
        step(extension)
        step(extension)
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(rounds):
        for name, extension in asked.items():
            seconds[name].append(step(extension))
    return [
        {
            "what": name,
            "seconds": vars(Spread.of(taken)),
            "over_plain": vars(Spread.of([a / b for a, b in zip(taken, seconds["plain"], strict=True)])),
        }
        for name, taken in seconds.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--samples", type=int, default=100_000, help="samples in the store (default 100,000)")
    parser.add_argument("--folder", help="where the store is made; by default a temporary folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    described = environment(options.threads, options.rounds, processes=1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    found: dict[str, Any] = {}
    try:
        found["writing"] = [writing(make, folder / make.__name__, options.samples) for make in MODELS]
        found["searching"] = searching(folder / MODELS[0].__name__, options.rounds)
        found["reading"] = reading(folder / MODELS[0].__name__, options.rounds)
    finally:
        shutil.rmtree(folder)
    found["projecting"] = projecting(options.rounds)
    print(json.dumps(found, indent=1))
    if options.samples == 100_000:
        write_results("store", described, **found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
