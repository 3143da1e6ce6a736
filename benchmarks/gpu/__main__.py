"""``python -m benchmarks.gpu``: run the steps that are not done yet, each in a process of its own.

A case is written to ``DIR/STEP.json`` as soon as it is there, so that a kill loses one case, and the next call
goes on after it. ``--minutes`` ends the call in time. A step whose process dies loses the case that was
running, and goes on with the next one; so does the next call after a step that was stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.device import Options, settle, surroundings
from benchmarks.gpu.page import outcome, page_with, shown
from benchmarks.gpu.steps import STEPS
from benchmarks.measure import ROOT
from benchmarks.run import Record

LEAST = 20.0
"""Seconds below which no step is started."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    chosen = _parser().parse_args(arguments)
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(device, chosen.small, chosen.jobs)
    if options.on_gpu and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; give --device cpu --small to try the steps")
        return 2
    name = "gpu" if options.on_gpu and not options.small else f"gpu-{device}{'-small' if options.small else ''}"
    folder = chosen.out or (ROOT / "benchmarks/results" / name if name == "gpu" else ROOT / "build" / name)
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.inside:
        run_cases(chosen.inside, options, folder)
        return 0
    if chosen.page:
        text = chosen.page.read_text(encoding="utf-8")
        chosen.page.write_text(page_with(text, read(folder)), encoding="utf-8")
        return 0
    end = time.monotonic() + 60 * chosen.minutes
    for step in chosen.only or STEPS:
        run_step(step, options, folder, end)
    found = read(folder)
    Console(width=None if sys.stdout.isatty() else 160).print(summary(found))
    return int(any(outcome(record) == "error" for each in found.values() for record in each["cases"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", choices=STEPS, help="only this step; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="small sizes: a test of the steps themselves")
    parser.add_argument("--out", type=Path, help="folder of the results, and of those to go on after")
    parser.add_argument("--minutes", type=float, default=9.0, help="end before so many (default 9)")
    parser.add_argument("--jobs", type=int, default=8, help="processes of the tests (default 8)")
    parser.add_argument("--page", type=Path, help="write the tables of a page anew, and run nothing")
    parser.add_argument("--inside", choices=STEPS, help=argparse.SUPPRESS)
    return parser


# ------------------------------------------------------------------------- outside of a step


def run_step(step: str, options: Options, folder: Path, end: float) -> None:
    """Run the cases of a step that are not there, until the step's limit or the end."""
    path = folder / f"{step}.json"
    stop = time.monotonic() + 60 * STEPS[step].minutes
    while True:
        left = min(stop, end) - time.monotonic()
        before = _read(path)
        if before.get("complete") or left < LEAST:
            return
        print(f"{step}: {STEPS[step].title}, at most {left:.0f} s", flush=True)
        command = [sys.executable, "-m", "benchmarks.gpu", "--inside", step, "--device", options.device]
        command += ["--out", str(folder.resolve()), "--jobs", str(options.jobs)]
        command += ["--small"] if options.small else []
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=left, check=False).returncode
            why = f"the process ended with code {code}"
        except subprocess.TimeoutExpired:
            code, why = None, f"stopped after {60 * STEPS[step].minutes:.0f} s of the step"
        found = _read(path)
        if code is None and stop > end:
            return  # the case that was running had no chance: the next call runs it again
        running = found.pop("running", None)
        if running is not None:
            found["cases"][running] = {"error": why}
            write(path, found)
        if code is None or len(found.get("cases", {})) == len(before.get("cases", {})):
            return


def read(folder: Path) -> dict[str, Record]:
    """Return the results of the steps in a folder."""
    found = {step: _read(folder / f"{step}.json") for step in STEPS}
    return {step: each for step, each in found.items() if each.get("cases")}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write(path: Path, content: Record) -> None:
    """Write a file whole, or leave the one that is there."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def summary(found: dict[str, Record]) -> Table:
    """Return a table with a row for each case."""
    table = Table("step", "case", "outcome", "figures", title="benchmarks.gpu")
    for step, each in found.items():
        for case, record in each["cases"].items():
            said = record.get("error") or record.get("skipped")
            figures = said or "  ".join(
                f"{key} {shown(record[key])}" for key in STEPS[step].figures if record.get(key) is not None
            )
            table.add_row(step, case, outcome(record), str(figures)[-300:])
    return table


# -------------------------------------------------------------------------- inside of a step


def run_cases(step: str, options: Options, folder: Path, names: Collection[str] = ()) -> None:
    """Run the cases of a step that are not there, or those with some names; write each when it is done."""
    warnings.simplefilter("ignore", FutureWarning)
    if not options.on_gpu:
        torch.set_num_threads(2)
    path = folder / f"{step}.json"
    content = _read(path) or {"step": step, "title": STEPS[step].title, "cases": {}}
    content["environment"] = surroundings(options)
    for name, case in STEPS[step].cases(options).items():
        if name in content["cases"] or (names and name not in names):
            continue
        content["running"] = name
        write(path, content)
        start = time.perf_counter()
        try:
            record = case()
        except Exception as error:  # whatever it is, the next case has a chance
            lines = traceback.format_exc().strip().splitlines()
            record = {"error": f"{type(error).__name__}: {error}"[:1000], "traceback": lines[-14:]}
        record["case_seconds"] = round(time.perf_counter() - start, 2)
        content["cases"][name] = record
        del content["running"]
        write(path, content)
        print(f"  {name}: {outcome(record)}, {record['case_seconds']} s", flush=True)
        settle(options)  # raises if an error has left the device unusable: then a new process goes on
    content["complete"] = not names
    write(path, content)


if __name__ == "__main__":
    raise SystemExit(main())
