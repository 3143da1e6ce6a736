"""Which sample each row belongs to, where data decided on the order of rows.

# NOTE [Rows of samples]
A mixture of experts takes rows of many samples out of their order, and gives some of them to each expert; the
rows of packed sequences belong to samples by their lengths, and by the order that they were sorted in. No axis
holds the samples in order any more, and there may be any number of rows of a sample, or none. They are not
mixed for that. The sweeps of NOTE [Separation] tell whose row each is, too: fed ``2^k`` and then ``2^-k``, a
row of one sample comes back with a quotient of ``2^2k``, and a row in which two samples meet with another one.
There are fewer powers than there may be samples: a sample is known by several digits then, with two sweeps for
each. All rows of a packed sequence are of one sample, those of steps that the loss does not read among them.
Where only zeros come back, as behind a weight of zeros, NaN is fed in as in NOTE [Hidden mixing]: for each
binary digit to the samples that have it, and to the others. Rows that no sample reaches may be anybody's.

Layouts of rows are for functions behind one that reorders rows, where no other layout fits. All other
functions must have the samples in order: else a batch that was reversed would pass for one in some order. They
are found anew in each pass: the next batch has other lengths, and goes to other experts.
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

Fitting = dict[ReachedUse, list[list[Layout]]]
"""Ways in which each output of a use may hold the samples, the usual one first."""


Place = tuple[ReachedUse, int, Layout]
"""A use, one of its outputs by number, and a way in which that may hold samples."""


Sizes = dict[Place, Tensor]
"""The size of the rows of each sample ``[n]`` at a place."""


def first_of(fitting: Fitting) -> list[list[Layout]]:
    """For each use the usual layouts of its outputs."""
    return [[layouts[0] for layouts in places] for places in fitting.values()]


def sizes_of_rows(
    uses: Sequence[ReachedUse],
    edges: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    fitting: Fitting,
    options: SweepOptions = ONE_COLUMN_WITHOUT_INPUTS,
) -> Sizes:
    """Sweep the seeds and measure the rows of each sample ``[n]``, for each layout that may be."""
    sizes: Sizes = {}

    def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        for index, layouts in enumerate(fitting.get(use, ())):  # none for others in checkpoints on the way
            cotangent = cotangents[index]
            if cotangent is None:
                continue
            for layout in layouts:
                sizes[use, index, layout] = sizes_of(layout.to_front(cotangent, 1)[0])

    sweep(edges, seeds, uses, visit, options)
    return sizes


Seeds = Callable[[Tensor], list[Tensor]]
"""From a factor for each sample ``[n]`` to what is fed in at the model's outputs."""


UNKNOWN, MIXED = -1, -2
"""In place of a sample's number: nothing came back in a row, or it is no single sample's."""


UNMASKED = SweepOptions(needs_inputs=False, unmasked=True)


class Sweeps(NamedTuple):
    """Where sweeps begin, what is fed in, and the uses that they go to.

    Args:
        edges: The model's outputs.
        noise: Makes seeds of random numbers.
        ones: Makes seeds of equal numbers.
        uses: Where they go to.
    """

    edges: Sequence[GradientEdge]
    noise: Seeds
    ones: Seeds
    uses: Sequence[ReachedUse]


def sequences_of(use: ReachedUse) -> Sequence[tuple[int, ...]] | None:
    """For each output of a use the sequence of each row, where they are packed sequences."""
    return next((site.entry.sequences for site in use.sites if site.entry.sequences is not None), None)


def levels(samples: int, largest: float) -> Tensor:
    """Exponents of two, as different as the range of the precision allows, and no more than samples."""
    reach = 24 if largest > 1e30 else 4
    return torch.linspace(-reach, reach, min(samples, 2 * reach + 1), dtype=torch.float64).round()


def sizes_of(rows: Tensor) -> Tensor:
    """How large the entries of each row ``[n, *]`` are on the average ``[n]``, on the processor.

    Zero where that is below the smallest normal number: what is left of them says nothing.
    """
    rows = rows.unsqueeze(-1)
    rest, wide = tuple(range(1, rows.dim())), accumulation_dtype(rows.dtype)
    sums = torch.linalg.vector_norm(rows, 1, rest, dtype=wide)  # copies nothing
    average = sums / max(rows[:1].numel(), 1)
    known: Tensor = average.where(~(average < torch.finfo(rows.dtype).tiny), 0)
    return known.to("cpu", torch.float64)


def differ(up: Tensor, down: Tensor, powers: Tensor, tolerance: float, smallest: float) -> bool:
    """Whether some row has another size ``[n]`` in one of two sweeps than in the other.

    Args:
        up: Sizes of rows that were fed ``2^powers``, divided by that.
        down: Sizes of rows that were fed ``2^-powers``, divided by that.
        powers: One for each sample.
        tolerance: Relative size of what may be rounding.
        smallest: The smallest normal number; what may have been smaller in one of the sweeps says nothing.
    """
    larger = torch.maximum(up, down)
    known = larger * torch.exp2(-powers.abs()) >= 16 * smallest
    return bool((known & ((up - down).abs() > tolerance * larger)).any())


