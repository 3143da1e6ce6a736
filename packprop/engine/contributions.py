"""Parts of a leaf's gradient: each use with what arrived at it, and what they are joined to for statistics."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from packprop.algebra.choices import Extents
from packprop.algebra.structures import Diagonal, Product, Quadratic, Structure, join
from packprop.functions.building import select_samples
from packprop.functions.entry import Samples
from packprop.graph.graph import ReachedUse
from packprop.graph.site import Site
from packprop.tensors.device import device_kind
from packprop.tensors.precision import accumulation_dtype

Contribution = tuple[ReachedUse, Site, list[Tensor | None]]
"""A use of a leaf, and what arrived at its outputs."""


Build = Callable[[list[Contribution], Samples, int | None], Quadratic]
"""From uses of a leaf, a choice of samples, and what may be held of one, to what statistics are taken of."""


def unreached(found: ReachedUse, site: Site, like: Tensor, columns: int = 1) -> Contribution:
    """A use that no cotangent has arrived at: zeros, of the precision and on the device of ``like``."""
    return found, site, [like.new_zeros(columns, *shape) for shape in found.recorded.shapes]


def extents_of(found: ReachedUse, site: Site, samples: int, held: int | None) -> Extents | None:
    """What the algorithms of an affine use will be chosen by; ``None`` for any other use.

    ``held``: bytes of one sample that an algorithm may hold if another holds less.
    """
    fans = site.entry.fans
    if fans is None or not site.direct:
        return None
    positions = found.recorded.shapes[0].numel() // (samples * fans.groups * fans.fan_out)
    fans = fans._replace(unfolds=fans.unfolds and found.layouts[0].parts == 1)  # several images of a sample
    return Extents(positions, *fans, accumulation_dtype(site.leaf.dtype), device_kind(site.leaf), held)


def joint_structure(parts: list[Contribution], samples: Samples, held: int | None) -> Structure:
    """The structure of all uses of a leaf together."""
    return join(
        [site.structure_of(cotangents, found.layouts, samples, held) for found, site, cotangents in parts]
    )


def weighted_squares(weights: Tensor) -> Build:
    """Squares weighted for each column and sample ``[v, n]``."""
    return lambda parts, samples, held: Product(
        joint_structure(parts, samples, held), weights=select_samples(weights, samples, 1)
    )


def products_with(others: list[Contribution]) -> Build:
    """Products of two sets of columns."""
    return lambda parts, samples, held: Product(
        joint_structure(parts, samples, held), joint_structure(others, samples, held)
    )


def diagonal(parts: list[Contribution], samples: Samples, held: int | None) -> Diagonal:
    """Squares of what multiplies the leaf, weighted by cotangents."""
    ((found, site, cotangents),) = parts
    squares = site.squares(cotangents, found.layouts, samples)
    assert squares is not None
    return Diagonal(squares)
