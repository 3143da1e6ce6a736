"""``python -m benchmarks.versions OTHER [suite ...]``: packprop of this checkout beside that of another one.

For changes that shall cost nothing. Each checkout has a process of its own, in which calls are warm; the two
take turns, so that a machine that slows down slows both. Printed and written to ``results/versions.json``: the
median over rounds of the ratio of their times, this one over the other, and peaks from fresh processes.

    git worktree add ../before COMMIT
    python -m benchmarks.versions ../before convolution extension-hook
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.measure import MIB, ROOT
from benchmarks.problems import PROBLEMS, SUITES
from benchmarks.run import alone, environment, write_results

SERVE = """
import gc, json, sys, time, warnings
import torch
from benchmarks.contestants import CONTESTANTS, QUANTITIES
from benchmarks.problems import PROBLEMS
warnings.simplefilter("ignore")
torch.set_num_threads(int(sys.argv[1]))
call, repeats = None, 1
for line in sys.stdin:
    asked = json.loads(line)
    if "problem" in asked:
        call = CONTESTANTS[asked["contestant"]].prepare(
            PROBLEMS[asked["problem"]].build(), QUANTITIES[asked["quantity"]]
        )
        call(), call()
        start = time.perf_counter()
        call()
        repeats = max(1, min(1000, round(asked["least"] / max(time.perf_counter() - start, 1e-6))))
        print(json.dumps(repeats), flush=True)
        continue
    gc.collect()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    print(json.dumps((time.perf_counter() - start) / repeats), flush=True)
"""
"""What runs in each checkout: it prepares a call, then times one turn of it whenever it is asked to."""


class Checkout:
    """A process that imports packprop and the benchmarks from one folder."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self._threads = folder, threads
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(threads)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> float:
        """Send one request; the answer is a number."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process in {self.folder} ended with code {self._process.wait()}")
        return float(json.loads(line))

    def peaks(self, problem: str, quantity: str) -> dict[str, int]:
        """Resident, allocated and tracked peak in a fresh process."""
        limit = int(psutil.virtual_memory().available * 3 // 4)
        command = [sys.executable, "-m", "benchmarks.measure", problem, quantity, "packprop"]
        command += [str(self._threads), str(limit), "all"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True)
        answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compare(
    problem: str, quantity: str, checkouts: Sequence[Checkout], rounds: int, least: float
) -> dict[str, Any]:
    """Times in turns, and peaks, of one quantity in both checkouts."""
    for checkout in checkouts:
        checkout.ask(problem=problem, quantity=quantity, contestant="packprop", least=least)
    seconds: list[list[float]] = [[], []]
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for each in order:
            seconds[each].append(checkouts[each].ask())
    here, there = (checkout.peaks(problem, quantity) for checkout in checkouts)
    return {
        "problem": problem,
        "quantity": quantity,
        "seconds": [median(each) for each in seconds],
        "ratio": median(a / b for a, b in zip(*seconds, strict=True)),
        "peak_bytes": [here, there],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, metavar="OTHER", help="folder of another checkout")
    parser.add_argument("suites", nargs="*", metavar="suite", default=["convolution", "extension-hook"])
    parser.add_argument("--rounds", type=int, default=11, help="turns of each (default 11)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--least", type=float, default=0.1, help="seconds of a turn at least (default 0.1)")
    options = parser.parse_args(arguments)
    if not alone():
        print("another benchmark is running on this machine: each would slow the other down", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    records = []
    checkouts = [Checkout(folder, options.threads) for folder in (ROOT, options.other)]
    try:
        for suite in options.suites:
            for problem in SUITES[suite]:
                for quantity in PROBLEMS[problem].quantities:
                    records.append(compare(problem, quantity, checkouts, options.rounds, options.least))
                    print(f"measured: {problem}, {quantity}", file=sys.stderr)
    finally:
        for checkout in checkouts:
            checkout.close()
    commits = [
        subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"],
            cwd=each.folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for each in checkouts
    ]
    shown = Table(title=f"{commits[0]} beside {commits[1]}", title_justify="left")
    for heading in (
        "case",
        "quantity",
        "ms",
        "ms before",
        "ratio",
        "resident MiB",
        "before",
        "tracked",
        "before",
    ):
        shown.add_column(heading, justify="left" if heading in ("case", "quantity") else "right")
    for record in records:
        sizes = [
            f"{peaks[kind] / MIB:.1f}" for kind in ("resident", "tracked") for peaks in record["peak_bytes"]
        ]
        times = [f"{1000 * each:.2f}" for each in record["seconds"]]
        shown.add_row(record["problem"], record["quantity"], *times, f"{record['ratio']:.3f}", *sizes)
    Console(width=120).print(shown)
    described = environment(options.threads, options.rounds, processes=1)
    write_results("versions", described, commits=commits, records=records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
