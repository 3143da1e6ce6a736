"""``python -m benchmarks.run [suite ...]``: measure, print, write ``results/<suite>.json``."""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contestants import CONTESTANTS, QUANTITIES, Call, Gap
from benchmarks.measure import (
    MIB,
    ROOT,
    compare,
    deterministic,
    expectation,
    peak,
    take_turns,
)
from benchmarks.problems import PROBLEMS, SUITES

RESULTS = ROOT / "benchmarks" / "results"
DISTRIBUTIONS = (
    "packprop",
    "torch",
    "backpack-for-pytorch",
    "opacus",
    "numpy",
    "timm",
    "scikit-learn",
)

Record = dict[str, Any]


def environment(threads: int, rounds: int, processes: int) -> Record:
    """Return what a reader needs in order to judge or repeat the figures."""

    def version(distribution: str) -> str | None:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(
            git("status", "--porcelain", "--", "packprop", "benchmarks", ":!benchmarks/results")
        ),
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "rounds": rounds,
        "processes": processes,
        # Other people's work on the machine, before ours: a quiet one is near 0.
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "versions": {name: version(name) for name in DISTRIBUTIONS},
    }


def write_results(suite: str, described: Record, folder: Path = RESULTS, **found: Any) -> None:
    """Write what a suite has found, and where it was measured, to ``SUITE.json``."""
    content = {"suite": suite, "environment": described, **found}
    (folder / f"{suite}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def line_up(problem: str, quantity: str, chosen: Sequence[str]) -> list[str]:
    """Return the contestants of one quantity, ``plain`` first."""
    row, wanted = PROBLEMS[problem], QUANTITIES[quantity]
    return [
        name
        for name, contestant in CONTESTANTS.items()
        if contestant.applies(row, wanted) and (name == "plain" or not chosen or name in chosen)
    ]


def measure(
    problem: str,
    quantity: str,
    names: Sequence[str],
    *,
    rounds: int,
    processes: int,
    threads: int,
    progress: Progress,
) -> Iterator[Record]:
    """Yield one record for each contestant: memory, then agreement, then time."""
    records = {name: Record(problem=problem, quantity=quantity, contestant=name, gap=None) for name in names}
    todo = progress.add_task(f"{problem}, {quantity}", total=len(names) * (2 + rounds))

    for name in names:
        try:
            asked = _asked_for_memory(problem, quantity, name)
            records[name]["peak_bytes"] = asdict(peak(problem, asked, name, threads, processes))
        except Gap as gap:
            records[name]["gap"] = str(gap)
        progress.advance(todo)

    task, wanted = PROBLEMS[problem].build(), QUANTITIES[quantity]
    calls: dict[str, Call] = {}
    reference: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name in (name for name in names if records[name]["gap"] is None):
        calls[name] = CONTESTANTS[name].prepare(task, wanted)
        entries = deterministic(calls[name]())
        if shared := entries.keys() & reference.keys():
            records[name]["agreement"] = compare(entries, reference) | {
                "with": sorted({source[key] for key in shared})
            }
        for key in entries.keys() - reference.keys():
            reference[key], source[key] = entries[key], name
        if name != "plain" and (checked := expectation(name, task, wanted)):
            records[name]["agreement_in_expectation"] = checked
        progress.advance(todo)
    reference.clear()
    del entries
    gc.collect()

    for name, timing in take_turns(calls, rounds, tick=lambda: progress.advance(todo)).items():
        records[name] |= asdict(timing)
    progress.remove_task(todo)
    yield from records.values()


def results_of_this_package(suite: str, folder: Path = RESULTS) -> Record:
    """Read the results of a suite, in order to add to them; exit if packprop has changed since."""
    results: Record = json.loads((folder / f"{suite}.json").read_text(encoding="utf-8"))
    then = results["environment"]["commit"]
    if subprocess.run(["git", "diff", "--quiet", then, "--", "packprop"], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"the results of {suite} are of commit {then}, and packprop has changed since")
    return results


def measure_peaks_again(suite: str, options: argparse.Namespace) -> None:
    """Put the memory of the chosen records into the results of a suite."""
    folder = options.out or RESULTS
    results = results_of_this_package(suite, folder)
    described, records = results["environment"], results["records"]
    for record in records:
        problem, quantity, name = record["problem"], record["quantity"], record["contestant"]
        is_chosen = name == "plain" or not options.quantity or quantity in options.quantity
        if record["gap"] is None and is_chosen and name in line_up(problem, quantity, options.contestant):
            asked = _asked_for_memory(problem, quantity, name)
            record["peak_bytes"] = asdict(peak(problem, asked, name, options.threads, options.processes))
            print(f"measured: {problem}, {quantity}, {name}", flush=True)
    described["processes_again"] = options.processes
    write_results(suite, described, folder, problems=results["problems"], records=records)


def _asked_for_memory(problem: str, quantity: str, name: str) -> str:
    """Plain asks for nothing, so that its memory is the same beside every quantity."""
    return PROBLEMS[problem].quantities[0] if name == "plain" else quantity


def disagrees(record: Record) -> bool:
    """Say whether a record was checked and found different."""
    checks = (record.get("agreement"), record.get("agreement_in_expectation"))
    return any(check is not None and not check["equal"] for check in checks)


def table(title: str, records: Sequence[Record]) -> Table:
    """Lay one problem's records out for a terminal."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("quantity", no_wrap=True)
    shown.add_column("contestant", no_wrap=True)
    for heading in ("ms", "over plain", "resident MiB", "allocated", "tracked", "results"):
        shown.add_column(heading, justify="right")
    shown.add_column("agrees")
    before = None
    for record in records:
        quantity = "" if record["quantity"] == before else record["quantity"]
        before = record["quantity"]
        if record["gap"] is not None:
            shown.add_row(quantity, record["contestant"], *["-"] * 6, "gap")
            continue
        bytes_ = record["peak_bytes"]
        checks = [record.get("agreement"), record.get("agreement_in_expectation")]
        agrees = "" if not any(checks) else "[bold red]no" if disagrees(record) else "yes"
        shown.add_row(
            quantity,
            record["contestant"],
            f"{1000 * record['seconds']['median']:.1f}",
            f"{record['over_plain']['median']:.2f}",
            *(
                "" if size is None else f"{size / MIB:.0f}"
                for size in (bytes_[kind] for kind in ("resident", "allocated", "tracked", "results"))
            ),
            agrees,
        )
    return shown


def alone() -> bool:
    """Take the machine's lock for benchmarks until this process ends; false if another has it."""
    lock = (Path(tempfile.gettempdir()) / "packprop-benchmarks.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    _held.append(lock)
    return True


_held: list[TextIO] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if every contestant that was checked agrees, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Compare packprop with its peers in time, memory and numbers.",
        epilog="Suites: " + ", ".join(SUITES),
    )
    parser.add_argument("suites", nargs="*", metavar="suite", help="default: all")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each (default 11)")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes for memory (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--quantity", action="append", default=[], help="only this; repeatable")
    parser.add_argument("--contestant", action="append", default=[], help="only this and plain")
    parser.add_argument(
        "--peaks", action="store_true", help="put memory alone into the results that are there; times stay"
    )
    parser.add_argument(
        "--out", type=Path, help="folder; default benchmarks/results, nothing for a partial run"
    )
    options = parser.parse_args(arguments)
    if not alone():
        print("another benchmark is running on this machine: each would slow the other down", file=sys.stderr)
        return 1
    for given, known in (
        (options.suites, SUITES),
        (options.quantity, QUANTITIES),
        (options.contestant, CONTESTANTS),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    partial_run = bool(options.quantity or options.contestant)
    folder = options.out or (None if partial_run else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)

    # Of hooks on a first layer, whose input needs no gradient, in BackPACK and Opacus: harmless.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(options.threads)
    if options.peaks:
        for suite in options.suites or SUITES:
            measure_peaks_again(suite, options)
        return 0
    console = Console()
    # Piped into a file there is no terminal to fit.
    console.width = max(console.width, 110)
    wrong = False
    for suite in options.suites or SUITES:
        described = environment(options.threads, options.rounds, options.processes)
        records: list[Record] = []
        with Progress(console=console, transient=True) as progress:
            for problem in SUITES[suite]:
                for quantity in PROBLEMS[problem].quantities:
                    if options.quantity and quantity not in options.quantity:
                        continue
                    records += measure(
                        problem,
                        quantity,
                        line_up(problem, quantity, options.contestant),
                        rounds=options.rounds,
                        processes=options.processes,
                        threads=options.threads,
                        progress=progress,
                    )
                    if not console.is_terminal:
                        console.print(f"measured: {problem}, {quantity}")
        for problem in SUITES[suite]:
            mine = [record for record in records if record["problem"] == problem]
            console.print(table(PROBLEMS[problem].title, mine))
            for gap in sorted({f"{r['contestant']}: {r['gap']}" for r in mine if r["gap"]}):
                console.print(f"gap: {gap}", markup=False)
        wrong |= any(map(disagrees, records))
        if folder is not None:
            problems = {
                name: {each: getattr(PROBLEMS[name], each) for each in ("title", "point", "note")}
                for name in SUITES[suite]
            }
            write_results(suite, described, folder, problems=problems, records=records)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
