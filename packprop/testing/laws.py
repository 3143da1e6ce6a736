"""The laws that every extension obeys: no number depends on how a pass is cut into chunks and batches."""

from __future__ import annotations

import copy
from typing import Any

from packprop.applications.dataset.compute import compute
from packprop.engine.algebra import lift, rescale
from packprop.errors import PackpropError
from packprop.testing.loops import Loops
from packprop.testing.passes import (
    finished,
    observed,
    saved,
    subsampled,
    takes_subsampling,
)
from packprop.testing.problem import Problem
from packprop.testing.report import Ledger, Named
from packprop.types import Extension

ALL_COLUMNS = 10**6
"""More columns than any check has."""

FACTOR = 3.0
"""The factor by which one of the laws multiplies the loss."""


def check_laws(ledger: Ledger, problem: Problem, extension: Extension) -> None:
    """Check every law on one problem."""
    chosen = extension.subsampling
    samples = problem.samples if chosen is None else len(chosen)
    whole = observed(problem, extension, (samples, None))
    value = finished(extension, whole, samples)
    loops = Loops(problem, ledger)
    require_all(ledger, extension, value, loops)
    ledger.same("saved on every parameter", saved(problem, extension), value)

    def hold(law: str, at_once: tuple[int, int | None], how: str) -> None:
        try:
            results = observed(problem, extension, at_once)
        except PackpropError:
            raise
        except RuntimeError as error:  # the parts have shapes that cannot be added
            where = f"{extension.name} of a parameter, {how}"
            raise ledger.failed(law, where, f"parts do not merge: {error}") from error
        ledger.same(law, finished(extension, results, samples), value, how)

    for size in range(1, samples):
        hold("chunks of samples", (size, None), f"{size} of {samples} at once")
    hold("columns at once", (samples, 1), "one by one")
    hold("columns at once", (samples, 2), "two at once")
    hold("columns at once", (samples, ALL_COLUMNS), "all at once")
    ledger.same("overwritten", saved(problem, extension, passes=2), value, "second pass")
    larger = observed(problem, extension, (samples, 1), FACTOR)
    scaled = {
        name: [
            rescale(result, FACTOR, degree) for degree, result in zip(extension.degrees, results, strict=True)
        ]
        for name, results in copy.deepcopy(whole).items()
    }
    ledger.same(
        "scales with the loss",
        finished(extension, larger, samples),
        finished(extension, scaled, samples),
        f"{FACTOR:g} times the loss",
    )
    check_batches(ledger, problem, extension, value)
    if takes_subsampling(extension):
        _check_subsampling(ledger, problem, extension, value)


def require_all(ledger: Ledger, extension: Extension, value: Named, loops: Loops) -> None:
    """Require a value for every parameter that the loss depends on."""
    missing = [name for name in loops.used if value.get(name) is None]
    if missing:
        where = f"{extension.name} of parameter {missing[0]!r}"
        raise ledger.failed("saved on every parameter", where, "there is no value")


def check_batches(ledger: Ledger, problem: Problem, extension: Extension, value: Named) -> None:
    """Compare the merged value of two batches of different sizes with the value of one batch."""
    single = any(row.whole or row.seed.mc_samples is not None for row in extension.rows)
    cut = problem.samples - 1
    if single or extension.subsampling is not None or cut == 0:
        return
    batches = problem.batches(cut)
    if batches is None:
        ledger.notes.append("not compared over a data set: some tensor has no axis 0 of samples to cut")
        return
    try:
        result = compute(problem.model, problem.loss, batches, [extension], progress=False)
    except PackpropError as refusal:
        ledger.notes.append(f"not compared over a data set: {refusal.why}")
        return
    ledger.same("batches of a data set", result[extension], value, f"{cut} and 1 samples")


def _check_subsampling(ledger: Ledger, problem: Problem, extension: Extension, value: Named) -> None:
    """Compare a list of all samples with the whole value, and a list of two with their merged results."""
    law, every = "subsampling", list(range(problem.samples))
    listed = subsampled(extension, every)
    value_of_all = finished(listed, observed(problem, listed, (2, 1)), len(every))
    ledger.same(law, value_of_all, value, "all samples")
    # after a second pass, each choice of samples has a basis of its own: its results do not merge with others
    if problem.samples < 3 or any(row.whole or row.after is not None for row in extension.rows):
        return
    chosen = [2, 0]
    singles = [observed(problem, subsampled(extension, [n]), (1, 1)) for n in chosen]
    merged = {}
    for name in singles[0]:
        results = []
        for row, *parts in zip(extension.rows, *(single[name] for single in singles), strict=True):
            total: Any = None
            if all(part is not None for part in parts):
                first, second = (lift(row.over_n, part) for part in parts)
                total = row.over_n.result(row.over_n.merge(first, second))
            results.append(total)
        merged[name] = results
    pair = subsampled(extension, chosen)
    value_of_pair = finished(pair, observed(problem, pair, (2, 1)), len(chosen))
    ledger.same(law, value_of_pair, finished(pair, merged, len(chosen)), f"samples {chosen}")
