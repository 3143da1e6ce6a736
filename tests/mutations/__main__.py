"""``python -m tests.mutations``: changes places of the engine at random and tells which `make test` finds.

Each change is made in a copy of the repository. There the selection of `make test` runs until a test fails: the
tests of the same folder come first, all others follow. Results are in benchmarks/results/mutations.json, and
an interrupted run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutations.changes import Change, changes_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
ROOMS = ("engine", "extensions")
KINDS = ("sign", "axis", "merge", "comparison")
FIRST = ("tests/extensions/test_cases.py", "tests/extensions", "tests/passes", "tests/curvature")
"""What is tried before everything else, after the tests of the folder itself."""
LIMIT = 3600
"""Seconds for one run of the selection; a change that takes longer is found."""


def chosen(root: Path, count: int, seed: int) -> list[Change]:
    """Changes drawn at random: the kinds in turn, each place of a kind as likely as any other."""
    files = [path for room in ROOMS for path in sorted((root / "packprop" / room).rglob("*.py"))]
    found = [change for path in files for change in changes_of(root, path.relative_to(root).as_posix())]
    source = random.Random(seed)
    by_kind = {kind: [change for change in found if change.kind == kind] for kind in KINDS}
    for changes in by_kind.values():
        source.shuffle(changes)
    return [by_kind[KINDS[place % len(KINDS)]][place // len(KINDS)] for place in range(count)]


def copied(folder: Path) -> Path:
    """A copy of the files that git knows or would add."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def first_failure(tree: Path, paths: Sequence[str], jobs: int) -> str | None:
    """The first test of the selection that fails in a copy, of those under some paths; ``None`` if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not thorough", "-p", "no:cacheprovider"]
    command += ["-ofaulthandler_timeout=300", f"-n{jobs}" if jobs > 1 else "-pno:xdist", *paths]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(
            command, cwd=tree, env=alone, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"longer than {LIMIT} s"
    if run.returncode == 0:
        return None
    if run.returncode not in (1, 2, 3, 4):
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return named[1] if named else "a test that hangs" if "Timeout (" in run.stdout + run.stderr else "the start"


def examined(tree: Path, change: Change, jobs: int) -> dict[str, Any]:
    """The record of one change."""
    file = tree / change.file
    source = file.read_text(encoding="utf-8")
    record: dict[str, Any] = {**vars(change), "text": source.splitlines()[change.line - 1].strip()}
    begun = time.monotonic()
    try:
        file.write_text(change.applied(source), encoding="utf-8")
        near = [*(f"tests/{folder}" for folder in Path(change.file).parts[1:-1]), *FIRST]
        by = first_failure(tree, [path for path in near if (tree / path).exists()], 1)
        by = by or first_failure(tree, (), jobs)
    finally:
        file.write_text(source, encoding="utf-8")
    return {**record, "found_by": by, "seconds": round(time.monotonic() - begun)}


def main() -> int:
    """Examine each change, print the table; 1 if a change was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="number of changes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the whole selection")
    parser.add_argument("--again", action="store_true", help="forget what an earlier run has found")
    parser.add_argument(
        "--trust", action="store_true", help="do not try first whether all pass without a change"
    )
    parser.add_argument("--list", action="store_true", help="print the changes and end")
    asked = parser.parse_args()
    changes = chosen(ROOT, asked.count, asked.seed)
    if asked.list:
        print("\n".join(map(str, changes)))
        return 0
    known: dict[str, Any] = {}
    if RESULTS.exists() and not asked.again:
        known = {
            record["change"]: record for record in json.loads(RESULTS.read_text(encoding="utf-8"))["changes"]
        }
    named = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(named, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    tree = copied(ROOT / "build" / "mutations")
    if not (known or asked.trust) and (broken := first_failure(tree, (), asked.jobs)):
        raise SystemExit(f"{broken} fails without any change")
    for change in changes:
        if str(change) not in known:
            known[str(change)] = {"change": str(change), **examined(tree, change, asked.jobs)}
            records = [known[str(each)] for each in changes if str(each) in known]
            content = {"seed": asked.seed, "commit": commit, "changes": records}
            RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{change}\n    {known[str(change)]['found_by'] or 'NOT FOUND'}", flush=True)
    lost = [change for change in changes if not known[str(change)]["found_by"]]
    print(f"{len(changes) - len(lost)} of {len(changes)} found")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
