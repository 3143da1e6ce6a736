"""Diagonals of the Hessian: what each way to them feeds in.

# NOTE [Hessian diagonal]
A loss curves in the output y of a use because the loss function does, and because nodes between the two do.
Where these are linear (by parts) or elementwise, ``H = sum_losses J^T H_l J + sum_z J_z^T diag(r) J_z``, with z
the input of a nonlinear node phi, J_z its Jacobian in y, and ``r = phi''(z) dL/dphi(z)``. The first sum is the
GGN, so its columns are swept; for the second one a unit column is swept for each entry of z, and the squares of
what arrives are weighted by r, which may have either sign (*swept*). No root of r is taken: it could not be
differentiated where r is zero. Where z is y itself, squares of the use's inputs do without a sweep; where each
entry of the parameter enters one entry of y, the diagonal of the Hessian in y does, and columns end there.
Columns at the output of a matrix product or a convolution begin at its input where its Jacobian is the same for
all samples: one pass gives as many of its rows as there are samples. Without nonlinear nodes the Hessian is
the GGN.
Behind any other node, columns ``H u`` of the Hessian at the outputs of the uses are found by double backward:
``diag(J^T H J) = sum_u (J^T H u) * (J^T u)`` over unit columns u (*output*). This asks that the outputs are
affine in the parameter, and that no use of it lies upstream of another.
Whatever remains (tied weights one above the other, parametrised weights, functions that are not affine in the
parameter) is differentiated twice in the parameter itself, entry by entry (*parameter*).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.graph import Found, Graph, Site, made_by
from packprop.nodes import CONVOLUTIONS, name_of_node
from packprop.samples import layouts_at
from packprop.second_order import require_second_derivatives, slopes_at, twice
from packprop.seeds import Columns, unit_columns
from packprop.structures import join, rows
from packprop.sweep import pull_columns, sweep
from packprop.types import Layout, Seed, accumulation_dtype
from packprop.ways import Curve, Ways, named, require_third_derivatives, subset_of

WORTH_A_BATCH = 4
"""Passes through one function from which on a vectorised one is faster."""
BATCHED_ENTRIES = 2**23
"""Entries of all outputs of uses that columns by double backward may take at once."""


class Curvatures:
    """Diagonals of the Hessian at the outputs of uses that need no more of it.

    Where every entry of the leaves enters one entry of a sample's output, ``H_pp = (dy/dp)^2 H_yy``: whatever
    is swept there is summed over columns first, and meets the inputs once.

    Args:
        graph: With its samples settled.
        ways: Which leaves are swept.
        found: Their uses.
    """

    def __init__(self, graph: Graph, ways: Ways, found: Sequence[Found]) -> None:
        self._bits = ways.bits
        times = Counter(id(site.leaf) for f in graph.found for site in f.sites)
        self._squared = {ways.bits[f] for f in found if _has_squares(f)}
        self._enough = {
            ways.bits[f]
            for f in found
            if ways.bits[f] in self._squared
            and all(times[id(site.leaf)] == 1 and _enters_once(f, site, graph.samples) for site in f.sites)
        }
        self._totals: dict[int, tuple[Found, Tensor]] = {}

    def starts_at(self, found: Found, node: Node, output: int) -> bool:
        """Whether a use has this output, and can do without a sweep to it."""
        return found.nodes == {0: (node, output)} and self._bits[found] in self._squared

    def takes(self, found: Found) -> bool:
        """Whether the diagonal is all that is needed at a use."""
        return self._bits[found] in self._enough

    def add(self, found: Found, diagonal: Tensor) -> None:
        """A diagonal at its output, of the output's shape."""
        self._merge(found, flat(found.layouts[0].to_front(diagonal), 1))

    def add_columns(self, found: Found, signals: Sequence[Tensor | None], weights: Tensor) -> None:
        """Columns at its output, whose squares are weighted for each column and sample ``[v, n]``."""
        (signal,) = signals
        if signal is None:
            return
        front = flat(found.layouts[0].to_front(signal, 1), 2)
        squares = front.to(accumulation_dtype(front.dtype)).square()
        each = weights[..., None]
        self._merge(found, (squares * each if squares.requires_grad else squares.mul_(each)).sum(0))

    def take(self) -> Iterator[tuple[Found, list[Tensor | None]]]:
        """Uses with their diagonals, as signals of one column ``[1, *y]``."""
        for found, total in self._totals.values():
            layout, shape = found.layouts[0], found.use.shapes[0]
            yield found, [layout.from_front(total.view(layout.front_shape(shape)))[None]]

    def _merge(self, found: Found, diagonal: Tensor) -> None:
        bit = self._bits[found]
        before = self._totals.get(bit)
        self._totals[bit] = found, diagonal if before is None else before[1] + diagonal


