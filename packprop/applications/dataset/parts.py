"""The rows of extensions that one reading of the data computes: those before a second pass, or the last one.

# NOTE [Second reading]
Corrected eigenvalues of Kronecker factors need the eigenvectors of the factors of all samples before the first
sample can be rotated. Over a data set this takes two readings: the first one computes everything but the rows
of second passes, the second one computes only these. Both draw the same numbers: packprop restores the random
states from the beginning of the first reading, and everything that draws from a generator does so in each
reading, in the order of a single pass. So dropout has the same masks. Each reading uses its own sampled
columns: the first one those of eigenvectors, the second one the fresh ones of eigenvalues. So the values are
those of one batch of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packprop.engine.passes import tasks_by_seed
from packprop.types import Extension, Row, Seed


class Part(Extension):
    """Some rows of an extension, in a pass of their own.

    Args:
        whole: The extension.
        rows: The numbers of its rows.
    """

    def __init__(self, whole: Extension, rows: range) -> None:
        self.whole, self.places = whole, rows
        for name in ("savefield", "cheaper", "of_batch"):
            setattr(self, name, getattr(whole, name))

    @property
    def is_whole(self) -> bool:
        """Tell whether the part has all rows of the extension."""
        return len(self.places) == len(self.whole.rows)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of this part."""
        return tuple(self.whole.rows[place] for place in self.places)

    @property
    def name(self) -> str:
        """The name of the whole extension."""
        return self.whole.name


def readings_of(extensions: Sequence[Extension]) -> list[list[Part]]:
    """Return the parts for the first reading and, if one is needed, for a second, in order of extensions."""
    later = [needs_second_reading(extension) for extension in extensions]
    first = [
        Part(extension, range(len(extension.rows) - second))
        for extension, second in zip(extensions, later, strict=True)
    ]
    if not any(later):
        return [first]
    second = []
    for extension in extensions:
        count = len(extension.rows)
        if needs_second_reading(extension):
            second.append(Part(extension, range(count - 1, count)))
        elif any(row.seed.kind == "hessian_mc" for row in extension.rows):
            second.append(Part(extension, range(count)))  # it draws from a generator; its results are dropped
    return [first, second]


def needs_second_reading(extension: Extension) -> bool:
    """Tell whether the extension has to read the samples twice."""
    return extension.rows[-1].after is not None


def drawn_in_each_reading(extensions: Sequence[Extension]) -> list[Seed]:
    """Return the sampled seeds that both readings draw, in the order of a single pass."""
    if not any(needs_second_reading(each) for each in extensions):
        return []
    return [seed for seed in tasks_by_seed(extensions) if seed.kind == "ggn" and seed.mc_samples is not None]


def generators_of(extensions: Sequence[Extension]) -> list[torch.Generator]:
    """Return the generators that the extensions draw from, each once."""
    found = [row.seed.generator for extension in extensions for row in extension.rows]
    return list({id(generator): generator for generator in found if generator is not None}.values())
