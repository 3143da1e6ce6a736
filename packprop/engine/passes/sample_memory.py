"""Temporary memory that the statistics of one leaf take for each sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from packprop.engine.algebra.choices import Extents, convolved_by_groups
from packprop.engine.algebra.factors import LARGEST_FACTOR, MATRICES, forms_no_rows
from packprop.engine.algebra.one_by_one import goes_one_by_one
from packprop.engine.algebra.statistics import (
    OF_ROWS,
    WITHOUT_TABLES,
    Statistic,
    per_sample_grad,
    summed_grad,
)
from packprop.engine.graph.site import Site
from packprop.engine.passes.contributions import Contribution, JoinedSite, extents_of, looks_up
from packprop.engine.tensors.layout import Layout


def column_count(cotangents: Sequence[Tensor | None]) -> int:
    """Return the number of columns in the cotangents at a use; 0 where statistics need only the inputs."""
    for cotangent in cotangents:
        if cotangent is not None:
            return cotangent.shape[0]
    return 0


def factor_sizes(site: Site) -> tuple[int, int]:
    """Return the rows of the factors of cotangents and of inputs; 0 if no input multiplies the leaf."""
    fans, leaf = site.entry.fans, site.leaf
    if site.direct and fans is not None:
        return fans.groups * fans.fan_out, fans.fan_in
    if site.direct and site.entry.structure == "Lookup":
        return leaf.shape[-1], leaf.shape[0]
    return leaf.numel(), 0


class SampleMemory:
    """The temporary memory that the statistics of one leaf take for a sample.

    Args:
        leaf: The parameter.
        contributions: All contributions to it.
        statistics: Its statistics.
        joint: Whether these are taken of the joint structure of its uses, and of nothing else.
        create_graph: Whether results are differentiable.
    """

    def __init__(
        self,
        leaf: Tensor,
        contributions: Sequence[Contribution],
        statistics: Sequence[Statistic],
        joint: bool,
        create_graph: bool,
    ) -> None:
        self.leaf, self.contributions, self.statistics = leaf, contributions, statistics
        groups = max([(site.entry.fans.groups if site.entry.fans else 1) for _, site, _ in contributions])
        self._forms_no_rows = all(forms_no_rows(statistic, groups, leaf) for statistic in statistics)
        self._is_of_rows = joint and OF_ROWS.issuperset(statistics)
        self._may_go_one_by_one = len(contributions) == 1 and not create_graph
        self._forms_no_tables = joint and looks_up(contributions) and WITHOUT_TABLES.issuperset(statistics)
        is_for_rows = per_sample_grad in statistics and {per_sample_grad, summed_grad}.issuperset(statistics)
        self._rows_are_results = joint and self._may_go_one_by_one and is_for_rows

    def entries(self, samples: int, held: int | None, whole: bool = False) -> int:
        """Count the entries of temporary tensors that all contributions take for each of ``samples``.

        ``whole``: for all samples at once. Per-sample gradients from one call are then the result: not counted.
        """
        return sum([self._entries_of(each, samples, held, whole) for each in self.contributions])

    def _entries_of(self, contribution: Contribution, samples: int, held: int | None, whole: bool) -> int:
        use, site, cotangents = contribution
        columns = column_count(cotangents)
        outputs = sum(map(Layout.entries_of_sample, use.layouts, use.shapes))
        extents = extents_of(use, site, samples, held)
        if isinstance(site, JoinedSite) and extents is not None:
            outputs = extents.positions * extents.groups * extents.fan_out
        if extents is not None and outputs % (extents.groups * extents.fan_out):
            extents = None
        scratch = site.entry.scratch.per_column
        if self._is_of_rows and columns == 1 and extents is not None:
            if self._may_go_one_by_one and goes_one_by_one(self.statistics, extents):
                return self._one_by_one(site, extents)
            by_groups = convolved_by_groups(extents)
            if by_groups:
                scratch = site.entry.scratch.without_unfolding
            if whole and self._rows_are_results and (by_groups or self._in_place(site, extents)):
                return max(scratch - self.leaf.numel(), outputs)
        if self._forms_no_tables:
            positions = outputs // self.leaf.shape[1]
            if positions < len(self.leaf):
                return 2 * outputs * columns + 8 * positions  # and four tensors of indices
        largest = max(scratch, self.leaf.numel(), outputs)
        if not columns:
            return site.entry.scratch.inputs_only or largest
        if self._forms_no_rows and extents is not None and extents.positions == 1:
            return extents.groups * (extents.fan_in + 2 * extents.fan_out * columns)
        return largest * columns

    def matrix_entries(self) -> int:
        """Count the entries of the matrix that chunks of samples add up to; 0 for other statistics."""
        if not all(getattr(each, "func", each) in MATRICES for each in self.statistics):
            return 0
        ((_, site, cotangents), *more) = self.contributions
        if more or not site.direct:
            return 0
        of_cotangents, of_inputs = factor_sizes(site)
        side = of_cotangents if column_count(cotangents) else of_inputs
        return side**2 if side <= LARGEST_FACTOR else 0

    def _one_by_one(self, site: Site, extents: Extents) -> int:
        fans = site.entry.fans
        assert fans is not None  # as extents are known
        unfolded = extents._replace(channels=fans.channels).unfolded  # of all images of a sample
        is_copied = per_sample_grad in self.statistics and not self._in_place(site, extents)
        return unfolded + (self.leaf.numel() if is_copied else 0)

    def _in_place(self, site: Site, extents: Extents) -> bool:
        """Tell whether per-sample gradients are written to the result, not all formed and then copied."""
        fans = site.entry.fans
        return fans is not None and fans.in_order and self.leaf.dtype == extents.dtype