def flat(front: Tensor, kept: int) -> Tensor:
    """All axes behind the first ``kept`` as one, also where there are none."""
    return front.reshape(*front.shape[:kept], -1)


def _has_squares(found: Found) -> bool:
    """Whether all leaves of a use can be given a diagonal at its output."""
    alone = list(found.nodes) == [0] and len(found.use.shapes) == 1
    return alone and all(site.has_squares for site in found.sites)


def _enters_once(found: Found, site: Site, samples: int) -> bool:
    """Whether each entry of a leaf is known to enter one entry of each sample's output."""
    own, fans = found.use.shapes[0].numel() // samples, site.entry.fans
    if not site.direct or not site.entry.linear:
        return False
    return own == (site.leaf.numel() if fans is None else fans.groups * fans.fan_out) and (
        fans is not None or site.entry.structure == "Scale"
    )


@dataclass(frozen=True)
class Bend:
    """What one input of elementwise nonlinearities adds to the Hessian.

    Args:
        columns: Unit columns at it, or where these come from, with weights.
        found: Uses that these are swept to.
    """

    columns: Columns
    found: list[Found]


def bends(
    graph: Graph, ways: Ways, found: Sequence[Found], curvatures: Curvatures, create_graph: bool
) -> Iterator[Bend]:
    """What elementwise nonlinearities add, input by input; ``curvatures`` gets what needs no sweep."""
    if not ways.curves:
        return
    weights = residuals(graph, ways, create_graph)
    merged: dict[tuple[Node, int], tuple[Tensor, Layout, Curve]] = {}
    for (curve, layout), weight in zip(ways.curves, weights, strict=True):
        key = (curve.input.node, curve.input.output_nr)
        before = merged.get(key)
        merged[key] = (weight if before is None else weight + before[0], layout, curve)
    for (node, output), (weight, layout, curve) in merged.items():
        here = [f for f in found if curvatures.starts_at(f, node, output)]
        for f in here:
            curvatures.add(f, weight.to(accumulation_dtype(weight.dtype)))
        reached = subset_of([f for f in found if ways.bits[f] & curve.upstream and f not in here], ways)
        if reached:
            start = _shared_rows(graph, curve, layout, reached, ways.masks, create_graph)
            yield Bend(_unit_columns(weight, layout, start or curve.input), reached)


def residuals(graph: Graph, ways: Ways, create_graph: bool = False) -> list[Tensor]:
    """``phi''(z) dL/dphi(z)`` at the input z of each elementwise nonlinearity, of its shape."""
    if not ways.curves:
        return []
    slopes = slopes_at(graph, [GradientEdge(curve.node, 0) for curve, _ in ways.curves], create_graph)
    pairs = zip(ways.curves, slopes, strict=True)
    return [residual(curve, slope, create_graph) for (curve, _), slope in pairs]


