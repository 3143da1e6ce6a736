"""``python -m benchmarks.dataset``: whole data sets; writes ``results/dataset.json``.

50,000 samples of 3 x 32 x 32 go through a small convolutional network:

- *epoch*: ``compute`` of ``Variance``, ``DiagGGNMC`` and ``KFAC`` beside one epoch of training (forward pass,
  backward pass, a step of SGD), in turns; with and without a checkpoint every 30 s. One thread.
- *memory*: the peak of live tensors of the same over a tenth of the samples and over all of them.
- *ranks*: samples a second of one process on one core, and of two processes on two cores, in turns; and of two
  processes that know nothing of each other, with half of the samples each: what the machine has to give.

With ``--course``: samples a second, and the peak of live tensors, window by window from the first batch to the
last; writes ``results/course.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from benchmarks.measure import Spread
from benchmarks.run import environment, write_results
from packprop import extensions
from packprop.engine.memory import LiveBytes

BATCH = 128

WINDOW = 13
"""Batches that a point of a curve stands for."""


def network() -> nn.Module:
    """A small convolutional network for 32 x 32 pixels."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 8 * 8, 10))


def images(count: int) -> tuple[Tensor, Tensor]:
    """Random samples and classes."""
    source = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 32, 32, generator=source), torch.randint(10, (count,), generator=source)


def epoch(data: tuple[Tensor, Tensor]) -> None:
    """One epoch of plain training."""
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x, y in zip(*(tensor.split(BATCH) for tensor in data), strict=True):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def curvature(
    data: tuple[Tensor, Tensor], before: Callable[[], None] | None = None, **options: Any
) -> packprop.Result:
    """What is measured; ``before`` is called before each batch."""
    asked, model = [extensions.Variance(), extensions.DiagGGNMC(), extensions.KFAC()], network()
    if before is not None:
        model.register_forward_pre_hook(lambda module, inputs: before())
    options |= {"batch_size": BATCH, "progress": False}
    return packprop.compute(model, nn.CrossEntropyLoss(), data, asked, **options)


def kept(data: tuple[Tensor, Tensor]) -> None:
    """The same with a checkpoint every 30 s, and one at the end."""
    with tempfile.TemporaryDirectory() as folder:
        curvature(data, checkpoint=Path(folder) / "kept")


def in_turns(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, round by round."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - start)
    return taken


def against_an_epoch(samples: int, rounds: int) -> dict[str, Any]:
    """Seconds beside those of an epoch, and what checkpoints cost."""
    data = images(samples)
    sides = {"epoch": lambda: epoch(data), "compute": lambda: curvature(data), "kept": lambda: kept(data)}
    for side in (epoch, curvature):
        side((data[0][: 4 * BATCH], data[1][: 4 * BATCH]))
    taken = in_turns(sides, rounds)
    rows = list(zip(*taken.values(), strict=True))
    return {
        "seconds": {name: vars(Spread.of(values)) for name, values in taken.items()},
        "compute_over_epoch": vars(Spread.of([ours / plain for plain, ours, _ in rows])),
        "checkpoint_over_without": vars(Spread.of([kept / ours for _, ours, kept in rows])),
    }


def peak_bytes(samples: int) -> int:
    """The most bytes of tensors beside the data."""
    data, live = images(samples), LiveBytes()
    with live:
        curvature(data)
    return live.peak


def peaks_on_the_way(samples: int) -> list[int]:
    """The most bytes of tensors beside the data, window by window."""
    data, live, peaks = images(samples), LiveBytes(), [0]
    batches = itertools.count(1)

    def note() -> None:
        peaks[-1] = max(peaks[-1], live.peak)
        live.restart()
        if next(batches) % WINDOW == 0:
            peaks.append(0)

    with live:
        curvature(data, note)
    return peaks[:-1]


def worker(
    rank: int, world: int, joined: bool, noted: bool, core: int, file: str, samples: int, out: Any
) -> None:
    """One process: seconds from the moment at which all have begun, and when its batches began if ``noted``."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    if joined:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    times: list[float] = []
    data = images(samples)
    curvature((data[0][: 4 * BATCH], data[1][: 4 * BATCH]))
    start = time.perf_counter()
    curvature(
        data if joined else tuple(each[rank::world] for each in data),
        lambda: times.append(time.perf_counter()) if noted else None,
    )
    out.put((time.perf_counter() - start, times))
    out.close()
    out.join_thread()
    os._exit(0)


def run_on(world: int, samples: int, joined: bool, noted: bool = False) -> list[tuple[float, list[float]]]:
    """What so many processes tell, each on a core of its own."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))[:world]
    with tempfile.TemporaryDirectory() as folder:
        out = context.Queue()
        children = [
            context.Process(
                target=worker, args=(rank, world, joined, noted, core, f"{folder}/meet", samples, out)
            )
            for rank, core in enumerate(cores)
        ]
        for child in children:
            child.start()
        told = [out.get(timeout=3600) for _ in children]
        for child in children:
            child.join()
    return told


def rates_on_the_way(world: int, samples: int) -> list[float]:
    """Samples a second of so many ranks together, window by window."""
    told = [times for _, times in run_on(world, samples, True, noted=True)]
    windows = min(map(len, told)) // WINDOW
    edges = [[times[number * WINDOW] for number in range(windows)] for times in told]
    spans = [[later - earlier for earlier, later in itertools.pairwise(each)] for each in edges]
    return [sum(WINDOW * BATCH / span for span in window) for window in zip(*spans, strict=True)]


def course(samples: int) -> dict[str, Any]:
    """Throughput and memory from the first batch to the last."""
    return {
        "samples_of_a_point": WINDOW * BATCH,
        "samples_per_second": {str(world): rates_on_the_way(world, samples) for world in (1, 2)},
        "peak_bytes": peaks_on_the_way(samples),
    }


def on_ranks(samples: int, rounds: int) -> dict[str, Any]:
    """Throughput of one process, of two, and of two that are not joined."""
    options = {"one": (1, False), "two": (2, True), "apart": (2, False)}
    sides: dict[str, list[float]] = {name: [] for name in options}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            world, joined = options[name]
            seconds = max(taken for taken, _ in run_on(world, samples, joined))
            sides[name].append(samples / seconds)
    found: dict[str, Any] = {
        "samples_per_second": {name: vars(Spread.of(values)) for name, values in sides.items()}
    }
    for name in ("two", "apart"):
        pairs = zip(sides["one"], sides[name], strict=True)
        found[f"{name}_over_one"] = vars(Spread.of([two / one for one, two in pairs]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dataset", description=__doc__)
    parser.add_argument("--samples", type=int, default=50_000, help="samples (default 50000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument(
        "--course", action="store_true", help="throughput and memory on the way, and nothing else"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.course:
        found = {"samples": options.samples, **course(options.samples)}
        print(json.dumps(found))
        if not options.dry:
            write_results("course", environment(1, 1, processes=2), **found)
        return 0
    tenth = options.samples // 10
    found = {
        "samples": options.samples,
        "parameters": sum(parameter.numel() for parameter in network().parameters()),
        "ranks": on_ranks(options.samples, options.rounds),
        "epoch": against_an_epoch(options.samples, options.rounds),
        "peak_bytes": {"a tenth": peak_bytes(tenth), "all": peak_bytes(options.samples)},
    }
    print(json.dumps(found, indent=1))
    if not options.dry:
        write_results("dataset", environment(1, options.rounds, processes=2), **found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
