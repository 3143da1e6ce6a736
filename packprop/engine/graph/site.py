"""The place where one trainable leaf enters one use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from packprop.engine.algebra.changes import with_squares
from packprop.engine.algebra.structures import Dense, Outer, Structure, rows
from packprop.engine.functions.entry import Entry, Samples
from packprop.engine.graph.pull import pull_columns
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class Site:
    """A place where a trainable leaf enters a use, directly or through tensors made of parameters alone."""

    entry: Entry
    leaf: Tensor

    @property
    def direct(self) -> bool:
        """Tell whether the entry is that of the leaf itself."""
        return self.entry.parameter is self.leaf

    @property
    def has_squares(self) -> bool:
        """Tell whether ``squares`` are known."""
        known = self.entry.squares is not None or self.entry.structure in ("Outer", "Lookup")
        return self.direct and self.entry.linear and known

    def squares(
        self, cotangents: Sequence[Tensor | None], where: Sequence[Layout], samples: Samples
    ) -> Structure | None:
        """Return ``structure_of`` with the factors of the leaf squared; ``None`` if these are not known."""
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
        """Return the structure of the leaf: that of its entry, pulled back if the site is not direct.

        ``held`` is the number of bytes of one sample that an algorithm may hold if another one holds less.
        """
        structure = self.entry.structure_of(cotangents, where, samples)
        if held is not None and isinstance(structure, Outer):
            structure = replace(structure, held=held)
        if self.entry.parameter is self.leaf:
            return structure
        if structure.rows is None:
            return Dense(None)
        # [v, n, *d] becomes [v, n, *p]: PyTorch itself differentiates functions of parameters alone, because no
        # sample enters them
        parameter, leaf, gradients = self.entry.parameter, self.leaf, rows(structure)
        flat = gradients.flatten(0, 1).to(parameter.dtype)
        (product,) = pull_columns([parameter.edge], [leaf], [flat], create_graph=torch.is_grad_enabled())
        if product is None:
            product = leaf.new_zeros(len(flat), *leaf.shape)
        at_leaf: Tensor = product.unflatten(0, gradients.shape[:2])
        return Dense(at_leaf.to(accumulation_dtype(at_leaf.dtype)))
