"""Clipped sums of gradients, from data that a sweep keeps until the norms of all samples are known."""

from __future__ import annotations

import torch
from torch import Tensor

from packprop.engine.algebra.choices import norms_by_products
from packprop.engine.algebra.monoid import CAT, ONE
from packprop.engine.algebra.statistics import per_sample_grad, sq_norm
from packprop.engine.graph.graph import ReachedUse
from packprop.engine.graph.site import Site
from packprop.engine.passes.accumulator import Accumulator
from packprop.engine.passes.clipping import Clip, ClippedNorms, clip_factors
from packprop.engine.passes.contributions import Contribution, extents_of, weighted
from packprop.engine.passes.request import TOTAL, Request, task_of
from packprop.types import GRADIENT, Extension, Row


class _Norms(Extension):
    """Squared norms of the gradients of samples."""

    savefield = "clipping_norms"
    rows = (Row(GRADIENT, sq_norm, over_n=CAT[0], degree=2, condenses=True),)


class _Kept(Extension):
    """Gradients of samples, for leaves where they take no more memory than inputs and cotangents."""

    savefield = "clipping_rows"
    rows = (Row(GRADIENT, per_sample_grad, over_n=CAT[1], over_v=CAT[0]),)


NORMS, KEPT = _Norms(), _Kept()


class ClippedSums:
    """Keeps norms and contributions of one sweep, and makes the clipped sums; see NOTE [Clipping].

    Args:
        request: The request of the pass.
        clip: The bounds.
        results: Merges the statistics.
    """

    def __init__(self, request: Request, clip: Clip, results: Accumulator) -> None:
        self._graph, self._clip, self._results = request.graph, clip, results
        self._contributions: dict[int, list[Contribution]] = {}
        self._by_rows = _leaves_kept_by_rows(request)
        self._sparse = _leaves_with_sparse_gradients(request)
        # with probes, norms and sums are those of training rows, at an unchanged scale
        self._norms, self._kept, self._total = (task_of(each, clip.training) for each in (NORMS, KEPT, TOTAL))
        self.tasks = {
            id(leaf): [self._norms, self._kept] if id(leaf) in self._by_rows else [self._norms]
            for leaf in self._graph.leaves()
        }
        """The tasks at each leaf, by its identity."""

    def keeps_contributions(self, leaf: Tensor) -> bool:
        """Tell whether packprop keeps contributions to a leaf's gradient, rather than per-sample gradients."""
        return id(leaf) not in self._by_rows

    def keep(self, leaf: Tensor, contributions: list[Contribution]) -> None:
        """Keep the contributions to a leaf's gradient, unless packprop keeps its per-sample gradients."""
        if self.keeps_contributions(leaf):
            self._contributions[id(leaf)] = contributions

    def take(self) -> tuple[ClippedNorms, list[tuple[Tensor, Tensor]]]:
        """Return norms of samples, and each leaf that the sweep reached with its clipped gradient ``[*p]``."""
        clip, training = self._clip, self._clip.training
        count = self._graph.samples if training is None else len(training.training)
        squares = {id(leaf): self._squares(leaf) for leaf in self._graph.leaves()}
        known = [each for each in squares.values() if each is not None]
        like = known[0] if known else self._graph.leaves()[0].new_zeros(())
        totals = []
        for group in clip.groups:
            own = [squares[id(leaf)] for leaf in group.leaves]
            reached = [each.to(like.device) for each in own if each is not None]
            totals.append(sum(reached, like.new_zeros(count)))
        found = clip_factors(clip, totals)
        gradients = [
            (leaf, self._as_torch_gives_it(leaf, self._clipped_sum(leaf, clip.scaled(factors).to(leaf.device))))
            for group, factors in zip(clip.groups, found.factors, strict=True)
            for leaf in group.leaves
            if squares[id(leaf)] is not None
        ]
        return found, gradients

    def _as_torch_gives_it(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Make the gradient sparse, with the rows that are not zero, where torch's own gradient is sparse."""
        return gradient.to_sparse(1) if id(leaf) in self._sparse else gradient

    def _squares(self, leaf: Tensor) -> Tensor | None:
        """Return squared norms of a leaf's gradients ``[n]``; ``None`` if the sweep did not reach it."""
        values = self._results.take(leaf, self._norms.extension)
        if values is None:
            return None
        self._results.finite_check.note([leaf], values)
        squares: Tensor = values[0]
        return squares

    def _of_batch(self, factors: Tensor) -> Tensor:
        """Return factors for all samples of the batch ``[n]``, with zeros for probes."""
        if self._clip.training is None:
            return factors
        chosen = torch.tensor(self._clip.training.training, device=factors.device)
        return factors.new_zeros(self._graph.samples).index_copy(0, chosen, factors)

    def _clipped_sum(self, leaf: Tensor, factors: Tensor) -> Tensor:
        """Return the sum of a leaf's gradients, each times the factor of its sample, and free the kept data."""
        if id(leaf) in self._by_rows:
            values = self._results.take(leaf, self._kept.extension)
            assert values is not None
            rows = values.pop()[0]
            gradient: Tensor = (factors.to(rows.dtype) @ rows.reshape(len(rows), leaf.numel())).view(leaf.shape)
            return gradient.to(leaf.dtype)
        contributions = self._contributions.pop(id(leaf))
        self._results.add_contributions(
            leaf, contributions, [self._total], ONE, weighted(self._of_batch(factors))
        )
        values = self._results.take(leaf, self._total.extension)
        assert values is not None
        total: Tensor = values[0]
        return total.to(leaf.dtype)


def _leaves_with_sparse_gradients(request: Request) -> set[int]:
    """Return the leaves whose every use has a sparse gradient; one dense use makes torch's sum dense."""
    sites = [site for use in request.graph.uses for site in use.sites]
    dense = {id(site.leaf) for site in sites if not (site.entry.sparse and site.direct)}
    return {id(site.leaf) for site in sites} - dense


def _leaves_kept_by_rows(request: Request) -> set[int]:
    """Return the leaves whose per-sample gradients take no more memory than their inputs and cotangents."""
    graph, made_of = request.graph, dict[int, int]()
    for use in graph.uses:
        outputs = sum(shape.numel() for shape in use.shapes)
        for site in use.sites:
            inputs = _input_entries(use, site, request)
            made_of[id(site.leaf)] = made_of.get(id(site.leaf), 0) + outputs + inputs
    return {id(leaf) for leaf in graph.leaves() if leaf.numel() * graph.samples <= made_of[id(leaf)]}


def _input_entries(use: ReachedUse, site: Site, request: Request) -> int:
    """Count the input entries of an affine use if its norms form per-sample gradients; else return 0."""
    samples, held = request.graph.samples, request.chunk_sizes.held
    extents = extents_of(use, site, samples, held)
    if extents is None or norms_by_products(extents):
        return 0
    return samples * extents.positions * extents.groups * (extents.channels or extents.fan_in)
