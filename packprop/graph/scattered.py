"""Samples whose rows follow no rule: packed sequences, and what else stands in the same pass.

# NOTE [Scattered rows]
The rows of packed sequences belong to samples by their lengths and by the order that they were sorted in. No
shape shows that; the graph does. Each sample is fed random numbers times a power of two, which is a digit of
its number, and in a second sweep times the inverse power. The quotient of what comes back in a row is the
square of that power, so the digits of the row's sample can be read. Rows where nothing comes back have
cotangents of zero, and may be anybody's: those of packed sequences go with the rest of their sequence. What is
found is tried out like any other layout (NOTE [Separation]), and is found anew in each pass: the next batch has
other lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.sweep import ONE_COLUMN_WITHOUT_INPUTS, sweep
from packprop.tensors.layout import Layout, layout_of_rows

Place = tuple[ReachedUse, int]
"""A use, and one of its outputs."""

Seeds = Callable[[Tensor], Sequence[Tensor]]
"""From a factor for each sample ``[n]`` to what is fed in at the model's outputs."""

UNKNOWN = -1


def has_packed_sequences(graph: Graph) -> bool:
    """Whether the pass goes through a use whose outputs are packed sequences."""
    return any(site.entry.sequences is not None for use in graph.uses for site in use.sites)


def scattered_layouts(
    graph: Graph, edges: Sequence[GradientEdge], seeds: Seeds, samples: int, largest: float
) -> dict[Place, Layout]:
    """Where the outputs of uses hold the samples, as far as rows of what comes back show it.

    Args:
        graph: With uses whose outputs are packed sequences, and perhaps others.
        edges: Where samples are fed in.
        seeds: What is fed in there.
        samples: Number of samples.
        largest: The largest number of the precision.
    """
    reach = 24 if largest > 1e30 else 4
    base = 2 * reach + 1
    digits = max(1, math.ceil(math.log(samples, base) - 1e-9))
    numbers = torch.arange(samples)
    found: dict[Place, Tensor] = {}
    for digit in range(digits):
        powers = (numbers // base**digit % base - reach).double()
        up, down = (_sizes(graph, edges, seeds(torch.exp2(sign * powers))) for sign in (1, -1))
        for place, large in up.items():
            half = (large / down.get(place, large)).log2() / 2
            own = half.round()
            is_known = half.isfinite() & ((half - own).abs() < 1e-3) & (own.abs() <= reach)
            value = torch.where(is_known, (own + reach) * base**digit, torch.nan)
            found[place] = found[place] + value if digit else value
    rows = {place: value.nan_to_num(UNKNOWN).long() for place, value in found.items()}
    layouts: dict[Place, Layout] = {}
    for use in graph.uses:
        sequences = next((s.entry.sequences for s in use.sites if s.entry.sequences is not None), None)
        at_use = {index: known for (other, index), known in rows.items() if other is use}
        if sequences is not None:
            owners = _owners(at_use, sequences)
            at_use = {index: owners[list(groups)] for index, groups in enumerate(sequences)}
        for index, known in at_use.items():
            belongs = known.clamp(min=0)
            if len(belongs) and int(belongs.max()) < samples:
                layouts[use, index] = layout_of_rows(_axis(use, index), belongs, samples)
    return layouts


def _owners(rows: dict[int, Tensor], sequences: Sequence[tuple[int, ...]]) -> Tensor:
    """The sample of each sequence, as far as it is known."""
    owners = torch.full((1 + max(map(max, sequences)),), UNKNOWN)
    for index, known in rows.items():
        for sequence, sample in zip(sequences[index], known.tolist(), strict=True):
            if sample != UNKNOWN:
                owners[sequence] = sample
    return owners


def _axis(use: ReachedUse, index: int) -> int:
    """The axis of an output that may hold rows of samples."""
    known = next((s.entry.sample_axes for s in use.sites if s.entry.sample_axes is not None), None)
    return 0 if known is None else known[index]


def _sizes(graph: Graph, edges: Sequence[GradientEdge], seeds: Sequence[Tensor]) -> dict[Place, Tensor]:
    """How large the rows of each output are, along the axis that may hold samples."""
    sizes: dict[Place, Tensor] = {}

    def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        for index, cotangent in enumerate(cotangents):
            if cotangent is not None and cotangent.dim() > 1:
                rows = cotangent[0].movedim(_axis(use, index), 0).flatten(1)
                sizes[use, index] = torch.linalg.vector_norm(rows.double(), 1, 1).cpu()

    sweep(edges, seeds, graph.uses, visit, ONE_COLUMN_WITHOUT_INPUTS)
    return sizes
