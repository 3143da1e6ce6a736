"""``python -m benchmarks.compiled``: compiled steps beside ordinary passes; writes ``results/compiled.json``.

Over plain forward and backward passes, in turns within one process, in changing order: a plain pass that went
through ``torch.compile``, BackPACK's where it has one, an ordinary pass inside ``backpack(...)``, the traced
graph replayed without a compiler, and the graph through Inductor. Traces and compilations are timed alone, with
caches of earlier runs unless ``--fresh`` is given. Seconds are those of a clock on the wall: on a machine that
others use, too, only ratios tell something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import packprop
from benchmarks.contestants import CONTESTANTS, Gap, Quantity
from benchmarks.measure import take_turns
from benchmarks.problems import PROBLEMS
from benchmarks.run import RESULTS, environment, write_results
from packprop import extensions

CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("extension-hook", ("BatchL2Grad",)),
    ("extension-hook", ("BatchGrad",)),
    ("extension-hook", ("Variance",)),
    ("extension-hook", ("DiagGGNExact",)),
    ("extension-hook", ("BatchL2Grad", "Variance", "DiagGGNExact")),
    ("small-perceptron", ("BatchL2Grad",)),
    ("small-language-model", ("BatchL2Grad",)),
    ("small-language-model", ("KFAC",)),
    ("sigmoid-mlp", ("KFAC", "KFLR", "DiagGGNExact", "DiagHessian")),
    ("auto-encoder", ("BatchGrad",)),
    ("auto-encoder", ("Variance",)),
    ("auto-encoder", ("DiagGGNMC",)),
    ("convolution", ("BatchGrad",)),
    ("convolution", ("BatchL2Grad", "Variance")),
    ("convolution", ("KFAC",)),
    ("language-model", ("BatchL2Grad",)),
    ("language-model", ("Variance",)),
)
"""Problems, and what is asked of one pass."""


def contestants(problem: str, asked: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """A plain pass, the same one compiled, BackPACK's, an ordinary pass, a replayed step and a compiled one."""
    plain, fast, eager, replayed, compiled = (PROBLEMS[problem].build() for _ in range(5))
    chosen = [getattr(extensions, name)() for name in asked]
    packprop.extend(eager.model)
    packprop.extend(eager.loss)

    def value(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return fast.loss(fast.model(inputs), targets)

    fast_value = torch.compile(value, dynamic=False)

    def run_eager() -> None:
        loss = eager.loss(eager.model(eager.inputs), eager.targets)
        with packprop.backpack(*chosen):
            loss.backward()

    steps = {
        "replayed": packprop.compile(replayed.model, replayed.loss, *chosen, backend="eager"),
        "compiled": packprop.compile(compiled.model, compiled.loss, *chosen),
    }
    try:
        peer = {"backpack": CONTESTANTS["BackPACK"].prepare(PROBLEMS[problem].build(), Quantity(tuple(asked)))}
        peer["backpack"]()
    except (Gap, NotImplementedError, AttributeError):  # of a layer that it does not know
        peer = {}
    return {
        "plain": lambda: plain.loss(plain.model(plain.inputs), plain.targets).backward(),
        "plain_compiled": lambda: fast_value(fast.inputs, fast.targets).backward(),
        **peer,
        "eager": run_eager,
        "replayed": lambda: steps["replayed"](replayed.inputs, replayed.targets),
        "compiled": lambda: steps["compiled"](compiled.inputs, compiled.targets),
        "steps": lambda: steps,
    }


def measure(problem: str, asked: Sequence[str], rounds: int) -> dict[str, Any]:
    """Seconds of each contestant, ratios to the plain pass of the same turn, and what it took to begin."""
    torch.manual_seed(0)
    runs = contestants(problem, asked)
    steps = runs.pop("steps")()
    begun: dict[str, float] = {}
    for name, run in runs.items():
        start = time.perf_counter()
        for _ in range(5):  # a step is traced, checked and compiled within these
            run()
        begun[name] = time.perf_counter() - start
    record: dict[str, Any] = {"problem": problem, "asked": list(asked), "first_five_calls_seconds": begun}
    for name, step in steps.items():
        (kind,) = step.kinds
        record[f"{name}_operations"] = None if kind.traced is None else kind.traced.operations
        record[f"{name}_trace_seconds"] = None if kind.traced is None else kind.traced.seconds
        record[f"{name}_compile_seconds"] = None if kind.runner is None else kind.runner.seconds
        record[f"{name}_says"] = str(step)
    for name, timing in take_turns(runs, rounds).items():
        record[f"{name}_seconds"] = vars(timing.seconds)
        record[f"{name}_over_plain"] = vars(timing.over_plain)
    return record


def _with_others(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records in the order of the cases, with those of other problems that are in the results."""
    there = json.loads((RESULTS / "compiled.json").read_text())["records"]
    known = {(each["problem"], tuple(each["asked"])): each for each in [*there, *records]}
    return [known[case] for case in CASES if case in known]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--problem", action="append", help="only this; repeatable, writes no results")
    parser.add_argument(
        "--update", action="store_true", help="put these problems into the results that are there"
    )
    parser.add_argument("--fresh", action="store_true", help="compile without caches of earlier runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.fresh:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    warnings.simplefilter("ignore", FutureWarning)
    described = environment(options.threads, options.rounds, processes=1)
    records = []
    for problem, asked in CASES:
        if options.problem and problem not in options.problem:
            continue
        records.append(measure(problem, asked, options.rounds))
        ratios = {k: round(v["median"], 2) for k, v in records[-1].items() if k.endswith("over_plain")}
        print(problem, *asked, json.dumps(ratios), records[-1]["compiled_says"].splitlines()[-1], flush=True)
        torch._dynamo.reset()
        if options.update:
            write_results("compiled", described, fresh_caches=options.fresh, records=_with_others(records))
        elif not options.problem:  # after each case: a compiler may take longer than anybody waits
            write_results("compiled", described, fresh_caches=options.fresh, records=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