def residual(curve: Curve, slope: Tensor | None, create_graph: bool) -> Tensor:
    """``phi''(z) dL/dphi(z)`` of the shape of z.

    A node called by itself gives phi' of what it saved, whose derivative in z is found as any other.
    """
    made = made_by(curve.node)[0]
    if slope is None:
        return torch.zeros(curve.shape, dtype=made.dtype, device=made.device)
    node: Any = curve.node  # nodes can be called, which torch's annotations leave out
    with twice(curve.node.name()), torch.enable_grad():
        first: Any = node(torch.ones_like(slope))
        first = first[0] if isinstance(first, tuple) else first
        second = None
        if first.requires_grad:
            (second,) = torch.autograd.grad(
                first.sum(), curve.input, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
    with torch.set_grad_enabled(create_graph):
        return torch.zeros_like(slope) if second is None else second * slope


def _unit_columns(weight: Tensor, layout: Layout, start: GradientEdge | SharedRows) -> Columns:
    front = layout.to_front(weight)
    samples, entries = front.shape[0], front.shape[1:].numel()
    weights = front.reshape(samples, entries).mT
    weights = weights.to(accumulation_dtype(weights.dtype))
    if isinstance(start, SharedRows):
        return Columns([start.below], entries, lambda first, last: [start(first, last)], weights)

    def chunk(start: int, stop: int) -> list[Tensor]:
        return [unit_columns(weight.shape, layout, weight, start, stop)]

    return Columns([start], entries, chunk, weights)


@dataclass
class SharedRows:
    """Rows of a Jacobian that all samples have in common, at what its function was given.

    As many of them come from one pass as there are samples.

    Args:
        above: Where the output comes from.
        shape: Shape of the output.
        layout: Where the output holds the samples.
        below: Where the input comes from.
        inside: Where the input holds the samples.
        like: Has the precision and device of the output.
        create_graph: Whether rows shall be differentiable.
    """

    above: GradientEdge
    shape: torch.Size
    layout: Layout
    below: GradientEdge
    inside: Layout
    like: Tensor
    create_graph: bool
    _first: int = 0
    _rows: Tensor | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        """Rows as columns at the input ``[v, *x]``, which samples share."""
        known = 0 if self._rows is None else len(self._rows)
        if not self._first <= start <= stop <= self._first + known:
            self._first, self._rows = start, None
            self._rows = self.rows(start, max(stop, start + self.layout.samples))
        assert self._rows is not None
        rows = self._rows[start - self._first : stop - self._first]
        return self.inside.from_front(rows[:, None].expand(-1, self.layout.samples, *rows.shape[1:]), 1)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows from ``start`` to ``stop``, or to the last ``[v, *rest]``."""
        samples = self.layout.samples
        rest = self.layout.front_shape(self.shape)[1:]
        stop = min(rest.numel(), rest.numel() if stop is None else stop)
        count = -(-(stop - start) // samples)
        units = self.like.new_zeros(count * samples, rest.numel())
        units.diagonal(start).fill_(1.0)
        fed = self.layout.from_front(units.reshape(count, samples, *rest), 1)
        pull = functools.partial(pull_columns, [self.above], [self.below], create_graph=self.create_graph)
        parts = [fed] if count >= WORTH_A_BATCH else fed.split(1)  # one by one for so few
        found = [pull([part])[0] for part in parts]
        pulled = torch.cat([part for part in found if part is not None])
        return self.inside.to_front(pulled, 1).flatten(0, 1)[: stop - start]


def is_shared(node: Node, layout: Layout, below: GradientEdge, inside: Layout) -> bool:
    """Whether all samples have one Jacobian: matrix products of rows, and convolutions of samples side by side.

    The axis of samples must pass through: where a product sums over it, each sample has rows of the other
    matrix to itself, and where samples lie on channels, a convolution may have a kernel for each.
    """
    places = [place for place, (above, _) in enumerate(node.next_functions) if above is below.node]
    if len(places) != 1 or layout != inside:
        return False
    name, dims = name_of_node(node), len(made_by(node)[0].shape)
    kept: Sequence[int] = ()
    if places == [0] and name in CONVOLUTIONS:
        kept = (0,)
    elif places == [0] and name == "Linear":
        kept = range(dims - 1)
    elif name in ("Mm", "Addmm"):  # the one adds nothing, the other a first operand
        kept = (places[0] - (name == "Addmm"),)
    return len(kept) > 0 and layout.axis in (None, *kept)


def _shared_rows(
    graph: Graph,
    curve: Curve,
    layout: Layout,
    reached: Sequence[Found],
    masks: dict[Node, int],
    create_graph: bool,
) -> SharedRows | None:
    """What unit columns at a nonlinearity's input become below the function that made it, if that helps."""
    above = curve.input
    sources = above.node.next_functions
    inputs = [(node, output) for node, output in sources if node is not None and masks.get(node)]
    if len(inputs) != 1 or layout.axis is None or any(above.node in f.anchors for f in reached):
        return None
    below = GradientEdge(*inputs[0])
    made = made_by(above.node)[above.output_nr]
    known = layouts_at(graph, [(below, torch.Size(made_by(below.node)[below.output_nr].shape))])
    if not isinstance(known, list) or not is_shared(above.node, layout, below, known[0]):
        return None
    like = torch.empty(0, dtype=made.dtype, device=made.device)
    return SharedRows(above, curve.shape, layout, below, known[0], like, create_graph)


def output_columns(
    graph: Graph, uses: Sequence[Found], create_graph: bool, at_once: int | None = None
) -> Iterator[tuple[list[list[Tensor | None]], list[list[Tensor | None]]]]:
    """Unit columns u at the outputs of some uses, and ``H u`` with the Hessian of the roots in them.

    Args:
        graph: With its samples settled.
        uses: Their outputs are taken together.
        create_graph: Whether columns shall be differentiable.
        at_once: Number of columns; by default as many as ``BATCHED_ENTRIES`` says.

    Yields:
        For each use and output, ``[v, *y]`` of both.
    """
    require_second_derivatives(graph.roots, [site.leaf for f in uses for site in f.sites], named(graph))
    places = [(f, index) for f in uses for index in f.nodes]
    edges = [GradientEdge(*f.nodes[index]) for f, index in places]
    with twice(graph.label(uses[0])), torch.enable_grad():
        slopes = slopes_at(graph, edges, create_graph=True)
    slopes = [
        torch.zeros(f.use.shapes[index], device=_device(f), dtype=_dtype(f)) if slope is None else slope
        for (f, index), slope in zip(places, slopes, strict=True)
    ]
    total = sum(slope.numel() for slope in slopes if slope is not None)
    step = at_once or max(1, BATCHED_ENTRIES // max(1, total))
    for active, (f, index) in enumerate(places):
        slope = slopes[active]
        assert slope is not None
        layout = f.layouts[index]
        entries = slope.numel() // layout.samples
        for start in range(0, entries, step):
            stop = min(entries, start + step)
            unit = unit_columns(slope.shape, layout, slope, start, stop)
            columns = _hessian_columns(graph.label(f), slope, edges, unit, create_graph)
            vectors: list[list[Tensor | None]] = [[None] * len(other.use.shapes) for other in uses]
            products: list[list[Tensor | None]] = [[None] * len(other.use.shapes) for other in uses]
            for place, (other, output) in enumerate(places):
                found = columns[place]
                zeros = unit.new_zeros(stop - start, *other.use.shapes[output])
                vectors[uses.index(other)][output] = unit if place == active else zeros
                products[uses.index(other)][output] = zeros if found is None else found
            yield vectors, products


def _device(found: Found) -> torch.device:
    return found.sites[0].leaf.device


def _dtype(found: Found) -> torch.dtype:
    return found.sites[0].leaf.dtype


def _hessian_columns(
    where: str, slope: Tensor, ends: Sequence[Any], vectors: Tensor, create_graph: bool
) -> list[Tensor | None]:
    """Derivatives of ``slope`` along each of ``vectors [v, *y]``, at every end ``[v, *end]``."""
    if not slope.requires_grad:
        return [None] * len(ends)
    with twice(where):
        return pull_columns([slope], ends, [vectors], create_graph=create_graph)


def parameter_diagonals(
    graph: Graph, leaves: Sequence[Tensor], per_sample: bool, create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each leaf with the diagonals of its Hessian: of each sample ``[n, *p]``, or summed ``[1, *p]``."""
    if not leaves:
        return
    require_second_derivatives(graph.roots, leaves, named(graph))
    with twice(f"parameter {graph.name(leaves[0])!r}"), torch.enable_grad():
        slopes = _sample_gradients(graph, leaves) if per_sample else _whole_gradients(graph, leaves)
    for leaf, slope in zip(leaves, slopes, strict=True):
        yield leaf, _diagonals(f"parameter {graph.name(leaf)!r}", leaf, slope, create_graph)


def _whole_gradients(graph: Graph, leaves: Sequence[Tensor]) -> list[Tensor]:
    found = slopes_at(graph, leaves, create_graph=True)
    found = [t.to_dense() if t is not None and t.is_sparse else t for t in found]
    pairs = zip(leaves, found, strict=True)
    return [torch.zeros_like(leaf)[None] if slope is None else slope[None] for leaf, slope in pairs]


def _sample_gradients(graph: Graph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Differentiable gradients of single samples ``[n, *p]`` of some leaves."""
    wanted = {id(leaf) for leaf in leaves}
    parts: dict[int, list[Any]] = {}

    def visit(found: Found, signals: list[Tensor | None]) -> None:
        for site in found.sites:
            if id(site.leaf) in wanted:
                parts.setdefault(id(site.leaf), []).append(site.meet(signals, found.layouts, slice(None)))

    edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
    sweep(edges, graph.root_gradients(), graph.found, visit, create_graph=True)
    return [
        rows(join(parts[id(leaf)]))[0] if id(leaf) in parts else leaf.new_zeros(graph.samples, *leaf.shape)
        for leaf in leaves
    ]


def _diagonals(where: str, leaf: Tensor, slope: Tensor, create_graph: bool) -> Tensor:
    """Diagonal of the derivative of each of ``slope [n, *p]`` in the leaf."""
    entries, samples = leaf.numel(), slope.shape[0]
    if not slope.requires_grad:
        return torch.zeros_like(slope)
    with torch.enable_grad():
        flat = slope.reshape(samples * entries)
    step = max(1, min(flat.numel(), BATCHED_ENTRIES // max(1, 16 * entries)))
    found = []
    for start in range(0, flat.numel(), step):
        stop = min(flat.numel(), start + step)
        places = torch.arange(start, stop, device=flat.device)
        unit = torch.zeros(stop - start, flat.numel(), dtype=flat.dtype, device=flat.device)
        unit[torch.arange(stop - start), places] = 1.0
        (columns,) = _hessian_columns(where, flat, [leaf], unit, create_graph)
        if columns is None:
            found.append(flat.new_zeros(stop - start))
        else:
            own = places % entries
            found.append(columns.reshape(stop - start, entries).gather(1, own[:, None])[:, 0])
    return torch.cat(found).reshape(slope.shape).to(accumulation_dtype(slope.dtype))


def estimated_diagonals(
    graph: Graph, leaves: Sequence[Tensor], seed: Seed, create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Unbiased estimates ``u * (H u)`` with random signs u (Bekas et al. 2007), the mean over draws ``[*p]``.

    One Hessian-vector product for each draw, whatever the number of parameters.
    """
    if create_graph:
        require_third_derivatives(graph, leaves)
    require_second_derivatives(graph.roots, leaves, named(graph))
    draws, where = seed.mc_samples or 1, f"parameter {graph.name(leaves[0])!r}"
    with twice(where):
        with torch.enable_grad():
            slopes = _whole_gradients(graph, leaves)
        totals: list[Tensor | float] = [0.0] * len(leaves)
        for _ in range(draws):
            signs = [_signs(leaf, seed.generator) for leaf in leaves]
            pairs = [(g, u[None]) for g, u in zip(slopes, signs, strict=True) if g.requires_grad]
            found: Any = [None] * len(leaves)
            if pairs:
                found = torch.autograd.grad(
                    [g for g, _ in pairs],
                    list(leaves),
                    [u for _, u in pairs],
                    retain_graph=True,
                    create_graph=create_graph,
                    allow_unused=True,
                )
            for place, (u, product) in enumerate(zip(signs, found, strict=True)):
                if product is not None:
                    product = product.to_dense() if product.is_sparse else product
                    totals[place] = totals[place] + (u * product).to(accumulation_dtype(u.dtype))
    for leaf, total in zip(leaves, totals, strict=True):
        yield leaf, total / draws if isinstance(total, Tensor) else torch.zeros_like(leaf, requires_grad=False)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    coins = torch.randint(0, 2, like.shape, generator=generator, device=device)
    return (2 * coins - 1).to(like.device, like.dtype)
