"""The meaning of the rank of a Kronecker factor.

# NOTE [Ranks that say something]
A factor is a sum of outer products, one for each sample, position and draw. Factors seldom have full rank: they
have fewer terms than rows, a softmax ignores a constant added to all outputs, layer normalisation subtracts the
mean of its inputs, and small eigenvalues drown in rounding errors. Whoever inverts a factor adds damping, and
then none of this matters. Two things do: a row of zeros, which means a unit that does nothing, and a rank below
half of what the samples could fill, which means a layer that works in far fewer directions than it has. The
page leaves out embeddings, because entries that are never looked up say nothing about a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from packprop.applications.reports.profile.layers import factor_key
from packprop.applications.reports.profile.values import ProfileValues

NARROW = 0.5
"""The page reports a rank below this share of the rank that the samples could fill."""


@dataclass(frozen=True)
class Narrow:
    """A factor that has far fewer directions than it could have.

    Args:
        layer: The name of the layer.
        side: ``"A"`` for the factor of the layer's inputs, ``"B"`` for that of its cotangents.
        rank: The number of eigenvalues above rounding error.
        size: The side of the matrix.
        idle: The number of its rows that are zero throughout.
    """

    layer: str
    side: str
    rank: int
    size: int
    idle: int


def narrow_factors(values: ProfileValues) -> list[Narrow]:
    """Return one such factor for each layer and side that has any; see NOTE [Ranks that say something]."""
    found: dict[tuple[str, str], Narrow] = {}
    for layer in values.layers:
        if layer.kind.startswith("Embedding"):
            continue
        for name, spectrum in layer.factors.items():
            side = name.rpartition(".")[2]
            if (layer.name, side) in found or spectrum.rank is None:
                continue
            factor = values.tensors.get(f"kfac/{factor_key(layer, name)}")
            idle = 0 if factor is None else int((factor.diagonal() == 0).sum())
            draws = values.settings["monte_carlo_samples"] or 1
            # the least number of terms: positions of a sample add more
            terms = values.samples * (draws if side == "B" else 1)
            if idle or spectrum.rank < NARROW * min(spectrum.size, terms):
                found[layer.name, side] = Narrow(layer.name, side, spectrum.rank, spectrum.size, idle)
    return [*found.values()]
