"""Layouts that keep the samples apart: tried on the graph with random numbers.

# NOTE [Separation]
A sample has a quantity of its own at a use if the cotangent in its rows comes from its own part of the loss
alone. A backward pass is linear, so packprop can check this: it feeds random numbers in at the loss, those of
sample n multiplied by ``2^k`` with a power k of its own, and in a second sweep by ``2^-k``, or ``2^(1-k)``. If
the samples are separate, the rows of each sample come back multiplied by exactly that, even in floating point.
What leaks from one sample into another comes back with the wrong power, and one of the two sweeps amplifies it.
The powers fit the smallest range on the way: that of float16, wherever autocast has put it. So there are 97
pairs of powers, or 17 in float16. Two samples that share a pair may meet unseen; which samples these are
changes from pass to pass. An output's shape can hold N samples in several ways; packprop takes the first one
that passes. If none passes, the samples are mixed between the use and the loss. The check costs two sweeps. It
holds for the values of this pass; NOTE [Hidden mixing] tells whether it holds for all, so that packprop may
keep its result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.nodes import ENTRYWISE, made_by, name_of_node
from packprop.engine.graph.graph import WHOLE, Graph, ReachedUse
from packprop.engine.graph.search import nodes_above
from packprop.engine.samples.feeding import (
    Feed,
    Fitting,
    Sizes,
    first_of,
    model_outputs,
)
from packprop.engine.samples.row_search import RowSearch
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout, layout_of_rows, possible_layouts
from packprop.engine.tensors.traced import decided, note_undecided


def levels(samples: int, largest: float, sweeps: int = 1) -> Tensor:
    """Return exponents of two, as different as sweeps can make them, and no more of them than samples."""
    reach = sweeps * (24 if largest > 1e30 else 4)
    return torch.linspace(-reach, reach, min(samples, 2 * reach + 1), dtype=torch.float64, device="cpu").round()


def differ(up: Tensor, down: Tensor, powers: Tensor, tolerance: float, smallest: float) -> bool:
    """Tell whether the size of some row differs between two sweeps.

    Args:
        up: Sizes ``[n]`` of rows in one sweep, divided by the powers of two that they were fed.
        down: The same in the other sweep.
        powers: The larger exponent of each sample, without its sign.
        tolerance: The largest relative difference that may be rounding.
        smallest: The smallest normal number; sizes that may have been smaller in one sweep do not count.
    """
    larger = torch.maximum(up, down)
    known = larger * torch.exp2(-powers) >= 16 * smallest
    return bool((known & ((up - down).abs() > tolerance * larger)).any())


def separate(graph: Graph, feed: Feed, samples: int, turn: int = 0) -> tuple[Fitting, list[ReachedUse], bool]:
    """Find layouts of all uses that keep the samples apart; see NOTE [Separation].

    Args:
        graph: The graph of the pass.
        feed: The places where samples are fed in.
        samples: Number of samples.
        turn: A number that changes from pass to pass, and with it the powers of the samples.

    Returns:
        All layouts that do so at the outputs of each use; the uses that have none, nearest to the loss first;
        and whether rows of the layouts to take leave a doubt: they were too large, or differ by very little, or
        are too small to count.
    """
    if samples == 1:
        return {use: [[WHOLE]] * len(use.shapes) for use in graph.uses}, [], False
    fitting = {
        use: [admitted_layouts(use, index, samples) for index in range(len(use.shapes))] for use in graph.uses
    }
    behind = {made.dtype for node in nodes_above(edge.node for edge in feed.edges) for made in made_by(node)}
    # float16 also counts if it occurs behind the outputs: its range is the smallest
    dtypes = {output.dtype for output in feed.outputs} | (behind & {torch.float16})
    largest = min(torch.finfo(dtype).max for dtype in dtypes)
    powers = random_powers(samples, largest, turn)
    noise = feed.noise()  # as large as the inputs of the losses: there is only one copy at any time

    def scaled_by(exponents: Tensor) -> Sizes:
        feed.scale(noise, torch.exp2(exponents))
        sizes = feed.sizes(noise, fitting)
        feed.scale(noise, torch.exp2(-exponents))
        return {place: rows * torch.exp2(-exponents) for place, rows in sizes.items()}

    first, second = map(scaled_by, powers)
    reach = torch.maximum(*(each.abs() for each in powers))
    tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    dtypes |= {leaf.dtype for leaf in graph.leaves()}
    smallest = max(torch.finfo(dtype).tiny for dtype in dtypes)
    doubted = []
    for (use, index, layout), up in first.items():
        down = second.get((use, index, layout), up)
        known = up.isfinite() & down.isfinite()
        sizes = up[known], down[known], reach[known]
        if differ(*sizes, tolerance, smallest):
            fitting[use][index].remove(layout)
        elif not bool(known.all()) or differ(*sizes, tolerance, 0.0) or differ(*sizes, tolerance**2, smallest):
            doubted.append((use, index, layout))
    unfit = [use for use, layouts in fitting.items() if not all(layouts)]
    if unfit or any(use.reordered for use in graph.uses):
        search = RowSearch(feed, noise, samples, levels(samples, largest), tolerance, graph.documents)
        _add_layouts_of_rows(fitting, unfit, search)
    is_doubtful = any(layout in fitting[use][index][:1] for use, index, layout in doubted)
    return fitting, [use for use, layouts in fitting.items() if not all(layouts)], is_doubtful


def _add_layouts_of_rows(fitting: Fitting, unfit: Sequence[ReachedUse], search: RowSearch) -> None:
    """Add layouts of rows in any order, after the layouts that fit, for uses that are reordered or ``unfit``.

    A use is ``unfit`` if no axis holds all samples in order: it takes some rows, as in a loop over samples, or
    another order of them. Documents may be in any order at every use.
    """
    places: Fitting = {}
    for use, outputs in fitting.items():
        if use.reordered or use in unfit:
            shapes = use.shapes
            each = [
                _by_row(shape, search.documents) if not own or own[0].folded else []
                for shape, own in zip(shapes, outputs, strict=True)
            ]
            places[use] = [
                [layout for layout in own if _is_admitted(use, index, layout)] for index, own in enumerate(each)
            ]
    for use, index, layout in search.layouts(places):
        assert layout.rows is not None
        own = layout.rows.sample_of
        plain = admitted_layouts(use, index, search.samples)
        places_of = (each.sample_of(own.device) for each in plain if each.axis == layout.axis)
        if not any(torch.equal(own, each) for each in places_of):  # else it is known or mixed
            fitting[use][index].append(layout)


def _by_row(shape: torch.Size, documents: Tensor | None) -> list[Layout]:
    """Return layouts with a sample for each row: along each axis, or along axes as long as ``documents``."""
    layouts = [Layout(axis, extent) for axis, extent in enumerate(shape)]
    if documents is None:
        return layouts
    runs = itertools.combinations(range(len(shape) + 1), 2)
    extents = [(start, tuple(shape[start:stop])) for start, stop in runs if stop - start > 1]
    every = torch.arange(len(documents), device="cpu")
    return layouts + [
        layout_of_rows(start, every, len(documents), joined)
        for start, joined in extents
        if math.prod(joined) == len(documents) and 1 not in joined
    ]


@dataclass(frozen=True)
class Place:
    """A tensor between the losses and the uses: its edge, its description, and its layout."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: Layout


