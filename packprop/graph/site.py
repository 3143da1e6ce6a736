"""Where one trainable leaf enters one use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from packprop.algebra.structures import Dense, Outer, Structure, rows, with_squares
from packprop.functions.entry import Entry, Samples
from packprop.functions.fallback import pulled
from packprop.recording.regions import differs
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class Site:
    """Where one trainable leaf enters one use, directly or through tensors made of parameters alone."""

    entry: Entry
    leaf: Tensor

    def renewed(self, entries: Sequence[Entry], remade: Sequence[Entry]) -> Site:
        """The same site with its entry as it was made again.

        Args:
            entries: All entries of the use, as they were recorded.
            remade: The same entries, made again in the same order.

        Raises:
            PackpropError: If the parameter is another one.
        """
        place = next(number for number, entry in enumerate(entries) if entry is self.entry)
        parameter = remade[place].parameter if place < len(remade) else None
        same = parameter is self.leaf if self.direct else parameter is not None and not parameter.is_leaf
        if not same:
            raise differs("a function", "it consumed other parameters")
        return Site(remade[place], self.leaf)

    @property
    def direct(self) -> bool:
        """Whether the leaf itself is the argument of the function."""
        return self.entry.parameter is self.leaf

    @property
    def has_squares(self) -> bool:
        """Whether ``squares`` are known."""
        entry = self.entry
        known = entry.squares is not None or entry.structure in ("Outer", "Lookup")
        return self.direct and entry.linear and known

    def squares(
        self, cotangents: Sequence[Tensor | None], where: Sequence[Layout], samples: Samples
    ) -> Structure | None:
        """``structure_of`` with squares of what multiplies the leaf; ``None`` where they are not known."""
        if not self.has_squares:
            return None
        if self.entry.squares is not None:
            return self.entry.squares(cotangents, where, samples)
        return with_squares(self.entry.structure_of(cotangents, where, samples))

    def structure_of(
        self,
        cotangents: Sequence[Tensor | None],
        where: Sequence[Layout],
        samples: Samples,
        held: int | None = None,
    ) -> Structure:
        """The structure of the leaf: that of its entry, pulled back to the leaf where it is not direct.

        ``held``: how many bytes of one sample an algorithm may hold if another one holds less.
        """
        structure = self.entry.structure_of(cotangents, where, samples)
        if held is not None and isinstance(structure, Outer):
            structure = replace(structure, held=held)
        if self.direct:
            return structure
        if structure.rows is None:
            return Dense(None)
        return Dense(_pull_back(self.entry.parameter, self.leaf, rows(structure)))


def _pull_back(parameter: Tensor, leaf: Tensor, gradients: Tensor) -> Tensor:
    """From gradients of a computed parameter ``[v, n, *d]`` to gradients of a leaf ``[v, n, *p]``."""
    flat = gradients.flatten(0, 1).to(parameter.dtype)
    at_leaf: Tensor = pulled([parameter], leaf, [flat]).unflatten(0, gradients.shape[:2])
    return at_leaf.to(accumulation_dtype(at_leaf.dtype))
