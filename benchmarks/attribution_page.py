"""What ``benchmarks.attribution`` found: a table for each model."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import MIB

HEADS = "method", "score", "95 %", "over draws", "seconds", "peak of tensors", "without the top 1 %"

INTRODUCTION = """\
How well influence foretells retraining: small models are trained again on random halves of their data, \
and the linear datamodeling score (Ilyas et al. 2022; Park et al. 2023) is the rank correlation, over the \
halves, between the losses of other samples and what each method foretold for the half. The damping is the \
factor of the L2 penalty, for every method. The interval is a bootstrap over halves and queries. Methods \
that draw labels run with five seeds: the score is the median, and *over draws* the least and the largest. \
Time and memory cover everything from the model to the products. *Without the top 1 %*: how much the \
losses of some queries grow, on average, when each is asked of a model trained without the samples that \
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
                f"{peak / MIB:.0f} MiB" if peak else "-",
                f"{growth:+.2f}" if growth is not None else "-",
            ]
        )
    return rows


def remarks_of(record: dict[str, Any]) -> str:
    """What failed, and the methods of others that are ahead of packprop's at equal or less time."""
    methods = record["methods"]
    failed = [f"{name} ({each['failed']})" for name, each in methods.items() if "failed" in each]
    ours = {
        name: methods[name]
        for name in ("EKFAC", "EKFAC, exact", "refined, no preconditioner", "EKFAC, refined")
        if "score" in methods.get(name, {})
    }
    ahead = [
        f"{name} is ahead of {own} in score, and takes less time"
        for name, each in methods.items()
        for own, mine in ours.items()
        if name not in ours
        and "score" in each
        and each["score"] > mine["score"] + 1e-3
        and each["seconds"] < mine["seconds"]
    ]
    sentences = [f"Did not run: {'; '.join(failed)}."] if failed else []
    sentences += [f"packprop is worse here: {'; '.join(ahead)}."] if ahead else []
    slower = [
        f"{name} in {each['seconds']:.1f} s"
        for name, each in methods.items()
        if name not in ours
        and "refined, no preconditioner" in ours
        and abs(each.get("score", 0) - ours["refined, no preconditioner"]["score"]) <= 1e-2
        and each["seconds"] < ours["refined, no preconditioner"]["seconds"]
    ]
    sentences += [
        f"The same score as the refined one takes less time on a model this small: {'; '.join(slower)}."
    ] * bool(slower)
    return " ".join(sentences)