def places_at(graph: Graph, edges: Sequence[GradientEdge]) -> list[Place] | int:
    """Describe tensors between the losses and the uses, with their layouts.

    packprop already knows the layouts of inputs of losses, of outputs of uses, and of outputs of entrywise
    functions of these. It finds the others by the same check as for uses.

    Returns:
        A place for each edge; or the index of the first edge for which no layout fits.
    """
    made = [made_by(edge.node)[edge.output_nr] for edge in edges]
    shapes = [torch.Size(each.shape) for each in made]
    known: dict[tuple[Node | None, int], tuple[torch.Size, Layout]] = {
        key: (use.shapes[index], use.layouts[index]) for use in graph.uses for index, key in use.nodes.items()
    }
    for loss in graph.losses:
        known[loss.call.edge.node, loss.call.edge.output_nr] = loss.call.shape, loss.layout

    def known_layout(edge: GradientEdge, shape: torch.Size) -> Layout | None:
        key: tuple[Node | None, int] = edge.node, edge.output_nr
        if key not in known and name_of_node(edge.node) in ENTRYWISE:
            inputs = [above for above in edge.node.next_functions if above[0] is not None]
            key = inputs[0] if len(inputs) == 1 else key
        there = known.get(key)
        return there[1] if there is not None and there[0] == shape else None

    layouts = [known_layout(edge, shape) for edge, shape in zip(edges, shapes, strict=True)]
    unknown = [place for place, layout in enumerate(layouts) if layout is None]
    if is_dry_run():  # packprop can try nothing without data: samples are where they usually are
        for place in unknown:
            usual = possible_layouts(shapes[place], graph.samples)
            if not usual:
                return place
            layouts[place] = usual[0]
    elif unknown:
        uses = [
            ReachedUse("", [], [shapes[place]], {0: (edges[place].node, edges[place].output_nr)}, is_end=True)
            for place in unknown
        ]
        asked = f"where tensors of shapes {[tuple(shapes[place]) for place in unknown]} hold the samples"
        found = decided(asked, lambda: _found_layouts(replace(graph, uses=uses), graph))
        if isinstance(found, int):
            return unknown[found]
        for place, (layout,) in zip(unknown, found, strict=True):
            layouts[place] = layout
    return [
        Place(edge, shape, each.dtype, each.device, layout)
        for edge, shape, each, layout in zip(edges, shapes, made, layouts, strict=True)
        if layout is not None
    ]


