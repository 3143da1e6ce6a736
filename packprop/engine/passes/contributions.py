"""Contributions to a leaf's gradient, one for each of its uses, and the structures built from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from packprop.engine.algebra.changes import with_factors
from packprop.engine.algebra.choices import Extents
from packprop.engine.algebra.joining import join
from packprop.engine.algebra.structures import (
    ByToken,
    Diagonal,
    Outer,
    Product,
    Statistical,
    Structure,
)
from packprop.engine.functions.building import select_samples
from packprop.engine.functions.entry import Samples
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.site import Site
from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype

Contribution = tuple[ReachedUse, Site, list[Tensor | None]]
"""A use, the site where the leaf enters it, and the cotangents at its outputs."""


Build = Callable[[list[Contribution], Samples, int | None], Statistical]
"""Maps the contributions to a leaf, a choice of samples, and the bytes of one sample that an algorithm may
hold, to the structure that statistics are taken of."""


MANY = 8
"""The number of uses from which on packprop joins them once, and not again for each chunk of samples."""


@dataclass(frozen=True)
class JoinedSite(Site):
    """One site that replaces the sites of many uses of a leaf, such as the steps of a recurrence.

    Args:
        whole: Their joint structure, for all samples.
        uses: The uses.
    """

    whole: Outer
    uses: Sequence[ReachedUse]

    def structure_of(
        self,
        cotangents: Sequence[Tensor | None],
        where: Sequence[Layout],
        samples: Samples,
        held: int | None = None,
    ) -> Structure:
        """Return the part of the joint structure that belongs to some samples."""
        whole = self.whole if held is None else replace(self.whole, held=held)
        if isinstance(samples, slice) and samples == slice(None):
            return whole
        assert whole.cotangent is not None
        cotangent = select_samples(whole.cotangent, samples, 1)
        return replace(whole, given=select_samples(whole.x, samples), cotangent=cotangent)


def joined_once(contributions: list[Contribution]) -> list[Contribution]:
    """Join many contributions to a leaf into one, if all uses are affine and direct."""
    if len(contributions) < MANY:
        return contributions
    for _, site, cotangents in contributions:
        fans = site.entry.fans
        if fans is None or fans.channels or not site.direct or all(each is None for each in cotangents):
            return contributions
    whole = joint_structure(contributions, slice(None), None)
    if not isinstance(whole, Outer) or whole.cotangent is None:
        return contributions
    (use, site, cotangents), *_ = contributions
    uses = [each for each, _, _ in contributions]
    return [(use, JoinedSite(site.entry, site.leaf, whole, uses), cotangents)]


def uses_of(contributions: Sequence[Contribution]) -> Sequence[ReachedUse]:
    """Return the uses that contributions come from."""
    uses: list[ReachedUse] = []
    for use, site, _ in contributions:
        uses += site.uses if isinstance(site, JoinedSite) else [use]
    return uses


def looks_up(contributions: Sequence[Contribution]) -> bool:
    """Tell whether all uses look up rows of a table."""
    return all(site.direct and site.entry.structure == "Lookup" for _, site, _ in contributions)


def unreached(use: ReachedUse, site: Site, like: Tensor, columns: int = 1) -> Contribution:
    """Return zeros for a use that no cotangent has reached, in the precision and on the device of ``like``."""
    dtype = like.dtype.to_real()  # real zeros also fit complex outputs
    return use, site, [like.new_zeros(columns, *shape, dtype=dtype) for shape in use.shapes]


def extents_of(use: ReachedUse, site: Site, samples: int, held: int | None) -> Extents | None:
    """Return the extents that decide on the algorithms for an affine use; ``None`` for any other use.

    ``held``: bytes of one sample that an algorithm may hold if another holds less.
    """
    if isinstance(site, JoinedSite):
        return site.whole.extents._replace(held=held)
    fans = site.entry.fans
    if fans is None or not site.direct:
        return None
    layout, rows = use.layouts[0], fans.rows
    if rows is None:
        rows = use.shapes[0].numel() // (fans.groups * fans.fan_out)
    positions = rows // samples if layout.rows is None else layout.parts
    channels = 0 if layout.folded else fans.channels  # folded: several images of a sample
    return Extents(
        positions, *fans[:3], channels, accumulation_dtype(site.leaf.dtype), device_kind(site.leaf), held
    )


def joint_structure(contributions: list[Contribution], samples: Samples, held: int | None) -> Structure:
    """Return the structure of all uses of a leaf together."""
    return join(
        [site.structure_of(cotangents, use.layouts, samples, held) for use, site, cotangents in contributions]
    )


def weighted_squares(weights: Tensor) -> Build:
    """Build squares weighted for each column and sample ``[v, n]``."""
    return lambda contributions, samples, held: Product(
        joint_structure(contributions, samples, held), weights=select_samples(weights, samples, 1)
    )


def weighted(factors: Tensor) -> Build:
    """Build gradients of samples, each multiplied by a factor ``[n]``."""
    return lambda contributions, samples, held: with_factors(
        joint_structure(contributions, samples, held), select_samples(factors, samples, 0)
    )


def by_token(counted: Tensor) -> Build:
    """Build columns that belong to tokens; ``counted`` says which tokens count, ``[t, n]``."""
    return lambda contributions, samples, held: ByToken(
        joint_structure(contributions, samples, held), len(counted), select_samples(counted, samples, 1)
    )


def products_with(others: list[Contribution]) -> Build:
    """Build products of two sets of columns."""
    return lambda contributions, samples, held: Product(
        joint_structure(contributions, samples, held), joint_structure(others, samples, held)
    )


def diagonal(contributions: list[Contribution], samples: Samples, held: int | None) -> Diagonal:
    """Return squares of the factors that multiply the leaf, weighted by cotangents."""
    ((use, site, cotangents),) = contributions
    squares = site.squares(cotangents, use.layouts, samples)
    assert squares is not None
    return Diagonal(squares)
