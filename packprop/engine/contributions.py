"""Parts of a leaf's gradient: each use with what arrived at it, and what they are joined to for statistics."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from packprop.algebra.kernels import Extents
from packprop.algebra.structures import Diagonal, Product, Quadratic, Structure, join
from packprop.functions.building import choose
from packprop.functions.entry import Samples
from packprop.graph.graph import Found
from packprop.graph.site import Site
from packprop.tensors.device import device_kind
from packprop.tensors.precision import accumulation_dtype

Part = tuple[Found, Site, list[Tensor | None]]
"""A use of a leaf, and what arrived at its outputs."""


Build = Callable[[list[Part], Samples, int | None], Quadratic]
"""From uses of a leaf, a choice of samples, and what may be held of one, to what statistics are taken of."""


def unreached(found: Found, site: Site, like: Tensor, columns: int = 1) -> Part:
    """A use that no signal has arrived at: zeros, of the precision and on the device of ``like``."""
    return found, site, [like.new_zeros(columns, *shape) for shape in found.use.shapes]


def extents_of(found: Found, site: Site, samples: int, held: int | None) -> Extents | None:
    """What the algorithms of an affine use will be chosen by; ``None`` for any other use.

    ``held``: bytes of one sample that an algorithm may hold if another holds less.
    """
    fans = site.entry.fans
    if fans is None or not site.direct:
        return None
    positions = found.use.shapes[0].numel() // (samples * fans.groups * fans.fan_out)
    fans = fans._replace(unfolds=fans.unfolds and found.layouts[0].parts == 1)  # several images of a sample
    return Extents(positions, *fans, accumulation_dtype(site.leaf.dtype), device_kind(site.leaf), held)


def met(parts: list[Part], samples: Samples, held: int | None) -> Structure:
    """The structure of all uses of a leaf together."""
    return join([site.meet(signals, found.layouts, samples, held) for found, site, signals in parts])


def weighted(weights: Tensor) -> Build:
    """Squares weighted for each column and sample ``[v, n]``."""
    return lambda parts, samples, held: Product(met(parts, samples, held), weights=choose(weights, samples, 1))


def products_with(others: list[Part]) -> Build:
    """Products of two sets of columns."""
    return lambda parts, samples, held: Product(met(parts, samples, held), met(others, samples, held))


def diagonal(parts: list[Part], samples: Samples, held: int | None) -> Diagonal:
    """Squares of what multiplies the leaf, weighted by signals."""
    ((found, site, signals),) = parts
    squares = site.squares(signals, found.layouts, samples)
    assert squares is not None
    return Diagonal(squares)
