"""``python -m benchmarks.checkpointing``: whether checkpointing still saves; ``results/checkpointing.json``.

A deep network of equal blocks, each inside ``torch.utils.checkpoint`` or ``save_on_cpu``. Peaks are of tracked
bytes (NOTE [Which peak] in ``benchmarks.measure``). An extension is compared with plain training of the same
network in the same way: its peak with that plus its results, its time with that alone.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import packprop
from benchmarks.tracked import size_of
from packprop import extensions
from packprop.engine.memory.live import LiveBytes

MIB = 2**20


def _offloaded(function: Callable[..., Any], *inputs: Any) -> Any:
    with save_on_cpu():
        return function(*inputs)


WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda function, *inputs: function(*inputs),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "save_on_cpu": _offloaded,
}
EXTENSIONS = ("BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "DiagGGNMC", "KFAC")


@dataclass(frozen=True)
class Size:
    """How large the network and its data are."""

    samples: int = 512
    width: int = 256
    blocks: int = 8
    layers: int = 4


class Deep(nn.Module):
    """Blocks of linear layers, normalisation and nonlinearities; each block is called through ``wrap``."""

    def __init__(self, wrap: Callable[..., Any], size: Size) -> None:
        super().__init__()
        self.wrap = wrap
        self.first = nn.Linear(16, size.width)
        self.blocks = nn.ModuleList(_block(size) for _ in range(size.blocks))
        self.last = nn.Linear(size.width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.last(x)


def _block(size: Size) -> nn.Sequential:
    layers: list[nn.Module] = [nn.LayerNorm(size.width)]
    for _ in range(size.layers):
        layers += [nn.Linear(size.width, size.width), nn.GELU()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Bytes:
    """Tracked bytes of one training step above its start.

    ``kept`` is alive when the forward pass ends, ``left``, gradients and results, when the graph is gone.
    """

    peak: int
    kept: int
    left: int
    results: int


@dataclass(frozen=True)
class Step:
    """A training step; without an extension the model is not extended either."""

    way: str
    extension: str | None
    size: Size

    def prepared(self) -> tuple[nn.Module, Callable[[], Tensor], list[Any]]:
        """Model, forward pass and extensions."""
        torch.manual_seed(0)
        model, loss = Deep(WAYS[self.way], self.size), nn.CrossEntropyLoss()
        asked = [] if self.extension is None else [getattr(extensions, self.extension)()]
        if asked:
            packprop.extend(model)
            packprop.extend(loss)
        x, y = torch.randn(self.size.samples, 16), torch.randint(4, (self.size.samples,))
        return model, lambda: loss(model(x), y), asked

    def bytes(self) -> Bytes:
        """What one step takes."""
        model, forward, asked = self.prepared()
        gc.collect()
        with LiveBytes() as counted:
            value = forward()
            kept = counted.now
            _backward(value, asked)
            del value
        found = [getattr(p, e.savefield) for p in model.parameters() for e in asked]
        return Bytes(counted.peak, kept, counted.now, size_of(found))

    def seconds(self, rounds: int) -> float:
        """Median time of one step, after one to warm up."""
        model, forward, asked = self.prepared()
        taken = []
        for _ in range(rounds + 1):
            model.zero_grad()
            start = time.perf_counter()
            _backward(forward(), asked)
            taken.append(time.perf_counter() - start)
        return median(taken[1:])


def _backward(value: Tensor, asked: list[Any]) -> None:
    if not asked:
        value.backward()
        return
    with packprop.backpack(*asked):
        value.backward()


def main() -> None:
    from benchmarks.run import environment, write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = Size()
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        base, time_of_base = Step(way, None, size).bytes(), Step(way, None, size).seconds(options.rounds)
        rows.append({"way": way, "extension": None, "bytes": asdict(base), "seconds": time_of_base})
        print(f"{way}: peak {base.peak / MIB:.1f} MiB, {time_of_base:.3f} s")
        for extension in EXTENSIONS:
            step = Step(way, extension, size)
            mine, taken = step.bytes(), step.seconds(options.rounds)
            ratio = mine.peak / (base.peak + mine.results)
            rows.append(
                {
                    "way": way,
                    "extension": extension,
                    "bytes": asdict(mine),
                    "peak_over_plain_and_results": ratio,
                    "seconds": taken,
                    "time_over_plain": taken / time_of_base,
                }
            )
            print(f"  {extension:15} {mine.peak / MIB:6.1f} MiB, {ratio:.3f} of plain + results; {taken:.3f} s")
    described = environment(options.threads, options.rounds, processes=1)
    write_results("checkpointing", described, size=asdict(size), rows=rows)


if __name__ == "__main__":
    main()
