"""Check every family, print and keep what came of it, and write ``docs/models.md``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
import warnings
from collections.abc import Iterator

from benchmarks.families.check import Outcome, outcomes
from benchmarks.families.family import Family
from benchmarks.families.page import keep, write
from benchmarks.vision import load_timm

LIBRARIES = ("torch", "transformers", "peft", "timm")
"""Each has a file ``of_LIBRARY.py`` here."""


def families(libraries: list[str]) -> Iterator[Family]:
    """The families of the libraries that are installed."""
    with contextlib.suppress(ImportError):
        load_timm()  # before transformers, which asks for torchvision, too
    for library in libraries:
        try:
            importlib.import_module(library)
        except ImportError as missing:
            print(f"{library}: left out, {missing}")
            continue
        yield from importlib.import_module(f"benchmarks.families.of_{library}").families()


def main() -> None:
    """Go through the families, in one process."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families to check, all by default")
    parser.add_argument("--libraries", nargs="*", default=list(LIBRARIES))
    parser.add_argument("--page", action="store_true", help="only write docs/models.md from the results")
    arguments = parser.parse_args()
    if arguments.page:
        write()
        return
    found: list[tuple[Family, Outcome, Outcome]] = []
    for family in families(arguments.libraries):
        if arguments.names and family.name not in arguments.names:
            continue
        start = time.perf_counter()
        first, second = outcomes(family)
        found.append((family, first, second))
        took = time.perf_counter() - start
        text = " | ".join(f"{order.state:8}{order.detail[:300]}" for order in (first, second))
        print(f"{family.library:13}{family.name:30}{took:5.1f} s  {text}", flush=True)
    for state in ("right", "refused", "wrong", "fails"):
        counts = [sum(row[order].state == state for row in found) for order in (1, 2)]
        print(f"{state:8} first order {counts[0]}, second order {counts[1]}")
    if not arguments.names:
        keep(found)
        write()


if __name__ == "__main__":
    main()
