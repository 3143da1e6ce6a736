"""The sample that each row belongs to, where data decided on the order of rows.

# NOTE [Rows of samples]
A mixture of experts takes rows of many samples out of their order, and gives some of them to each expert; the
rows of packed sequences belong to samples by their lengths, and by the order that they were sorted in. No axis
holds the samples in order any more, and there may be any number of rows of a sample, or none. They are not
mixed for that. The sweeps of NOTE [Separation] tell whose row each is, too: fed ``2^k`` and then ``2^-k``, a
row of one sample comes back with a quotient of ``2^2k``, and a row in which two samples meet with another one.
There are fewer powers than there may be samples: a sample is known by several digits then, with two sweeps for
each. Where only zeros come back, as behind a weight of zeros, NaN is fed in as in NOTE [Hidden mixing]: for
each binary digit to the samples that have it, and to the others. Rows that no sample reaches may be anybody's.

Layouts of rows are for functions behind one that reorders rows, where no other layout fits. All other
functions must have the samples in order: else a batch that was reversed would pass for one in some order. They
are found anew in each pass: the next batch has other lengths, and goes to other experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packprop.engine.samples.feeding import UNMASKED, Feed, Fitting, Place
from packprop.engine.tensors.layout import layout_of_rows

UNKNOWN, MIXED = -1, -2
"""In place of a sample's number: nothing came back in a row, or it is no single sample's."""


def levels(samples: int, largest: float) -> Tensor:
    """Exponents of two, as different as the range of the precision allows, and no more than samples."""
    reach = 24 if largest > 1e30 else 4
    return torch.linspace(-reach, reach, min(samples, 2 * reach + 1), dtype=torch.float64, device="cpu").round()


def differ(up: Tensor, down: Tensor, powers: Tensor, tolerance: float, smallest: float) -> bool:
    """Tell whether some row has another size ``[n]`` in one of two sweeps than in the other.

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


@dataclass(frozen=True)
class RowSearch:
    """The search for the sample of each row; see NOTE [Rows of samples].

    Args:
        feed: Where samples are fed in.
        noise: Random numbers for that.
        samples: Number of samples.
        exponents: Powers of two that tell them apart.
        tolerance: Relative size of what may be rounding.
        documents: The sample of each position, where samples are documents that masks keep apart: NaN goes
            through masks, so that rows in which zeros came back go by this, if all others do.
    """

    feed: Feed
    noise: Sequence[Tensor]
    samples: int
    exponents: Tensor
    tolerance: float
    documents: Tensor | None

    def layouts(self, fitting: Fitting) -> list[Place]:
        """The layout of rows at each place; none where samples meet in a row.

        ``fitting``: Layouts of which each says where rows are looked for: it takes each for a sample.
        """
        places = [
            (use, index, layout)
            for use, outputs in fitting.items()
            for index, own in enumerate(outputs)
            for layout in own
        ]
        if not places:
            return []
        numbers = self._by_powers(fitting)
        unknown = {place: rows for place, rows in numbers.items() if bool((rows == UNKNOWN).any())}
        if self.documents is not None:
            for number in unknown.values():
                is_there = number != UNKNOWN
                if len(number) == len(self.documents) and bool((number == self.documents)[is_there].all()):
                    number.copy_(self.documents)
        elif unknown:
            self._look_with_nan(unknown, fitting)
        found = []
        for use, index, by_row in places:
            rows = numbers.get((use, index, by_row))
            if rows is None:  # nothing came back, or there is nothing
                rows = torch.zeros(by_row.samples, dtype=torch.int64, device="cpu")
            if not bool((rows == MIXED).any()):
                assert by_row.axis is not None
                layout = layout_of_rows(by_row.axis, rows.clamp(min=0), self.samples, by_row.joined)
                found.append((use, index, layout))
        return found

    def _by_powers(self, fitting: Fitting) -> dict[Place, Tensor]:
        """The sample of each row ``[k]`` by the powers of two that it comes back with, digit by digit."""
        every, base = torch.arange(self.samples, device="cpu"), len(self.exponents)
        numbers: dict[Place, Tensor] = {}
        for digit in range(max(1, math.ceil(math.log(self.samples, base) - 1e-9))):
            power = self.exponents[every // base**digit % base]
            up, down = (
                self.feed.sizes(self.feed.by_sample(self.noise, torch.exp2(each)), fitting)
                for each in (power, -power)
            )
            for place, rows in up.items():
                distance, value = ((rows / down[place]).log2()[:, None] / 2 - self.exponents).abs().min(1)
                value = torch.where(distance < self.tolerance, value * base**digit, MIXED)
                value[(rows == 0) | (down[place] == 0)] = UNKNOWN
                numbers[place] = _joined(numbers[place], value) if digit else value
        return {place: torch.where(rows < self.samples, rows, MIXED) for place, rows in numbers.items()}

    def _look_with_nan(self, unknown: Mapping[Place, Tensor], fitting: Fitting) -> None:
        """Find the samples of rows in which zeros came back, by NaN for half of the samples at a time."""
        every = torch.arange(self.samples, device="cpu")
        found = {place: torch.zeros_like(rows) for place, rows in unknown.items()}
        nobody = {place: torch.ones_like(rows, dtype=torch.bool) for place, rows in unknown.items()}
        for digit in range(max(1, (self.samples - 1).bit_length())):
            has_digit = every // 2**digit % 2 == 1
            sizes = []
            for fed in (has_digit, ~has_digit):
                try:
                    with torch.autograd.set_detect_anomaly(False):
                        seeds = self.feed.ones(torch.where(fed, torch.nan, 0.0))
                        sizes.append(self.feed.sizes(seeds, fitting, UNMASKED))
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


def _joined(number: Tensor, digit: Tensor) -> Tensor:
    """The number with one more digit, or what speaks against any."""
    return torch.where((number >= 0) & (digit >= 0), number + digit, torch.minimum(number, digit))
