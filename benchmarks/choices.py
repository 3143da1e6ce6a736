"""``python -m benchmarks.choices``: what packprop chooses beside every fixed choice; ``results/choices.json``.

Without a budget, how much is taken at once and by which algorithm is packprop's own affair. Here the same
passes are run with each of these fixed, in turns in one process; the ratio of the default to the best of
them is what a user could gain by tuning.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

import packprop
from benchmarks.contestants import Call
from benchmarks.decoder import Decoder
from benchmarks.measure import MIB, take_turns
from benchmarks.problems import PROBLEMS, Task
from benchmarks.run import environment, results_of_this_package, write_results
from packprop import LiveBytes, Plan, extensions
from packprop.engine.algebra.choices import CHOICES
from packprop.engine.passes.chunks import ChunkSizes, default_chunk_sizes
from packprop.engine.tensors.device import keep_freed_pages

ASKED = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.DiagGGNMC,
    extensions.KFAC,
)
DEFAULT = default_chunk_sizes()
SCRATCH, COTANGENTS = DEFAULT[:2]
CONTENDERS = 3
"""How many of the fixed choices that did best are timed once more, beside the default alone."""


@dataclass(frozen=True)
class Choice:
    """How a pass is done: with these chunks, and algorithms forced by name."""

    chunk_sizes: ChunkSizes = DEFAULT
    forced: tuple[tuple[str, str], ...] = ()

    def enter(self) -> AbstractContextManager[None]:
        """The context in which backward passes choose so."""
        return packprop.algorithms(**dict(self.forced)) if self.forced else nullcontext()


FIXED: dict[str, Choice] = {
    **{f"samples in {size} MiB": Choice(ChunkSizes(size * MIB, COTANGENTS)) for size in (1, 4, 32, 128)},
    "one sample at a time": Choice(ChunkSizes(0, COTANGENTS)),
    **{f"columns in {size} MiB": Choice(ChunkSizes(SCRATCH, size * MIB)) for size in (8, 64, 256)},
    "one column at a time": Choice(ChunkSizes(SCRATCH, 0)),
    "frugal algorithms": Choice(ChunkSizes(SCRATCH, COTANGENTS, held=0)),
    **{f"{kind}: {name}": Choice(forced=((kind, name),)) for kind, names in CHOICES.items() for name in names},
}


CONCERNED = {"column": {"DiagGGNExact"}, "norms": {"BatchL2Grad"}, "factors": {"KFAC"}}
"""What a choice is about -> the extensions that take note of it, where not all do."""


def fixed_for(extension: str) -> dict[str, Choice]:
    """The fixed choices that make a difference to an extension."""
    return {
        title: choice
        for title, choice in FIXED.items()
        if all(extension in known for word, known in CONCERNED.items() if word in title)
    }


def small_decoder() -> Task:
    """Linear layers shared over positions, a table, norms: 8 texts of 64 tokens, width 128."""
    torch.manual_seed(0)
    tokens = torch.randint(512, (8, 64))
    return Task(Decoder(2, 128, 4, 344, 512), nn.CrossEntropyLoss(), tokens, tokens)


BUILD: dict[str, Callable[[], Task]] = {
    **{name: PROBLEMS[name].build for name in ("convolution", "3c3d", "all-cnn-c", "auto-encoder")},
    "decoder": small_decoder,
}
COSTLY = {("all-cnn-c", "DiagGGNExact"), ("decoder", "DiagGGNExact")}
"""Passes of several seconds, left out: hundreds of columns, or as many as tokens and words."""


def calls_of(name: str, make: Any) -> dict[str, Call]:
    """The steps of one problem and extension: plain, the default, and every fixed choice."""
    task = BUILD[name]()
    model, loss = packprop.extend(task.model), packprop.extend(task.loss)
    choices = {"default": Choice(), **fixed_for(make.__name__)}
    plans: dict[tuple[tuple[str, str], ...], Plan] = {}  # a plan belongs to the forced algorithms
    for choice in choices.values():
        with choice.enter():
            plans[choice.forced] = packprop.plan(model, task.loss, (task.inputs, task.targets), [make()])

    def call(choice: Choice | None) -> dict[str, Any]:
        for parameter in model.parameters():
            parameter.grad = None
            vars(parameter).pop(make.savefield, None)
        value = loss(model(task.inputs), task.targets)
        if choice is None:
            value.backward()
            return {}
        plan = replace(plans[choice.forced], chunk_sizes=choice.chunk_sizes)
        with choice.enter(), packprop.backpack(make(), memory=plan):
            value.backward()
        return {}

    calls = {title: functools.partial(call, choice) for title, choice in choices.items()}
    return {"plain": functools.partial(call, None), **calls}


def peaks_of(calls: dict[str, Call], titles: Sequence[str]) -> dict[str, int]:
    """The peak of some of the steps in bytes of tensors, each in its second pass."""
    peaks = {}
    for title in titles:
        calls[title]()
        with LiveBytes() as live:
            calls[title]()
        peaks[title] = live.peak
    return peaks


def points(rounds: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The default and every fixed choice, for each problem and extension."""
    for name in names:
        for make in ASKED:
            if (name, make.__name__) in COSTLY:
                continue
            calls = calls_of(name, make)
            for each in calls.values():
                each()
            over = {
                title: timing.over_plain.median
                for title, timing in take_turns(calls, rounds).items()
                if title != "plain"
            }
            # the least of many noisy figures is too low: the best are timed again, in more rounds
            fixed = [title for title in over if title != "default"]
            chosen = sorted(fixed, key=over.__getitem__)[:CONTENDERS]
            again = take_turns({title: calls[title] for title in ("plain", "default", *chosen)}, 3 * rounds)
            final = {title: asdict(again[title].over_plain) for title in ("default", *chosen)}
            best = min(chosen, key=lambda title: final[title]["median"])
            ratio = final["default"]["median"] / final[best]["median"]
            print(f"{name:14s}{make.__name__:16s}{ratio:.2f} x the best: {best}", flush=True)
            yield {
                "problem": name,
                "extension": make.__name__,
                "best": best,
                "default_over_best": ratio,
                "over_plain": final,
                "first_round_over_plain": over,
                "peak_bytes": peaks_of(calls, ("plain", *final)),
            }


def measure_peaks_again(names: Sequence[str]) -> None:
    """Put the peaks of the points of some problems into the results that are there."""
    results = results_of_this_package("choices")
    for point in (point for point in results["points"] if point["problem"] in names):
        calls = calls_of(point["problem"], getattr(extensions, point["extension"]))
        point["peak_bytes"] = peaks_of(calls, ("plain", *point["over_plain"]))
        print(point["problem"], point["extension"], point["peak_bytes"], flush=True)
    write_results("choices", results["environment"], points=results["points"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choices", description=__doc__)
    parser.add_argument("problems", nargs="*", help=f"of {', '.join(BUILD)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument(
        "--peaks", action="store_true", help="put memory alone into the results that are there; times stay"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_pages()  # as passes without a plan do
    if options.peaks:
        measure_peaks_again(options.problems or list(BUILD))
        return 0
    described = environment(options.threads, options.rounds, processes=1)
    found: list[dict[str, Any]] = []
    for point in points(options.rounds, options.problems or list(BUILD)):
        found.append(point)
        if not options.problems:  # a run that is stopped leaves what it has found
            write_results("choices", described, points=found)
    worst = max(found, key=lambda point: point["default_over_best"])
    print(f"at worst {worst['default_over_best']:.2f}: {worst['problem']}, {worst['extension']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
