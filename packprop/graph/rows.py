"""Which sample each row belongs to, where data decided on the order of rows.

# NOTE [Rows of samples]
A mixture of experts takes rows of many samples out of their order, and gives some of them to each expert: no
axis holds the samples in order any more, and an expert may see any number of rows of a sample, or none. They
are not mixed for that. The sweeps of NOTE [Separation] tell whose row each is, too: fed ``2^k`` and then
``2^-k``, a row of one sample comes back with a quotient of ``2^2k``, and a row in which two samples meet with
another one. There are fewer powers than there may be samples: a sample is known by several digits then, with
two sweeps for each. Where only zeros come back, as behind a weight of zeros or at positions that the loss
does not read, NaN is fed in as in NOTE [Hidden mixing]: for each binary digit to the samples that have it,
and to the others. Rows that no sample reaches at all may be anybody's.

Layouts of rows are for functions behind one that reorders rows, where no other layout fits. All other
functions must have the samples in order: else a batch that was reversed would pass for one in some order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.graph.graph import ReachedUse
from packprop.graph.sweep import ONE_COLUMN_WITHOUT_INPUTS, SweepOptions, sweep
from packprop.tensors.layout import Layout, layout_of_rows
from packprop.tensors.precision import accumulation_dtype

Place = tuple[ReachedUse, int, int]
"""A use, one of its outputs, and an axis of that."""


Seeds = Callable[[Tensor], list[Tensor]]
"""From a factor for each sample ``[n]`` to what is fed in at the model's outputs."""


_UNMASKED = SweepOptions(needs_inputs=False, unmasked=True)


class Sweeps(NamedTuple):
    """Where sweeps begin, at the model's outputs, and the uses that they go to."""

    edges: Sequence[GradientEdge]
    uses: Sequence[ReachedUse]


def levels(samples: int, largest: float) -> Tensor:
    """Exponents of two, as different as the range of the precision allows, and no more than samples."""
    reach = 24 if largest > 1e30 else 4
    return torch.linspace(-reach, reach, min(samples, 2 * reach + 1), dtype=torch.float64).round()


def layouts_of_rows(
    places: Sequence[Place],
    sweeps: Sweeps,
    noise: Seeds,
    ones: Seeds,
    exponents: Tensor,
    samples: int,
    tolerance: float,
) -> dict[Place, Layout]:
    """The layout of rows at each place; none where samples meet in a row.

    Args:
        places: Where the samples are looked for.
        sweeps: What is swept.
        noise: Makes seeds of random numbers.
        ones: Makes seeds of equal numbers.
        exponents: What tells samples apart, as far as it goes.
        samples: Number of samples.
        tolerance: Relative size of what may be rounding.
    """
    number, base = torch.arange(samples), len(exponents)
    possible: dict[Place, Tensor] = {}
    unknown: dict[Place, Tensor] = {}
    for digit in range(max(1, math.ceil(math.log(samples, base) - 1e-9))):
        power = exponents[number // base**digit % base]
        up = _sizes(places, sweeps, noise(torch.exp2(power)), ONE_COLUMN_WITHOUT_INPUTS)
        down = _sizes(places, sweeps, noise(torch.exp2(-power)), ONE_COLUMN_WITHOUT_INPUTS)
        for place, rows in up.items():
            zero = (rows == 0) | (down[place] == 0)
            found = (rows / down[place]).log2() / 2
            fits = (found[:, None] - power).abs() < tolerance
            unknown[place] = unknown.get(place, zero) | zero
            possible[place] = possible.get(place, fits) & fits
    layouts = {}
    _look_with_nan({place: rows for place, rows in unknown.items() if rows.any()}, possible, sweeps, ones)
    for place in places:
        use, index, axis = place
        if place not in possible:  # nothing came back, or there is nothing
            sample_of = torch.zeros(use.recorded.shapes[index][axis], dtype=torch.int64)
        elif bool((possible[place].any(1) | unknown[place]).all()):
            sample_of = possible[place].byte().argmax(1)
        else:
            continue
        layouts[place] = layout_of_rows(axis, sample_of, samples)
    return layouts


def _look_with_nan(
    unknown: Mapping[Place, Tensor], possible: dict[Place, Tensor], sweeps: Sweeps, ones: Seeds
) -> None:
    """Find the samples of rows in which zeros came back, by NaN for half of the samples at a time."""
    if not unknown:
        return
    samples = next(iter(possible.values())).shape[1]
    number = torch.arange(samples)
    for place, rows in unknown.items():
        possible[place][rows] = True
    for digit in range(max(1, (samples - 1).bit_length())):
        for value in (0, 1):
            fed = number // 2**digit % 2 == value
            try:
                with torch.autograd.set_detect_anomaly(False):
                    seeds = ones(torch.where(fed, torch.nan, 0.0))
                    sizes = _sizes(list(unknown), sweeps, seeds, _UNMASKED)
            except Exception:  # a user's function that refuses NaN
                return
            for place, rows in unknown.items():
                possible[place][rows] &= sizes[place][rows].isnan()[:, None] == fed


def _sizes(
    places: Sequence[Place], sweeps: Sweeps, seeds: Sequence[Tensor], options: SweepOptions
) -> dict[Place, Tensor]:
    """Sweep the seeds and measure each row ``[k]`` along the axis of each place."""
    sizes: dict[Place, Tensor] = {}
    wanted: dict[ReachedUse, list[Place]] = {}
    for place in places:
        wanted.setdefault(place[0], []).append(place)

    def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        for place in wanted.get(use, ()):
            _, index, axis = place
            cotangent = cotangents[index]
            if cotangent is not None:
                rows = cotangent[0].movedim(axis, 0).unsqueeze(-1)
                wide, rest = accumulation_dtype(rows.dtype), tuple(range(1, rows.dim()))
                sizes[place] = torch.linalg.vector_norm(rows, 1, rest, dtype=wide).to("cpu", torch.float64)

    sweep(sweeps.edges, seeds, sweeps.uses, visit, options)
    return sizes
