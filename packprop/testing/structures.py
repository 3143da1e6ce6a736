"""Comparison of the structures that rules build with loops over samples, and with the fallback."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.algebra import Structure, batch_sq, gram, input_gram, join, rows, sq_norm, sum_sq
from packprop.engine.curvature import with_zeros
from packprop.engine.functions import without_rules
from packprop.engine.graph import Graph, ReachedUse, Site
from packprop.engine.tensors import Layout
from packprop.testing.loops import Loops
from packprop.testing.problem import Problem
from packprop.testing.report import Ledger

Arrived = list[list[Tensor | None]]
"""The cotangents at the outputs of each use; ``None`` for an output that no cotangent reaches."""


@dataclass(frozen=True)
class Swept:
    """Uses in a model, and cotangents at their outputs.

    Args:
        uses: The uses.
        arrived: The cotangents that arrive at the outputs of each use.
        layouts: The layouts of the outputs of each use.
        columns: The number of columns, v.
    """

    uses: Sequence[ReachedUse]
    arrived: Arrived
    layouts: Sequence[list[Layout]]
    columns: int

    def sites(self, leaf: Tensor, *, by_rule: bool) -> list[tuple[Site, int]]:
        """Return the sites of a leaf at uses that a cotangent reaches, each with the number of its use."""
        found: list[tuple[Site, int]] = []
        for number, use in enumerate(self.uses):
            if all(cotangent is None for cotangent in self.arrived[number]):
                continue
            entries = use.entries
            if not by_rule:
                with without_rules():
                    entries = use.with_inputs()
            chosen = {id(entry): own for entry, own in zip(use.entries, entries, strict=True)}
            found += [(Site(chosen[id(site.entry)], leaf), number) for site in use.sites if site.leaf is leaf]
        return found

    def structure(
        self, sites: Sequence[tuple[Site, int]], chosen: slice | Tensor, *, inputs_only: bool = False
    ) -> Structure:
        """Join the structures of a leaf's sites, for some samples."""
        made = []
        for site, number in sites:
            cotangents = self.arrived[number]
            given = [None] * len(cotangents) if inputs_only else cotangents
            made.append(site.structure_of(given, self.layouts[number], chosen))
        return join(made)


def check_structures(ledger: Ledger, problem: Problem, graph: Graph, outputs: Sequence[Tensor]) -> None:
    """Compare every entry, for random cotangents, with loops over samples and with the fallback.

    Args:
        ledger: Keeps the comparisons.
        problem: A model whose outputs have the samples in front.
        graph: The graph of its loss, with its samples located.
        outputs: The model's outputs in this graph.
    """
    loops = Loops(problem, ledger)
    for columns, reached in itertools.product((1, 2), _choices(len(outputs))):
        fed = [
            torch.randn(columns, *output.shape).to(output) if is_fed else None
            for output, is_fed in zip(outputs, reached, strict=True)
        ]
        expected = loops.pulled(loops.by_sample(with_zeros(fed, outputs, columns), skip=1))
        arrived = _at_uses(graph, outputs, fed, columns)
        for layouts, fold in _possible_layouts(graph):
            swept = Swept(graph.uses, arrived, layouts, columns)
            count = graph.samples if fold is None else graph.samples // 2
            chosen: list[slice | Tensor] = [slice(None)]
            if count > 1:
                chosen += [slice(1, 2), torch.tensor([count - 1, 0])]
            for (name, leaf), own in itertools.product(problem.parameters.items(), chosen):
                folded = expected[name] if fold is None else fold(expected[name])
                _check_structure(ledger, swept, name, leaf, own, folded[:, own])


def _choices(outputs: int) -> list[list[bool]]:
    """Return the choices of outputs to feed: all of them, and, if there are several, each alone."""
    alone = [[place == only for place in range(outputs)] for only in range(outputs)]
    return [[True] * outputs, *(alone if outputs > 1 else [])]