def layouts_of_rows(
    fitting: Fitting,
    sweeps: Sweeps,
    samples: int,
    largest: float,
    tolerance: float,
    documents: Tensor | None = None,
) -> list[Place]:
    """The layout of rows at each place; none where samples meet in a row.

    Args:
        fitting: Layouts of which each says where rows are looked for: it takes each for a sample.
        sweeps: What is swept.
        samples: Number of samples.
        largest: The largest number of the precision.
        tolerance: Relative size of what may be rounding.
        documents: The sample of each position, where samples are documents that masks keep apart: NaN goes
            through masks, so that rows in which zeros came back go by this, if all others do.
    """
    places = [
        (use, index, layout)
        for use, outputs in fitting.items()
        for index, own in enumerate(outputs)
        for layout in own
    ]
    if not places:
        return []
    numbers = _by_powers(fitting, sweeps, samples, levels(samples, largest), tolerance)
    came_back = list(numbers)
    _follow_sequences(places, numbers)
    unknown = {place: numbers[place] for place in came_back if bool((numbers[place] == UNKNOWN).any())}
    if documents is not None:
        for number in unknown.values():
            is_there = number != UNKNOWN
            if len(number) == len(documents) and bool((number == documents)[is_there].all()):
                number.copy_(documents)
    elif unknown:
        _look_with_nan(unknown, fitting, sweeps, samples)
        _follow_sequences(places, numbers)
    found = []
    for use, index, by_row in places:
        rows = numbers.get((use, index, by_row))
        if rows is None:  # nothing came back, or there is nothing
            rows = torch.zeros(by_row.samples, dtype=torch.int64)
        if not bool((rows == MIXED).any()):
            assert by_row.axis is not None
            layout = layout_of_rows(by_row.axis, rows.clamp(min=0), samples, by_row.joined)
            found.append((use, index, layout))
    return found


def _by_powers(
    fitting: Fitting, sweeps: Sweeps, samples: int, exponents: Tensor, tolerance: float
) -> dict[Place, Tensor]:
    """The sample of each row ``[k]`` by the powers of two that it comes back with, digit by digit."""
    every, base = torch.arange(samples), len(exponents)
    numbers: dict[Place, Tensor] = {}
    for digit in range(max(1, math.ceil(math.log(samples, base) - 1e-9))):
        power = exponents[every // base**digit % base]
        up, down = (
            sizes_of_rows(sweeps.uses, sweeps.edges, sweeps.noise(torch.exp2(each)), fitting)
            for each in (power, -power)
        )
        for place, rows in up.items():
            distance, value = ((rows / down[place]).log2()[:, None] / 2 - exponents).abs().min(1)
            value = torch.where(distance < tolerance, value * base**digit, MIXED)
            value[(rows == 0) | (down[place] == 0)] = UNKNOWN
            numbers[place] = _joined(numbers[place], value) if digit else value
    return {place: torch.where(rows < samples, rows, MIXED) for place, rows in numbers.items()}


def _joined(number: Tensor, digit: Tensor) -> Tensor:
    """The number with one more digit, or what speaks against any."""
    return torch.where((number >= 0) & (digit >= 0), number + digit, torch.minimum(number, digit))


def _follow_sequences(places: Sequence[Place], numbers: dict[Place, Tensor]) -> None:
    """Give all rows of a packed sequence to the sample that some of them are known to belong to."""
    groups: dict[ReachedUse, list[tuple[Place, Tensor]]] = {}
    for place in places:
        use, index, _ = place
        sequences = sequences_of(use)
        if sequences is not None:
            groups.setdefault(use, []).append((place, torch.tensor(sequences[index])))
    for outputs in groups.values():
        owners = torch.full((1 + max(int(sequence.max()) for _, sequence in outputs),), UNKNOWN)
        for place, sequence in outputs:
            rows = numbers.setdefault(place, torch.full_like(sequence, UNKNOWN))
            owners[sequence[rows >= 0]] = rows[rows >= 0]
        for place, sequence in outputs:
            rows, owner = numbers[place], owners[sequence]
            numbers[place] = torch.where((rows == UNKNOWN) | (rows == owner), owner, MIXED)


def _look_with_nan(unknown: Mapping[Place, Tensor], fitting: Fitting, sweeps: Sweeps, samples: int) -> None:
    """Find the samples of rows in which zeros came back, by NaN for half of the samples at a time."""
    every = torch.arange(samples)
    found = {place: torch.zeros_like(rows) for place, rows in unknown.items()}
    nobody = {place: torch.ones_like(rows, dtype=torch.bool) for place, rows in unknown.items()}
    for digit in range(max(1, (samples - 1).bit_length())):
        has_digit = every // 2**digit % 2 == 1
        sizes = []
        for fed in (has_digit, ~has_digit):
            try:
                with torch.autograd.set_detect_anomaly(False):
                    seeds = sweeps.ones(torch.where(fed, torch.nan, 0.0))
                    sizes.append(sizes_of_rows(sweeps.uses, sweeps.edges, seeds, fitting, UNMASKED))
            except Exception:  # a user's function that refuses NaN
                return
        for place, number in found.items():
            with_digit, without = (rows[place].isnan() for rows in sizes)
            value = torch.where(with_digit & without, MIXED, with_digit * 2**digit)
            found[place] = _joined(number, value)
            nobody[place] &= ~(with_digit | without)
    for place, rows in unknown.items():
        number = torch.where(nobody[place], UNKNOWN, found[place])
        rows.copy_(torch.where(rows == UNKNOWN, number, rows))