def _found_layouts(unknown: Graph, graph: Graph) -> list[list[Layout]] | int:
    """Return the layouts of a graph's samples at uses of another one, or the index of the first unfit use."""
    fitting, unfit, _ = separate(
        unknown, Feed(model_outputs(graph), graph.source_layouts, unknown.uses), graph.samples
    )
    if any(len(layouts) > 1 for (layouts,) in fitting.values()):  # for example if only zeros come back
        note_undecided()
    return first_of(fitting) if not unfit else unknown.uses.index(unfit[0])


def admitted_layouts(use: ReachedUse, index: int, samples: int) -> list[Layout]:
    """Return the layouts that an output of a use can have, as far as its shape and its entries tell.

    An output that the pass does not reach need not hold samples, such as an output of a user's function that
    you do not use.
    """
    layouts = possible_layouts(use.shapes[index], samples)
    admitted = [layout for layout in layouts if _is_admitted(use, index, layout)]
    return admitted if admitted or index in use.nodes else [Layout(None, samples)]


def _is_admitted(use: ReachedUse, index: int, layout: Layout) -> bool:
    """Tell whether the entries of a use admit a layout of one of its outputs."""
    if layout.axis is None:
        return True
    if not layout.joined and any(entry.features == layout.axis for entry in use.entries):
        return False
    axes = [site.entry.sample_axes for site in use.sites]
    return all(known is None or (known[index],) == (*layout.axes,) for known in axes) and all(
        site.entry.admits(axis) for site in use.sites for axis in layout.axes
    )


def random_powers(samples: int, largest: float, turn: int = 0) -> tuple[Tensor, Tensor]:
    """Return exponents of two ``[n]`` for two sweeps, in an order that changes with the turn.

    Samples differ by the difference between their exponents, as far as the precision allows.
    """
    spread = levels(samples, largest, sweeps=2) / 2
    spread = spread[torch.arange(samples, device="cpu") % len(spread)]
    generator = torch.Generator().manual_seed(samples + 65537 * turn)
    spread = spread[torch.randperm(samples, generator=generator, device="cpu")]
    return spread.ceil(), -spread.floor()
