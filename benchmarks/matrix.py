"""``python -m benchmarks.matrix``: the tests under several versions of Python and PyTorch (``make matrix``).

Each pair has an environment of its own in ``build/matrix``, which is made if it is not there: PyTorch's wheels
for Linux bring several gigabytes of libraries for GPUs each. What came out is in ``results/matrix.json`` and
in the table of docs/versions.md; a pair that could not be tried is kept with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
PAGE = ROOT / "docs" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.6.0", "2.10.0", "2.13.0", "newest")
# The fast part: rules, graphs, extensions on all cases, recording, the older library's names, the pages.
TESTS = (
    "tests/algebra",
    "tests/functions",
    "tests/graph",
    "tests/recording",
    "tests/extensions",
    "tests/compat",
    "tests/house",
)
BEGIN, END = "<!-- from benchmarks/results/matrix.json -->", "<!-- end -->"


def environment(python: str, torch: str) -> Path:
    """The interpreter of an environment with this pair, made if it is not there.

    Raises:
        RuntimeError: With the reason, if it cannot be made.
    """
    folder = ROOT / "build" / "matrix" / f"python-{python}-torch-{torch}"
    inner = folder / "bin" / "python"
    if not (folder / "complete").exists():
        program = shutil.which(f"python{python}")
        # a version manager may have a program of this name that only says what is not installed
        if (
            program is None
            or subprocess.run([program, "--version"], capture_output=True, check=False).returncode
        ):
            raise RuntimeError(f"no python{python} on this machine")
        shutil.rmtree(folder, ignore_errors=True)
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
        for command in (
            [program, "-m", "venv", folder],
            [inner, "-m", "pip", "install", "--quiet", wanted, "--editable", f"{ROOT}[test]"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=free)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
        (folder / "complete").touch()
    return inner


def counts(report: str) -> dict[str, Any]:
    """What a report of pytest in JUnit's format says.

    >>> counts('<s><testsuite tests="3" failures="1" errors="0" skipped="1" time="2.5">'
    ...        '<testcase classname="a" name="b"><failure/></testcase></testsuite></s>')
    {'passed': 1, 'failed': 1, 'skipped': 1, 'seconds': 2, 'failures': ['a::b']}
    """
    (suite,) = ElementTree.fromstring(report).iter("testsuite")
    tests, failed, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    wrong = [case for case in suite.iter("testcase") if {each.tag for each in case} & {"failure", "error"}]
    return {
        "passed": tests - failed - errors - skipped,
        "failed": failed + errors,
        "skipped": skipped,
        "seconds": round(float(suite.attrib["time"])),
        "failures": [f"{case.attrib['classname']}::{case.attrib['name']}" for case in wrong],
    }


def attempt(python: str, torch: str, tests: Sequence[str]) -> dict[str, Any]:
    """The record of one pair."""
    record: dict[str, Any] = {"python": python, "torch": torch, "date": f"{datetime.date.today()}"}
    try:
        inner = environment(python, torch)
    except RuntimeError as error:
        return {**record, "not_tried": str(error)}
    asked = "import platform, torch; print(platform.python_version(), torch.__version__)"
    versions = subprocess.run([inner, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    report = ROOT / "build" / "matrix" / f"python-{python}-torch-{torch}.xml"
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [inner, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=ROOT, env=alone, check=False, stdout=subprocess.DEVNULL)
    found = counts(report.read_text(encoding="utf-8"))
    return {**record, "python": versions[0], "torch": versions[1], "tests": [*tests], **found}


def table(records: Sequence[dict[str, Any]]) -> str:
    """The table of the page."""
    lines = ["| Python | PyTorch | tests | passed | failed | skipped | date |", "|---|---|---|---|---|---|---|"]
    for record in records:
        found = [f"{record[name]:,}" for name in ("passed", "failed", "skipped") if name in record]
        folders = ", ".join(Path(name).name for name in record.get("tests", ()))
        cells = [folders, *found] if found else [f"not tried: {record['not_tried']}", "", "", ""]
        lines.append(f"| {record['python']} | {record['torch']} | {' | '.join(cells)} | {record['date']} |")
    return "\n".join(lines)


def page_with(text: str, records: Sequence[dict[str, Any]]) -> str:
    """A page with its table written anew."""
    return written_anew(text, BEGIN, table(records))


def written_anew(text: str, begin: str, content: str) -> str:
    """Put a content in the place of what a page has between a mark and the next end."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{content}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Try the pairs that were asked for; those of before stay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    chosen = parser.parse_args()
    records = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    failed = 0
    for python in chosen.python:
        for torch in chosen.torch:
            record = attempt(python, torch, chosen.tests)
            failed += record.get("failed", 0)
            print({name: value for name, value in record.items() if name != "tests"})
            pair = (record["python"], record["torch"])
            records = [other for other in records if (other["python"], other["torch"]) != pair] + [record]
            RESULTS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
