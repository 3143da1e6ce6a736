"""``python -m benchmarks.attribution.costs``: what influence costs on a decoder of ten million parameters.

A decoder of the usual shape with random weights, and random sequences: only the work counts here, not what it
finds. Each method has a process of its own, which computes the factors of EKFAC over all sequences, and then
the products of each query with all of them. kronfluence takes linear layers alone; packprop takes all
parameters, or those of linear layers, where the others are frozen. Peaks are the system's figure, above what
the process had before the first step. ``results/attribution-costs.json`` has the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from benchmarks.attribution.peers import by_kronfluence
from benchmarks.attribution.problems import ByToken, Data
from benchmarks.run import RESULTS, environment, write_results
from packprop.extensions import EKFAC

WORDS, LENGTH, WIDTH, BLOCKS, HEADS = 1024, 32, 256, 12, 4
DAMPING = 1e-3

Told = Callable[[str], None]


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.mixed(self.before(x)).chunk(3, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.between(x))))
        return out


class Decoder(nn.Module):
    """Logits ``[n, t, words]``."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        out: Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places(places))))
        return out


def by_packprop(
    model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float, batch: int, told: Told
) -> Tensor:
    """Products of all sequences, without a store."""
    result = packprop.compute(model, loss, data, [EKFAC()], batch_size=batch, progress=False)
    told("factors")
    options: dict[str, Any] = {"curvature": result, "damping": damping, "batch_size": batch}
    found = packprop.influence(data, model, loss, queries, k=len(data[0]), memory="1GiB", **options)
    told("scores")
    side = found.largest
    return torch.zeros(side.products.shape, dtype=torch.float64).scatter_(1, side.rows, side.products)


def of_linear_layers(model: nn.Module, *arguments: Any) -> Tensor:
    """The same, where tables and norms are frozen."""
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
    return by_packprop(model, *arguments)


METHODS: dict[str, Callable[..., Tensor]] = {
    "packprop": by_packprop,
    "packprop, linear layers": of_linear_layers,
    "kronfluence, linear layers": by_kronfluence,
}


def measured(name: str, sequences: int, asked: int, batch: int) -> dict[str, Any]:
    """Seconds of each step, and the peak, in this process."""
    torch.manual_seed(0)
    model = Decoder().eval()
    text = torch.randint(WORDS, (sequences + asked, LENGTH + 1))
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    data, queries = (inputs[:sequences], targets[:sequences]), (inputs[sequences:], targets[sequences:])
    loss = ByToken()
    loss(model(inputs[:batch]), targets[:batch]).backward()
    model.zero_grad()
    seconds: dict[str, float] = {}
    before, begun = _peak(), [time.perf_counter()]

    def told(step: str) -> None:
        seconds[step] = time.perf_counter() - begun[-1]
        begun.append(time.perf_counter())

    products = METHODS[name](model, loss, data, queries, DAMPING, batch, told)
    return {
        "batch": batch,
        "seconds": seconds,
        "peak_bytes": _peak() - before,
        "products": products[:, :20].tolist(),  # kept: another call may compare its own
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def agreement(one: list[list[float]], other: list[list[float]]) -> float:
    """Mean correlation of products over queries."""
    pairs = zip(torch.tensor(one), torch.tensor(other), strict=True)
    return float(torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attribution.costs", description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--asked", type=int, default=8, help="queries")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--add", action="store_true", help="keep what the results have of other methods")
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    parser.add_argument("--here", help="run one method in this process")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.here:
        print(json.dumps(measured(options.here, options.sequences, options.asked, options.batch)))
        return 0
    found: dict[str, Any] = {}
    sizes = ["--sequences", str(options.sequences), "--asked", str(options.asked)]
    for name in options.methods:
        command = [sys.executable, "-m", "benchmarks.attribution.costs", "--here", name, *sizes]
        command += ["--threads", str(options.threads), "--batch", str(options.batch)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found[f"{name}, batches of {options.batch}"] = json.loads(run.stdout.splitlines()[-1])
        print(name, run.stdout.splitlines()[-1][:300], flush=True)
    if options.add:
        found = {
            **json.loads((RESULTS / "attribution-costs.json").read_text(encoding="utf-8"))["methods"],
            **found,
        }
    known = [
        found[name]["products"] for name in sorted(found) if "products" in found[name]
    ]  # kronfluence first
    for record in found.values():
        if "products" in record:
            record["correlation"] = agreement(known[0], record["products"])
    described = environment(options.threads, 1, processes=1)
    with contextlib.suppress(metadata.PackageNotFoundError):
        described["versions"]["kronfluence"] = metadata.version("kronfluence")
    sizes_of_all = {"sequences": options.sequences, "asked": options.asked, "length": LENGTH}
    write_results("attribution-costs", described, **sizes_of_all, methods=found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
