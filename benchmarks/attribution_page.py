"""What ``benchmarks.attribution`` found: a table for each model."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import MIB

HEADS = "method", "score", "95 %", "over draws", "seconds", "load", "peak of tensors", "without the top 1 %"

INTRODUCTION = """\
How well influence foretells retraining: small models are trained again on random halves of their data, \
and the linear datamodeling score (Ilyas et al. 2022; Park et al. 2023) is the rank correlation, over the \
halves, between the losses of other samples and what each method foretold for the half. The damping is the \
factor of the L2 penalty, for every method but one, which says so. The \
interval is a bootstrap over halves and queries. Methods that draw labels run with five seeds: the score is \
the median, and *over draws* the least and the largest. Time and memory cover everything from the model to \
the products, on one thread. *Load* is the load average \
of the machine's two cores when the method began (with seed 0, mostly when all of them began): seconds \
beside more than 1 are too long, and only seconds beside a like load compare. *Without the top 1 %*: how much \
the losses of some queries grow, on average, when each is asked of a model trained without the samples that \
are foretold to help it most."""


def rows_of_attribution(record: dict[str, Any]) -> list[list[str]]:
    """A row for each method that ran, best first; ``-`` for what was not measured."""
    methods = record["methods"]
    scored = sorted((name for name in methods if "score" in methods[name]), key=lambda n: -methods[n]["score"])
    rows = []
    for name in scored:
        each = methods[name]
        low, high = each["interval"]
        draws, peak, growth = each.get("scores"), each["peak_bytes"], each.get("growth")
        rows.append(
            [
                name + (f", {each['readings']} readings" if "readings" in each else ""),
                f"{each['score']:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{min(draws):.3f} to {max(draws):.3f}" if draws else "",
                f"{each['seconds']:.1f}",
                f"{each['load_average']:.1f}" if "load_average" in each else "-",
                f"{peak / MIB:.0f} MiB" if peak else "-",
                f"{growth:+.2f}" if growth is not None else "-",
            ]
        )
    return rows


COST_HEADS = "method", "factors, s", "scores, s", "resident peak", "correlation with kronfluence"

COSTS = """\
Random weights and sequences: only the work counts here. Each method has a process of its own, which computes \
the factors of EKFAC over all sequences, and the products of each query with all of them, without a store. \
Peaks are above what the process had before the first step. kronfluence takes the linear layers alone."""


def notes_of_costs(content: dict[str, Any]) -> list[str]:
    """A sentence for each method whose figures belong to several runs."""
    return [f"Of {name}, {each['note']}." for name, each in content["methods"].items() if "note" in each]


def rows_of_costs(content: dict[str, Any]) -> list[list[str]]:
    """A row for each method, in the order in which they ran."""
    return [
        [
            name,
            *(f"{each['seconds'][step]:.0f}" for step in ("factors", "scores")),
            f"{each['peak_bytes'] / MIB:.0f} MiB",
            f"{each['correlation']:.3f}" if "correlation" in each else "-",
        ]
        for name, each in content["methods"].items()
    ]


OURS = (
    "EKFAC",
    "EKFAC, exact",
    "refined, no preconditioner",
    "EKFAC, refined",
    "refined by the Hessian, three times the damping",
)
OTHERS = "kronfluence, EKFAC", "dattri, CG", "traker, one checkpoint", "curvlinops, EKFAC exact"


def remarks_of(record: dict[str, Any]) -> str:
    """What failed, and where packprop is worse: in score, or in time at the same score."""
    methods = record["methods"]
    scores = {name: each["score"] for name, each in methods.items() if "score" in each}
    seconds = {name: each["seconds"] for name, each in methods.items() if "score" in each}
    ours, others = [name for name in OURS if name in scores], [name for name in OTHERS if name in scores]
    failed = [f"{name} ({each['failed']})" for name, each in methods.items() if "failed" in each]
    worse = []
    for name in others:
        behind = [own for own in ours if scores[own] < scores[name] - 1e-3]
        if behind:
            worse.append(f"{name} has a better score than {' and '.join(behind)}")
    refined = "refined, no preconditioner"
    equal = refined in scores and abs(scores["dense GGN"] - scores[refined]) < 1e-2
    if equal and seconds["dense GGN"] < seconds[refined]:
        worse.append("the dense GGN, on a model this small, takes less time than the refined products")
    sentences = [f"Did not run: {'; '.join(failed)}."] if failed else []
    return " ".join([*sentences, *([f"packprop is worse in this: {'; '.join(worse)}."] if worse else [])])
