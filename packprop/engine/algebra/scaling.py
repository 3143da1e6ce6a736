"""Structures with a factor on each sample."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from packprop.engine.algebra.structures import Dense, Lookup, Outer, Structure, Tied, rows


def with_factors(structure: Structure, factors: Tensor) -> Structure:
    """Return the same structure, with the gradient of each sample multiplied by a factor ``[n]``."""
    if isinstance(structure, Tied):
        outer, lookup = (with_factors(part, factors) for part in structure.parts)
        assert isinstance(outer, Outer)
        assert isinstance(lookup, Lookup)
        return Tied((outer, lookup))
    values = rows(structure) if isinstance(structure, Dense) else structure.cotangent
    assert values is not None
    scaled = values * factors.to(values.dtype).reshape(-1, *[1] * (values.dim() - 2))
    if isinstance(structure, Outer):
        return replace(structure, cotangent=scaled, direct=None, inner=None, out=None)
    return replace(structure, cotangent=scaled) if isinstance(structure, Lookup) else Dense(scaled)
