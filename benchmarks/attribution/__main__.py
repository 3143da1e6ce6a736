"""``python -m benchmarks.attribution``: how well influence foretells retraining; ``results/attribution.json``.

Small models are trained with an L2 penalty, and again on random halves of their data from the same start. The
linear datamodeling score (Park et al. 2023) is the rank correlation, over the halves, of a query's loss after
retraining with what influence foretells: minus the sum of the products with the samples of that half. It is a
mean over queries; its interval (95 %) is a bootstrap over halves and queries. The damping is the factor of the
penalty. Time is that of everything from the model and its data to the products, memory that of tensors beside
the model and the data, in a second run, if the first one took less than a minute.

Methods that draw labels run with five seeds: their score is the median, and ``scores`` has all; the interval
is that of the median's products. ``load_average``: the processes that waited for a core when a method began,
those of others and its own; times beside more than 1 are too long.

The other measure is direct: the samples that are foretold to help a query most, 1 % of all, are left out, and
the model is trained again; how much the query's loss grows, beside leaving out as many at random.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import benchmarks.attribution.peers
from benchmarks.attribution.methods import METHODS, NOTES, SAMPLED
from benchmarks.attribution.problems import (
    PROBLEMS,
    Problem,
    bootstrapped,
    datamodeling_score,
    losses,
    subsets,
    trained,
)
from benchmarks.run import RESULTS, environment, write_results
from packprop.engine.memory import LiveBytes

assert benchmarks.attribution.peers


DRAWS = 5
"""Seeds of methods that draw labels; an odd number."""


def foretold_by(products: Tensor, chosen: Tensor) -> Tensor:
    """What products ``[q, n]`` foretell of the losses of queries after training on subsets ``[q, m]``."""
    return -(products @ chosen.double().mT)


def measured(
    name: str, problem: Problem, model: Any, data: Any, queries: Any
) -> tuple[Tensor | None, dict[str, Any]]:
    """Products of a method; its seconds, and bytes at the peak; or what it says where it fails."""
    options = problem.loss, data, queries, problem.penalty
    try:
        own = copy.deepcopy(model)  # some libraries change it
        noted: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 2)}
        begun = time.perf_counter()
        products = METHODS[name](own, *options)
        seconds = time.perf_counter() - begun
        noted |= NOTES.get(name, {})
        live = LiveBytes()
        if seconds < 60:
            with live:
                METHODS[name](copy.deepcopy(model), *options)
    except Exception as error:
        return None, {"failed": f"{type(error).__name__}: {error}"[:300]}
    return products, {"seconds": seconds, "peak_bytes": live.peak or None, **noted}


class LeaveOut:
    """How much the losses of some queries grow, each without the samples that are foretold to help it most."""

    def __init__(self, problem: Problem, start: Any, data: Any, queries: Any) -> None:
        self._problem, self._start, self._data, self._queries = problem, start, data, queries
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, products: Tensor, asked: int) -> float:
        """The mean loss of the first queries, each after training without 1 % of the samples."""
        count = len(self._data[0]) // 100
        return sum(self._of(query, products[query].topk(count).indices) for query in range(asked)) / asked

    def _of(self, query: int, best: Tensor) -> float:
        key = query, *sorted(best.tolist())
        if key not in self._known:
            chosen = torch.ones(len(self._data[0]), dtype=torch.bool)
            chosen[best] = False
            after = trained(self._problem, self._start, self._data, chosen)
            one = self._queries[0][query : query + 1], self._queries[1][query : query + 1]
            self._known[key] = float(losses(self._problem, after, one))
        return self._known[key]


def of_problem(problem: Problem, seed: int, halves: int, asked: int, names: Sequence[str]) -> dict[str, Any]:
    """Some methods on one model."""
    torch.manual_seed(seed)
    data, queries = problem.data(problem.trained, problem.queries)
    start = problem.model()
    chosen = subsets(halves, problem.trained)
    actual = torch.stack([losses(problem, trained(problem, start, data, each), queries) for each in chosen], 1)
    model = trained(problem, start, data, torch.ones(problem.trained, dtype=torch.bool))
    found, described = {}, {}
    for name in names:
        torch.manual_seed(0)
        products, described[name] = measured(name, problem, model, data, queries)
        print(" ", name, json.dumps(described[name]), flush=True)
        if products is not None and name in SAMPLED:
            drawn = [products]
            for draw in range(1, DRAWS):
                torch.manual_seed(draw)
                drawn.append(METHODS[name](copy.deepcopy(model), problem.loss, data, queries, problem.penalty))
            each = [
                float(datamodeling_score(foretold_by(one, chosen), actual.double()).mean()) for one in drawn
            ]
            described[name]["scores"] = each
            products = drawn[each.index(statistics.median(each))]
        if products is not None:
            found[name] = products
    foretold = [foretold_by(products, chosen) for products in found.values()]
    scores = bootstrapped(foretold, actual.double())
    left_out = LeaveOut(problem, start, data, queries)
    whole = float(losses(problem, model, queries)[: asked or None].mean())
    for (name, products), (mean, low, high) in zip(found.items(), scores, strict=True):
        described[name] |= {"score": mean, "interval": [low, high]}
        if asked:
            described[name]["growth"] = left_out(products, asked) - whole
        print(f"  {name:28} {mean:.3f} [{low:.3f}, {high:.3f}] {described[name].get('growth')}", flush=True)
    if asked:
        at_random = left_out(torch.rand(asked, problem.trained), asked) - whole
        described["at random"] = {"growth": at_random}
    parameters = sum(p.numel() for p in model.parameters())
    facts = {"seed": seed, "halves": halves, "asked": asked, "parameters": parameters}
    return {**facts, "loss of queries": whole, "methods": described}


Records = dict[str, list[dict[str, Any]]]
"""A record of each model, by problem."""


def add(known: Records, name: str, record: dict[str, Any]) -> None:
    """Put a record among those known, in the order of seeds; keep other methods of the same model."""
    records = known.setdefault(name, [])
    for place, other in enumerate(records):
        if other["seed"] == record["seed"]:
            alike = other["halves"] == record["halves"]
            kept = other["methods"] if alike else {}
            records[place] = {**record, "methods": {**kept, **record["methods"]}}
            return
    records.append(record)
    records.sort(key=lambda each: int(each["seed"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attribution", description=__doc__)
    parser.add_argument("--problems", nargs="*", default=[*PROBLEMS], help="which (default all)")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[0, 1], help="a model each, with its own halves (default 0 1)"
    )
    parser.add_argument("--methods", nargs="*", default=[*METHODS], help="which (default all)")
    parser.add_argument("--halves", type=int, default=100, help="halves to train on again (default 100)")
    parser.add_argument(
        "--asked", type=int, default=10, help="queries whose best samples are left out (default 10)"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what the results have of other problems, seeds and methods"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    described = environment(1, len(options.seeds), processes=1)
    for name in ("kronfluence", "dattri", "traker", "curvlinops-for-pytorch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            described["versions"][name] = metadata.version(name)
    known: Records = {}
    for name in options.problems:
        for seed in options.seeds:
            print(name, seed, flush=True)
            record = of_problem(PROBLEMS[name], seed, options.halves, options.asked, options.methods)
            if options.add:  # now: another call may have written meanwhile
                known = json.loads((RESULTS / "attribution.json").read_text(encoding="utf-8"))["problems"]
            add(known, name, record)
            write_results("attribution", described, problems=known)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
