"""Hunt by hand: ``python -m tests.hunt --graphs 5000 --seed 0 --jobs 2``; ``--only 1234`` takes one program."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.hunt import operators
from tests.hunt.examining import examine, start
from tests.hunt.outcomes import BAD, Outcome, hunt


def main() -> int:
    """Hunt, print, write the report; 1 if something was wrong or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so long")
    parser.add_argument("--passes", type=int, default=1, help="look at the last of so many passes")
    parser.add_argument("--only", type=int, help="one program: print it and all of what came of it")
    parser.add_argument(
        "--report", type=Path, default=Path(tempfile.gettempdir(), "hunt.json"), help="where the report goes"
    )
    parser.add_argument(
        "--operators",
        nargs="?",
        const="",
        metavar="NAME",
        help="in place of programs the differentiable functions of PyTorch's own list; those that begin so",
    )
    chosen = parser.parse_args()
    if chosen.operators is not None:
        return _operators(chosen.operators)
    if chosen.only is not None:
        start()
        return _one(chosen.only, chosen.passes)
    seeds = range(chosen.seed, chosen.seed + chosen.graphs)
    end = time.monotonic() + chosen.seconds
    report = Report()
    if chosen.jobs == 1:
        start()
        for seed in seeds:
            if time.monotonic() > end:
                break
            report.add(*examine(seed, chosen.passes))
    else:
        examined = functools.partial(examine, passes=chosen.passes)
        with multiprocessing.get_context("spawn").Pool(chosen.jobs, start) as pool:
            for seed, text, tags, outcomes in pool.imap_unordered(examined, seeds, chunksize=8):
                report.add(seed, text, tags, outcomes)
                if time.monotonic() > end:
                    pool.terminate()
                    break
    chosen.report.write_text(json.dumps(report.contents(), indent=1))
    report.print()
    print(f"written to {chosen.report}")
    return 1 if report.failures else 0


def _operators(names: str) -> int:
    """Every function between two layers; prints counts, and what was wrong or crashed."""
    counts: Counter[tuple[str, str]] = Counter()
    bad = 0
    for name, outcomes in operators.hunt(names):
        for outcome in outcomes:
            counts[outcome.quantity, outcome.status] += 1
            if outcome.status in BAD:
                bad += 1
                print(f"{name}: {outcome.quantity} {outcome.status}: {outcome.reason}\n{outcome.detail}")
    for (quantity, status), count in sorted(counts.items()):
        print(f"  {quantity:10s} {status} {count}")
    return 1 if bad else 0


def _one(seed: int, passes: int) -> int:
    program, outcomes = hunt(seed, passes=passes)
    print(program.text)
    for outcome in outcomes:
        print(f"\n=== {outcome.quantity}: {outcome.status}: {outcome.reason}\n{outcome.detail}")
    return 1 if any(outcome.status in BAD for outcome in outcomes) else 0


class Report:
    """Counts, refusals by reason, and the text of every program that failed."""

    def __init__(self) -> None:
        self.programs = 0
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.tags: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def add(self, seed: int, text: str, tags: tuple[str, ...], outcomes: list[Outcome]) -> None:
        """Count one program."""
        self.programs += 1
        self.tags.update(tags)
        for outcome in outcomes:
            self.counts[outcome.quantity][outcome.status] += 1
            if outcome.status != "right":
                seeds = self.reasons[outcome.status][outcome.reason]
                if seed not in seeds:
                    seeds.append(seed)
        bad = [outcome for outcome in outcomes if outcome.status in BAD]
        if bad:
            self.failures.append(
                {"seed": seed, "tags": tags, "outcomes": [vars(o) for o in bad], "program": text}
            )

    def contents(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "programs": self.programs,
            "counts": self.counts,
            "reasons": self.reasons,
            "tags": dict(self.tags.most_common()),
            "failures": sorted(self.failures, key=lambda failure: failure["seed"]),
        }

    def print(self) -> None:
        """Counts by quantity, and reasons with a few seeds each."""
        print(f"{self.programs} programs")
        for quantity, statuses in self.counts.items():
            print(
                f"  {quantity:10s}",
                ", ".join(f"{status} {count}" for status, count in sorted(statuses.items())),
            )
        for status, reasons in sorted(self.reasons.items()):
            print(f"\n{status}:")
            for reason, seeds in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
                print(f"  {len(seeds):5d}  {reason}   (--only {' '.join(map(str, seeds[:4]))})")


if __name__ == "__main__":
    raise SystemExit(main())
