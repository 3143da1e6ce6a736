"""``python -m benchmarks.attribution``: how well influence foretells retraining; ``results/attribution.json``.

A small network is trained on 500 digits with an L2 penalty, and again on random halves of them from the same
start. The linear datamodeling score (Park et al. 2023) is the rank correlation, over the halves, of a query's
loss after retraining with what influence foretells: minus the sum of the products with the digits of that half.
The mean over 100 other digits is one number for each seed and curvature. The damping is the factor of the
penalty.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from benchmarks.run import environment, write_results
from packprop.examples import load_digits
from packprop.extensions import EKFAC, BatchGrad, SqrtGGNExact

TRAINED, QUERIES, WIDTH, PENALTY = 500, 100, 32, 1e-3
CURVATURES = {
    "EKFAC, one draw": lambda: EKFAC(),
    "EKFAC, ten draws": lambda: EKFAC(mc_samples=10),
    "EKFAC, exact": lambda: EKFAC(fisher="exact"),
}
LOSS = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    """64, 32 and 10 units."""
    return nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)).double()


def outputs(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """What many networks make of the same inputs ``[m, n, 10]``; parameters are ``[m, *p]``."""
    first, shift, second, last = parameters
    hidden = (x @ first.mT + shift[:, None]).tanh()
    return hidden @ second.mT + last[:, None]


def trained(start: nn.Module, counted: Tensor, x: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    """Parameters ``[m, *p]`` of networks that are trained on the samples that are counted ``[m, n]``."""
    share, x = (counted / counted.sum(1, keepdim=True)).float(), x.float()
    copies = [p.detach().float().expand(len(counted), *p.shape).clone() for p in start.parameters()]
    parameters = [copy.requires_grad_() for copy in copies]
    optimizer = torch.optim.Adam(parameters, lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    targets = y.expand(len(counted), -1).flatten()
    for _ in range(steps):
        optimizer.zero_grad()
        losses = F.cross_entropy(outputs(parameters, x).flatten(0, 1), targets, reduction="none")
        penalty = sum(p.square().sum() for p in parameters)
        ((losses.view_as(share) * share).sum() + PENALTY / 2 * penalty).backward()
        optimizer.step()
        schedule.step()
    return [p.detach() for p in parameters]


def ranks(values: Tensor) -> Tensor:
    """Ranks along the last axis, of mean zero and length one."""
    order = values.argsort(-1).argsort(-1).to(values.dtype)
    centred = order - order.mean(-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True)


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the samples' own losses ``[n, p]``."""
    rows = packprop.compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), [BatchGrad()], progress=False)
    return torch.cat([rows["grad_batch"][name].flatten(1) for name, _ in model.named_parameters()], 1)


def with_dense_ggn(model: nn.Module, data: tuple[Tensor, Tensor], queries: tuple[Tensor, Tensor]) -> Tensor:
    """Products ``[q, n]`` with the inverse of the GGN of all parameters together, dense and damped."""
    roots = packprop.compute(model, LOSS, data, [SqrtGGNExact()], progress=False)["sqrt_ggn_exact"]
    columns = torch.cat([roots[name].flatten(2) for name, _ in model.named_parameters()], 2).flatten(0, 1)
    ggn = columns.mT @ columns
    ggn.diagonal().add_(PENALTY)
    return gradients(model, *queries) @ torch.linalg.solve(ggn, gradients(model, *data).mT)


def by_influence(model: nn.Module, store: Path, queries: tuple[Tensor, Tensor], **options: object) -> Tensor:
    """Products ``[q, n]`` by ``packprop.influence``, in the order of the training digits."""
    side = packprop.influence(store, model, LOSS, queries, k=TRAINED, **options).largest
    products = torch.zeros(QUERIES, TRAINED, dtype=torch.float64)
    return products.scatter_(1, side.rows.long(), side.products.double())


def scores(seed: int, halves: int, steps: int) -> dict[str, float]:
    """The mean score over the queries for each curvature."""
    torch.manual_seed(seed)
    images, digits = load_digits()
    pixels, order = images.flatten(1).double(), torch.randperm(len(digits))
    pixels, digits = pixels[order], digits[order]
    data, queries = (pixels[:TRAINED], digits[:TRAINED]), (pixels[-QUERIES:], digits[-QUERIES:])
    model = network()
    chosen = torch.rand(halves, TRAINED).argsort(1) < TRAINED // 2
    again = trained(model, chosen.double(), *data, steps)
    after = outputs(again, queries[0].float())
    actual = F.cross_entropy(after.flatten(0, 1), queries[1].repeat(halves), reduction="none").view(halves, -1)
    whole = trained(model, torch.ones(1, TRAINED).double(), *data, steps)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), whole, strict=True):
            parameter.copy_(value[0])
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        packprop.compute(model, LOSS, data, [BatchGrad()], store=store, progress=False)
        products = {"inner products": by_influence(model, store, queries)}
        for name, make in CURVATURES.items():
            curvature = packprop.compute(model, LOSS, data, [make()], progress=False)
            options = {"curvature": curvature, "damping": PENALTY}
            products[name] = by_influence(model, store, queries, **options)
    products["dense GGN"] = with_dense_ggn(model, data, queries)
    for name, each in products.items():
        foretold = -(each @ chosen.double().mT)
        found[name] = float((ranks(foretold) * ranks(actual.mT.double())).sum(1).mean())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attribution", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=5, help="networks, each with halves of its own (default 5)"
    )
    parser.add_argument("--halves", type=int, default=40, help="halves to train on again (default 40)")
    parser.add_argument("--steps", type=int, default=400, help="steps of training (default 400)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    records = []
    for seed in range(options.seeds):
        records.append({"seed": seed, "score": scores(seed, options.halves, options.steps)})
        print(json.dumps(records[-1]), flush=True)
    means = {}
    for name in records[0]["score"]:
        each = torch.tensor([record["score"][name] for record in records])
        error = float(each.std() / math.sqrt(len(each))) if len(each) > 1 else None
        means[name] = {"mean": float(each.mean()), "standard_error": error}
        print(f"{name:18} {means[name]['mean']:.3f}")
    described = environment(1, options.seeds, processes=1)
    write_results(
        "attribution", described, penalty=PENALTY, halves=options.halves, means=means, records=records
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
