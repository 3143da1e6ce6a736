"""The whole list of cases on several ranks: ``python -m tests.distributed --ranks 2 3 --kind DDP``."""

from __future__ import annotations

import argparse
import time

from tests.cases import BY_NAME
from tests.distributed.comparison import NAMES, WRAPPED, compare, summary
from tests.distributed.processes import in_processes


def main() -> int:
    """Compare and print; 1 if a value was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="numbers of processes")
    parser.add_argument("--kind", nargs="+", choices=WRAPPED, default=[*WRAPPED], help="how models are wrapped")
    parser.add_argument("--seconds", type=float, default=3600, help="when to give up on one such list")
    parser.add_argument("cases", nargs="*", default=NAMES, help="names of cases; all by default")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.cases if name not in BY_NAME]
    if unknown:
        parser.error(f"there are no cases {', '.join(unknown)}")
    wrong = 0
    for kind in chosen.kind:
        for ranks in chosen.ranks:
            begun = time.monotonic()
            found = in_processes(compare, ranks, list(chosen.cases), kind, seconds=chosen.seconds)
            lines, count = summary(found)
            print(*lines, sep="\n")
            print(f"{kind}, {ranks} ranks: {time.monotonic() - begun:.0f} s\n", flush=True)
            wrong += count
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