def _check_structure(
    ledger: Ledger, swept: Swept, name: str, leaf: Tensor, chosen: slice | Tensor, expected: Tensor
) -> None:
    """Compare one parameter for some samples; ``expected`` are their gradients ``[v, n, *p]``."""
    sites = swept.sites(leaf, by_rule=True)
    if not sites:
        return
    spelled = chosen.tolist() if isinstance(chosen, Tensor) else [1] if chosen.start else "all"
    how = f"v={swept.columns}, {swept.layouts[sites[0][1]][0]}, chosen {spelled}"
    by_fallback = rows(swept.structure(swept.sites(leaf, by_rule=False), chosen))
    ledger.same("the fallback and the loop", {name: by_fallback}, {name: expected}, how)
    if not any(site.entry.by_rule for site, _ in sites):
        return
    structure = swept.structure(sites, chosen)
    if structure.rows is None:
        law = "one sample at a time"
        raise ledger.failed(law, f"parameter {name!r}, {how}", "the structure has no rows")
    ledger.same("one sample at a time", {name: structure.rows}, {name: expected}, how)
    ledger.same("the fallback", {name: structure.rows}, {name: by_fallback}, how)
    flat = expected.reshape(*expected.shape[:2], -1)
    definitions = {
        sum_sq: expected.square().sum((0, 1)),
        batch_sq: expected.square().sum(0),
        sq_norm: flat.square().sum((0, 2)),
        gram: torch.einsum("vnp,vmp->nm", flat, flat),
    }
    for statistic, value in definitions.items():
        which = f"{statistic.__name__}, {how}"
        ledger.same("fast statistics", {name: statistic(structure)}, {name: value}, which)
    alone = input_gram(swept.structure(sites, chosen, inputs_only=True))
    beside = input_gram(structure)
    if alone is not None or beside is not None:
        ledger.same("inputs alone", {name: alone}, {name: beside}, how)


def _possible_layouts(
    graph: Graph,
) -> Iterator[tuple[list[list[Layout]], Callable[[Tensor], Tensor] | None]]:
    """Yield layouts of the uses: the real ones, and, if possible, layouts that take two rows as one sample.

    Each of the latter comes with a function that turns gradients of single rows ``[v, n, *p]`` into those of
    pairs.
    """
    yield [use.layouts for use in graph.uses], None
    half, left = divmod(graph.samples, 2)
    real = [layout for use in graph.uses for layout in use.layouts]
    if left or any(layout.axis is None or layout.folded or layout.joined for layout in real):
        return
    for major in (True, False):
        own = [[Layout(layout.axis, half, 2, major) for layout in use.layouts] for use in graph.uses]
        yield own, functools.partial(_pairs_summed, half=half, major=major)


def _pairs_summed(rows: Tensor, half: int, major: bool) -> Tensor:
    """Add gradients of single rows ``[v, n, *p]`` up to those of pairs of rows."""
    summed: Tensor = rows.unflatten(1, (half, 2) if major else (2, half)).sum(2 if major else 1)
    return summed


def _at_uses(graph: Graph, outputs: Sequence[Tensor], fed: Sequence[Tensor | None], columns: int) -> Arrived:
    """Pull cotangents at the outputs of a model ``[v, *y]`` back to the outputs of its uses."""
    places = [
        (number, output, edge) for number, use in enumerate(graph.uses) for output, edge in use.nodes.items()
    ]
    edges = [GradientEdge(*edge) for _, _, edge in places]
    pairs = [(output, each) for output, each in zip(outputs, fed, strict=True) if each is not None]
    pulled = [
        torch.autograd.grad(
            [output for output, _ in pairs],
            edges,
            [each[v] for _, each in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for v in range(columns)
    ]
    arrived: Arrived = [[None] * len(use.shapes) for use in graph.uses]
    for (number, output, _), gradients in zip(places, zip(*pulled, strict=True), strict=True):
        own = [gradient for gradient in gradients if gradient is not None]
        arrived[number][output] = torch.stack(own) if own else None
    return arrived
