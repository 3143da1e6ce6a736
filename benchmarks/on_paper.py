"""``python -m benchmarks.on_paper``: 7 billion parameters on 64 devices, over a million samples, on paper.

Nothing is run but a plan (``packprop.plan(..., mesh_shape=64)``, on the meta device). Memory is its. Time
is that of a plain pass, by counting multiplications, times what the quantity took over a plain pass in
``results/language-model.json``, which was measured on a processor. Rates of devices and networks are assumed,
not measured: the page says so. Writes ``results/on_paper.json`` and ``docs/on_paper.md``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from benchmarks.measure import ROOT
from benchmarks.run import RESULTS, environment, write_results
from packprop.extensions import BatchL2Grad, SumGradSquared

WIDTH, HEADS, INNER, DEPTH, WORDS = 4096, 32, 11008, 32, 32000
LENGTH, SAMPLES, BATCH, DEVICES = 2048, 1_000_000, 2, 64
DIMENSION = 4096
"""Numbers that are kept of each sample's gradient."""

FLOPS, UTILISATION = 989e12, 0.4
"""An H100 in bfloat16, by its data sheet, and the share of it that training usually reaches: assumed."""

NETWORK = 50e9
"""Bytes a second of one device to the others, 400 Gbit/s: assumed."""


class Block(nn.Module):
    """Attention and a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, t, d]`` to the same."""
        samples, length, _ = x.shape
        heads = self.projections(self.before(x)).view(samples, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        inner = self.between(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Decoder(nn.Module):
    """A decoder of 7 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """From ``[n, t]`` to ``[n, t, words]``."""
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(outputs: Tensor, words: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(outputs.flatten(0, 1), words.flatten())


def measured_over_plain(quantity: str) -> float:
    """Time over a plain pass of the language model of the suites, in its results."""
    records = json.loads((RESULTS / "language-model.json").read_text())["records"]
    (found,) = [
        each["over_plain"]["median"]
        for each in records
        if each["quantity"] == quantity and each["contestant"] == "packprop" and each.get("over_plain")
    ]
    return float(found)


def on_paper(asked: Any) -> dict[str, Any]:
    """Memory, time, network and disk of one quantity."""
    with torch.device("meta"):
        model, words = Decoder().bfloat16(), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    start = time.perf_counter()
    plan = packprop.plan(model, loss, (words, words), [asked], mesh_shape=DEVICES, device="cuda")
    planned_in = time.perf_counter() - start
    parameters = sum(each.numel() for each in model.parameters())
    multiplied = parameters - WORDS * WIDTH  # the table is looked up
    over_plain = measured_over_plain(asked.name)
    flops = 6 * multiplied * LENGTH + 6 * DEPTH * WIDTH * LENGTH**2
    steps = SAMPLES / (BATCH * DEVICES)
    seconds = SAMPLES * flops * over_plain / (DEVICES * FLOPS * UTILISATION)
    left_out = (DEVICES - 1) / DEVICES
    sums = 2 * 4 * parameters if plan.results > parameters / DEVICES else 0  # an all-reduce in float32
    network = steps * (2 * 2 * parameters + 2 * parameters + sums) * left_out
    return {
        "quantity": asked.name,
        "parameters": parameters,
        "planned_in_seconds": planned_in,
        "peak_bytes": plan.peak,
        "parts_bytes": plan.parts,
        "over_plain": over_plain,
        "multiplications_of_a_sample": flops / 2,
        "steps": steps,
        "compute_hours": seconds / 3600,
        "network_bytes_of_a_device": network,
        "network_hours": network / NETWORK / 3600,
        "disk_bytes_of_projections": SAMPLES * DIMENSION * 2,
        "disk_bytes_of_a_checkpoint": 4 * parameters,
    }


def page(records: Sequence[dict[str, Any]]) -> str:
    """The page."""
    first = records[0]
    rows = [
        ("planned in", *(f"{each['planned_in_seconds']:.0f} s" for each in records)),
        ("peak of a device, from the plan", *(f"{each['peak_bytes'] / 2**30:.1f} GiB" for each in records)),
        *(
            (f"  {kind}", *(f"{each['parts_bytes'].get(kind, 0) / 2**30:.2f} GiB" for each in records))
            for kind in dict.fromkeys(kind for each in records for kind in each["parts_bytes"])
        ),
        ("over a plain pass, measured on a processor", *(f"{each['over_plain']:.2f}" for each in records)),
        ("computing", *(f"{each['compute_hours']:.1f} h" for each in records)),
        ("sent by a device", *(f"{each['network_bytes_of_a_device'] / 1e12:.0f} TB" for each in records)),
        ("sending, if nothing overlaps", *(f"{each['network_hours']:.1f} h" for each in records)),
        ("projections on disk", *(f"{each['disk_bytes_of_projections'] / 1e9:.1f} GB" for each in records)),
        ("a checkpoint of sums", *(f"{each['disk_bytes_of_a_checkpoint'] / 1e9:.0f} GB" for each in records)),
    ]
    names = " | ".join(f"`{each['quantity']}`" for each in records)
    table = [f"| | {names} |", "|---|" + "---|" * len(records), *(f"| {' | '.join(row)} |" for row in rows)]
    facts = {
        "billions": f"{first['parameters'] / 1e9:.2f}",
        "depth": DEPTH,
        "width": WIDTH,
        "samples": f"{SAMPLES:,}",
        "length": f"{LENGTH:,}",
        "batch": BATCH,
        "devices": DEVICES,
        "table": "\n".join(table),
        "flops": f"{FLOPS / 1e12:.0f}",
        "utilisation": UTILISATION,
        "network": f"{NETWORK / 1e9:.0f}",
    }
    return PAGE.format(**facts)


PAGE = """# Seven billion parameters on paper

A decoder of {billions} billion parameters in bfloat16 ({depth} blocks of width {width}), {samples} samples of
{length} tokens, {batch} at a time on each of {devices} devices, sharded by `fully_shard`. Nobody ran this:
`python -m benchmarks.on_paper` takes it from `packprop.plan(..., mesh_shape={devices})`, and arithmetic.

{table}

There are P parameters, M of them in products (all but the embedding table), N samples of T tokens, B of
them in a step of a device, D devices, and L blocks of width W. packprop keeps d numbers of each
sample's gradient.

- memory: the plan. Shards at 1/D, the units that compute as a whole, results as a whole until a pass is over.
- operations of a sample: `6 M T + 6 L W T^2`: forward pass, both halves of the backward pass, causal attention.
- computing: `N (6 M T + 6 L W T^2) r / (D F u)`, with r the time over a plain pass, F operations a second of a
  device, u the share of them that the device reaches.
- steps: `N / (B D)`.
- sent by a device in a step: `(2 P 2 + 2 P) (D - 1) / D` bytes, parameters twice and gradients once, in two
  bytes; where values are sums of all ranks, `2 P 4 (D - 1) / D` more: `ranks="all"` merges them in each pass.
- on disk: `2 N d` bytes of projections in half precision; `4 P` of a checkpoint of sums.

We assumed, and did not measure: F = {flops} TFLOP/s (an H100 in bfloat16, by its data sheet),
u = {utilisation}, {network} GB/s from a device to the others. We measured r, but on a processor and a small
model, the language model of [the benchmarks](benchmarks.md). So times are good to a factor of two at best.
"""


def main() -> int:
    """Run the command."""
    records = [on_paper(asked) for asked in (BatchL2Grad(), SumGradSquared())]
    assumed = {"flops": FLOPS, "utilisation": UTILISATION, "network_bytes_a_second": NETWORK}
    described = environment(torch.get_num_threads(), 1, processes=1)
    write_results("on_paper", described, assumed=assumed, records=records)
    (ROOT / "docs" / "on_paper.md").write_text(page(records))
    for each in records:
        print(json.dumps({name: value for name, value in each.items() if name != "parts_bytes"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
