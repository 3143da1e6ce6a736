"""The search for the sample of each row, where rows are in no order.

# NOTE [Rows of samples]
A mixture of experts takes rows of many samples out of their order, and gives some of them to each expert; the
rows of packed sequences belong to samples by their lengths, and by the order that they were sorted in. No axis
holds the samples in order any more, and there may be any number of rows of a sample, or none. That does not mix
samples. The sweeps of NOTE [Separation] also tell whose row each is: fed ``2^k`` and then ``2^-k``, a row of
one sample comes back with a quotient of ``2^2k``, and a row in which two samples meet with another quotient.
If there are more samples than powers, several digits identify a sample, with two sweeps for each digit. If only
zeros come back, as behind a weight of zeros, packprop feeds NaN in as in NOTE [Hidden mixing]: for each binary
digit, to the samples that have it, and then to the others. Rows that no sample reaches may belong to any.

packprop tries layouts of rows at a use if no other layout fits, as behind a batch that was rolled, or if the
use lies behind a function that reorders rows and holds the samples folded with positions. It finds these
layouts anew in each pass: the next batch has other lengths, and goes to other experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packprop.engine.samples.feeding import Candidate, Feed, Fitting, known_sizes_of
from packprop.engine.tensors.layout import layout_of_rows

UNKNOWN, MIXED = -1, -2
"""Marks in place of a sample's number: nothing came back in a row, or it belongs to no single sample."""


@dataclass(frozen=True)
class RowSearch:
    """The search for the sample of each row; see NOTE [Rows of samples].

    Args:
        feed: The places where samples are fed in.
        noise: Random numbers to feed in.
        samples: Number of samples.
        exponents: Exponents of two that tell the samples apart.
        tolerance: Relative size of rounding.
        documents: The sample of each position, if samples are documents. NaN goes through the masks that keep
            them apart, so rows in which zeros came back get these samples if all other rows agree with them.
    """

    feed: Feed
    noise: Sequence[Tensor]
    samples: int
    exponents: Tensor
    tolerance: float
    documents: Tensor | None

    def layouts(self, fitting: Fitting) -> list[Candidate]:
        """Return the layout of rows at each place; leave out places where samples meet in a row.

        ``fitting`` holds layouts that take each row for a sample, and so tell where the rows are.
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
            if rows is None:  # no cotangent came back, or there are no rows
                rows = torch.zeros(by_row.samples, dtype=torch.int64, device="cpu")
            if not bool((rows == MIXED).any()):
                assert by_row.axis is not None
                layout = layout_of_rows(by_row.axis, rows.clamp(min=0), self.samples, by_row.joined)
                found.append((use, index, layout))
        return found

    def _by_powers(self, fitting: Fitting) -> dict[Candidate, Tensor]:
        """Return the sample of each row ``[k]``, digit by digit, from the powers of two that come back."""
        every, base = torch.arange(self.samples, device="cpu"), len(self.exponents)
        numbers: dict[Candidate, Tensor] = {}
        for digit in range(max(1, math.ceil(math.log(self.samples, base) - 1e-9))):
            power = self.exponents[every // base**digit % base]
            up, down = (
                self.feed.sizes(
                    self.feed.by_sample(self.noise, torch.exp2(each)), fitting, measure=known_sizes_of
                )
                for each in (power, -power)
            )
            for place, rows in up.items():
                distance, value = ((rows / down[place]).log2()[:, None] / 2 - self.exponents).abs().min(1)
                value = torch.where(distance < self.tolerance, value * base**digit, MIXED)
                value[(rows == 0) | (down[place] == 0)] = UNKNOWN
                numbers[place] = _joined(numbers[place], value) if digit else value
        return {place: torch.where(rows < self.samples, rows, MIXED) for place, rows in numbers.items()}

    def _look_with_nan(self, unknown: Mapping[Candidate, Tensor], fitting: Fitting) -> None:
        """Find the samples of rows in which zeros came back, by NaN for half of the samples at a time."""
        every = torch.arange(self.samples, device="cpu")
        found = {place: torch.zeros_like(rows) for place, rows in unknown.items()}
        nobody = {place: torch.ones_like(rows, dtype=torch.bool) for place, rows in unknown.items()}
        for digit in range(max(1, (self.samples - 1).bit_length())):
            has_digit = every // 2**digit % 2 == 1
            ones = self.feed.sizes_of_nan(has_digit, fitting)
            zeros = None if ones is None else self.feed.sizes_of_nan(~has_digit, fitting)
            if ones is None or zeros is None:
                return
            for place, number in found.items():
                with_digit, without = ones[place].isnan(), zeros[place].isnan()
                value = torch.where(with_digit & without, MIXED, with_digit * 2**digit)
                found[place] = _joined(number, value)
                nobody[place] &= ~(with_digit | without)
        for place, rows in unknown.items():
            number = torch.where(nobody[place], UNKNOWN, found[place])
            rows.copy_(torch.where(rows == UNKNOWN, number, rows))


def _joined(number: Tensor, digit: Tensor) -> Tensor:
    """Return the number with one more digit; if either is a mark, the mark, ``MIXED`` before ``UNKNOWN``."""
    return torch.where((number >= 0) & (digit >= 0), number + digit, torch.minimum(number, digit))
