"""One backward pass -> results: the loop over bites lives here and nowhere else."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.graph import Found, Graph, Site
from packprop.hessian import (
    Curvatures,
    bends,
    estimated_diagonals,
    output_columns,
    parameter_diagonals,
)
from packprop.kernels import Extents, convolved_by_groups
from packprop.memory import device_kind, free_bytes, is_dry
from packprop.monoid import Extent, Partial
from packprop.regions import opened
from packprop.seeds import Columns, columns
from packprop.statistics import (
    OF_ROWS,
    Statistic,
    forms_no_rows,
    forms_rows,
    goes_in_turn,
    per_sample_grad,
    summed_grad,
    together,
)
from packprop.structures import Dense, Diagonal, Outer, Product, Structure, join
from packprop.sweep import Watch, sweep
from packprop.types import (
    ENTRYWISE,
    EXACT,
    GRADIENT,
    HESSIAN,
    INPUTS,
    Extension,
    Row,
    Seed,
    accumulation_dtype,
    tensors_in,
)
from packprop.uses import Fans, choose, fold_to
from packprop.ways import choose_ways, subset

WORTH_SUMMING = 2**24
"""Multiplications of a weight's gradient from which on it is worth an effort not to compute it twice."""


class Bites(NamedTuple):
    """How much may be taken at once.

    Args:
        scratch: Bytes of temporary memory for a bite of samples; a bite is never less than one sample.
        signals: Bytes of signals that a vectorised sweep may hold; with less than two columns take, columns are
            swept one at a time.
        held: Bytes of one sample that an algorithm may hold where another holds less; with more than that
            the latter is taken, use by use. ``None``: the fastest, whatever they hold.
        parameters: Of how many parameters results that wait for several columns are formed at once, at the
            price of sweeping all columns for each of these groups; ``None`` for all.
    """

    scratch: int
    signals: int
    held: int | None = None
    parameters: int | None = None


SCRATCH = 8 * 2**20
SIGNALS = 32 * 2**20
LARGER = 32
"""How much more an accelerator takes at once."""
SHARE = 8
"""Columns with weights, of which there are many, gain nothing by more than this part of ``SIGNALS``."""


def default_bites(device: torch.device | None = None) -> Bites:
    """What is taken at once where there is no budget.

    On a processor what stays in caches; on an accelerator, which is slowed down by small pieces, more, but
    no more than a small share of what is free there.
    """
    if device is None or device.type in ("cpu", "meta"):
        return Bites(SCRATCH, SIGNALS)
    free = free_bytes(device)
    if free is None:
        return Bites(LARGER * SCRATCH, LARGER * SIGNALS)
    return Bites(min(LARGER * SCRATCH, free // 32), min(LARGER * SIGNALS, free // 8))


ONE = Extent(0, 1, 1)
"""The only column of the gradient, and of a sweep over inputs."""


@dataclass(frozen=True)
class _Task:
    """One row of one extension."""

    extension: Extension
    index: int
    row: Row


class _Summed(Extension):
    """The gradient itself, from per-sample ones."""

    rows = (Row(GRADIENT, summed_grad),)


SUMMED = _Summed()

Part = tuple[Found, Site, list[Tensor | None]]
"""A use of a leaf, and what arrived at its outputs."""
Samples = slice | Tensor
Build = Callable[[list[Part], Samples, int | None], Structure | Product | Diagonal]
"""From uses of a leaf, a choice of samples, and what may be held of one, to what statistics are taken of."""
Backward = Callable[[Sequence[Tensor] | None], None]
"""Runs the user's own pass; restricted to some leaves if these are given."""


class Mixed(NamedTuple):
    """The autocast regions that a pass was begun in: its own sums are taken outside of them.

    Args:
        regions: Type of device, precision, and whether copies of weights are kept.
    """

    regions: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def now(cls, devices: Iterable[str]) -> Mixed:
        """Those that are in force."""
        there = (kind for kind in devices if torch.amp.is_autocast_available(kind))
        return cls(
            tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
                for kind in there
                if torch.is_autocast_enabled(kind)
            )
        )

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Inside of them again, or outside."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, cached in self.regions:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
            yield


@dataclass
class Observation:
    """The work of one backward pass.

    Args:
        graph: What the pass goes through, with its samples settled.
        extensions: What was asked for.
        create_graph: Whether results shall be differentiable.
        done: Called with a leaf when all of its partial results are there.
        bites: How much is taken at once.
        log: Called with what is taken of a leaf: the leaf, its uses, the structure, samples in a bite.
        begin: Called once, before the first value is kept; returns tensors that results may be written over, by
            extension and leaf.
    """

    graph: Graph
    extensions: Sequence[Extension]
    create_graph: bool
    done: Callable[[Tensor, dict[Extension, list[Any]]], None]
    bites: Bites = field(default_factory=default_bites)
    log: Callable[[Tensor, Sequence[Found], Structure | Product | Diagonal, int], None] | None = None
    begin: Callable[[], dict[tuple[Extension, int], Tensor]] = dict
    _spare: dict[tuple[Extension, int], Tensor] | None = None
    _mixed: Mixed = field(default_factory=lambda: Mixed(()))
    _partial: dict[tuple[int, int, int], Partial] = field(default_factory=dict)
    _extremes: dict[int, list[Tensor]] = field(default_factory=dict)
    _most: dict[int, int] = field(default_factory=dict)
    _gradients: dict[int, Tensor] = field(default_factory=dict)
    _first: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    def run(self, backward: Backward | None) -> None:
        """Sweep every seed; the gradient along with the user's own ``backward`` pass, if there is one."""
        self._mixed = Mixed.now({leaf.device.type for leaf in self.graph.leaves()})

        def as_begun(leaves: Sequence[Tensor] | None) -> None:
            assert backward is not None
            with self._mixed.switched(True):
                backward(leaves)

        with torch.set_grad_enabled(self.create_graph), self._mixed.switched(False):
            self._run(None if backward is None else as_begun)
        self._warn_if_not_finite()

    def _run(self, backward: Backward | None) -> None:
        tasks: dict[Seed, list[_Task]] = {}
        for extension in self.extensions:
            for index, row in enumerate(extension.rows):
                tasks.setdefault(row.seed, []).append(_Task(extension, index, row))
        _check_subsampling(self.extensions, self.graph.samples)
        _check_second_passes(self.extensions)
        if self.graph.hosts and any(seed.kind in ("hessian", "hessian_mc", "graph") for seed in tasks):
            raise PackpropError(
                "Second derivatives were asked for.",
                "a part of the model inside torch.utils.checkpoint",
                "reentrant checkpointing cannot be differentiated twice",
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        hessian = tasks.pop(HESSIAN, [])
        exact = ENTRYWISE if ENTRYWISE in tasks else EXACT  # any root of the Hessian will do for the latter
        if EXACT in tasks:
            tasks.setdefault(exact, []).extend([] if exact == EXACT else tasks.pop(EXACT))
        # everything that can be refused is refused before any work
        curved = {
            seed: columns(self.graph, seed, self.create_graph)
            for seed in tasks
            if seed.kind in ("ggn", "empirical", "jacobian")
        }
        roots = self._hessian(hessian, curved.get(exact)) if hessian else None
        if roots is not None:
            tasks.setdefault(exact, []).extend(hessian)
            curved[exact] = roots
        for seed in [seed for seed in tasks if seed.kind in ("hessian_mc", "graph")]:
            self._without_sweep(seed, tasks.pop(seed))
        swept = self._passes(tasks, curved)
        inputs, gradient = tasks.get(INPUTS, []), tasks.get(GRADIENT, [])
        if inputs:
            self._inputs(inputs)
        for found in self._in_turn(waits=bool(gradient)):
            for number, (seed, work) in enumerate(swept, 1):
                self._columns(curved[seed], work, not gradient and number == len(swept), found)
        curved.clear()  # roots are as large as what the losses were given
        roots = None
        self.graph.part_with_losses()
        self._gradient(gradient, backward)
        if not swept and not gradient:
            for leaf in self.graph.leaves():
                self._finish(leaf)

    def _passes(
        self, tasks: Mapping[Seed, list[_Task]], curved: Mapping[Seed, list[Columns]]
    ) -> list[tuple[Seed, list[_Task]]]:
        """The columns that are swept, and what for; at the end those for rows of a second pass.

        # NOTE [Second pass]
        Corrected eigenvalues of Kronecker factors need the eigenvectors of all columns before the first column
        can be looked at. Keeping signals of all columns until then would take their number times the memory
        of a backward pass, and keeping per-sample gradients more; so the same columns are swept again, with
        their draws. Where one sweep brings all columns of a leaf at once (a single draw, the empirical
        Fisher, a vectorised sweep), both passes are made when the leaf is met, and there is no second sweep.
        What was made of the first pass takes the place of its results, which are gone then.
        """
        first = {seed: tasks[seed] for seed in curved}
        second: dict[Seed, list[_Task]] = {}
        for seed, groups in curved.items():
            once = len(groups) == 1 and self._columns_at_once(groups[0], self.graph.found) >= groups[0].count
            if not once and any(task.row.after is not None for task in tasks[seed]):
                first[seed] = [task for task in tasks[seed] if task.row.after is None]
                second[seed] = [task for task in tasks[seed] if task.row.after is not None]
        return [(seed, work) for seed, work in [*first.items(), *second.items()] if work]

    def _hessian(self, tasks: list[_Task], roots: list[Columns] | None) -> list[Columns] | None:
        """All of the Hessian but what the GGN's columns give; these, if they are left for all leaves.

        See NOTE [Hessian diagonal].
        """
        graph, create_graph = self.graph, self.create_graph
        per_sample = any(t.row.over_n.grows or t.extension.subsampling is not None for t in tasks)
        if roots is None:  # a loss without a root has second derivatives, too
            with contextlib.suppress(PackpropError):
                roots = columns(graph, EXACT, create_graph)
        way = choose_ways(graph, roots is not None, per_sample, create_graph)
        found = subset(graph, way)
        curvatures = Curvatures(graph, way, found)
        for bend in bends(graph, way, found, curvatures, create_graph):
            self._columns([bend.columns], tasks, False, bend.found, curvatures)
        for f, diagonal in curvatures.take():
            for site in f.take():
                self._consume(site.leaf, [(f, site, diagonal)], tasks, ONE, _diagonal)
        for leaf, values in parameter_diagonals(graph, way.parameter, per_sample, create_graph):
            for chosen, group in _by_subsampling(tasks):
                own = Diagonal(Dense((values if chosen is None else values[chosen])[None]))
                for task in group:
                    self._merge(leaf, task, task.row.statistic(own))
        for uses, leaves in way.output:
            for units, products in output_columns(graph, uses, create_graph):
                for leaf in leaves:
                    left, right = (
                        [(f, s, t) for f, t in zip(uses, each, strict=True) for s in f.take() if s.leaf is leaf]
                        for each in (products, units)
                    )
                    self._consume(leaf, left, tasks, ONE, _products_with(right))
        if way.output or way.parameter:
            if found and roots is not None:
                self._columns(roots, tasks, False, found)
            return None
        return roots

    def _without_sweep(self, seed: Seed, tasks: list[_Task]) -> None:
        """Values that come from double backward in the parameters themselves."""
        leaves = self.graph.leaves()
        if seed.kind == "hessian_mc":
            for leaf, values in estimated_diagonals(self.graph, leaves, seed, self.create_graph):
                for task in tasks:
                    self._merge(leaf, task, task.row.statistic(Diagonal(Dense(values[None, None]))))
            return
        for task in tasks:
            for leaf, product in task.row.statistic(self.graph):
                self._merge(leaf, task, product)

    def _inputs(self, tasks: list[_Task]) -> None:
        parts: dict[int, list[Part]] = {}
        left = _uses_by_leaf(self.graph.found)
        with opened((found.use.source for found in self.graph.found), self.create_graph):
            for found in self.graph.found:
                for site in found.take():
                    nothing: list[Tensor | None] = [None] * len(found.use.shapes)
                    parts.setdefault(id(site.leaf), []).append((found, site, nothing))
                    left[id(site.leaf)] -= 1
                    if left[id(site.leaf)] == 0:
                        self._consume(site.leaf, parts.pop(id(site.leaf)), tasks, ONE)

    def _gradient(self, tasks: list[_Task], backward: Backward | None) -> None:
        if not tasks:
            self._last_pass(backward)
            return
        if backward is None or self.graph.entangled:
            collect = _Collector(self, self.graph.found, tasks, True, ONE)
            graph = self.graph
            edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
            seeds = graph.root_gradients()
            sweep(edges, seeds, graph.found, collect.visit, create_graph=self.create_graph)
            self._last_pass(backward)
            collect.flush()
            return
        summing, others = self._summing(tasks)
        own = [_Task(SUMMED, 0, SUMMED.rows[0])]
        collect = _Collector(self, self.graph.found, tasks, True, ONE, {id(leaf): own for leaf in summing})

        def visit(found: Found, signals: list[Tensor | None]) -> None:
            with self._mixed.switched(False):
                collect.visit(found, signals)
            if not self.graph.kept:
                found.release()

        with opened((found.use.source for found in self.graph.found), self.create_graph):
            watch = Watch(self.graph.found, visit, accumulate=True)
            complete = False
            try:
                backward(others if summing else None)
                complete = True
            finally:
                watch.close(complete)
        collect.flush()
        made = [(leaf, self._gradients.pop(id(leaf))) for leaf in summing if id(leaf) in self._gradients]
        if made:
            torch.autograd.backward([leaf for leaf, _ in made], [gradient for _, gradient in made])

    def _summing(self, tasks: list[_Task]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves whose gradient is summed from per-sample ones, and the leaves that are left to autograd.

        # NOTE [One product for two]
        A weight that is shared over positions has per-sample gradients that cost as many multiplications as
        the summed one. Where they are formed anyway autograd is kept from computing the sum again: its pass
        is restricted to the other leaves, and these are given theirs at the end, through their own nodes, so
        that hooks on them run.
        """
        if self.create_graph or self.graph.hosts:  # a reentrant checkpoint refuses a restricted pass
            return [], []
        statistics = [task.row.statistic for task in tasks if task.extension.subsampling is None]
        graph = self.graph
        chosen: dict[int, Tensor] = {}
        for found in graph.found:
            if any(self._worth_summing(found, site, statistics) for site in found.sites):
                # a bias, too: autograd computes gradients of weight and bias by one function
                chosen |= {id(s.leaf): s.leaf for s in found.sites if s.direct and s.leaf.is_leaf}
        return graph.without(list(chosen.values())) if chosen else ([], [])

    def _worth_summing(self, found: Found, site: Site, statistics: Sequence[Callable[..., Any]]) -> bool:
        fans = site.entry.fans
        if fans is None or not site.direct:
            return False
        extents = self._extents(found, site, fans)
        work = extents.positions * site.leaf.numel() * self.graph.samples
        return work >= WORTH_SUMMING and any(forms_rows(statistic, extents) for statistic in statistics)

    def _extents(self, found: Found, site: Site, fans: Fans) -> Extents:
        """What the algorithms of an affine use will be chosen by."""
        positions = found.use.shapes[0].numel() // (self.graph.samples * fans.groups * fans.fan_out)
        fans = fans._replace(unfolds=fans.unfolds and found.layouts[0].parts == 1)  # several images of a sample
        dtype = accumulation_dtype(site.leaf.dtype)
        return Extents(positions, *fans, dtype, device_kind(site.leaf), self.bites.held)

    def _in_turn(self, waits: bool) -> list[list[Found]]:
        """Uses by groups that columns are swept for one after the other, with all uses of a leaf in one.

        That is of use where results can be finished, and taken away by a hook, before the next are begun;
        not where each ``waits`` for the gradient's pass.
        """
        most = self.bites.parameters
        if most is None or waits or self.graph.hosts:  # a checkpoint's node is run for all of its uses
            return [self.graph.found]
        groups: list[tuple[list[Found], set[int]]] = []
        for found in self.graph.found:
            leaves = {id(site.leaf) for site in found.sites}
            uses = [found]
            for group in [group for group in groups if group[1] & leaves]:
                groups.remove(group)
                uses, leaves = group[0] + uses, group[1] | leaves
            if groups and len(groups[-1][1] | leaves) <= most:
                uses, leaves = groups[-1][0] + uses, groups.pop()[1] | leaves
            groups.append((uses, leaves))
        # what is held of so few are the signals at all of them: each is an end of its own
        return [[replace(f, first=True) for f in uses] for uses, _ in groups]

    def _last_pass(self, backward: Backward | None) -> None:
        """The user's own pass, when all that was asked for is there."""
        if backward is None:
            return
        if not self.graph.kept:
            for found in self.graph.found:
                found.release()
        backward(None)

    def _columns(
        self,
        groups: list[Columns],
        tasks: list[_Task],
        last: bool,
        found: Sequence[Found],
        curvatures: Curvatures | None = None,
    ) -> None:
        summed = {f for f in found if curvatures is not None and curvatures.takes(f)}
        whole = [f for f in found if f not in summed]
        total = sum(group.count for group in groups)
        before = 0
        for group in groups:
            step = self._columns_at_once(group, found)
            for start in _steps(group.count, step):
                stop = min(group.count, start + step)
                seeds = group.chunk(start, stop)
                extent = Extent(before + start, before + stop, total)
                weights = None if group.weights is None else group.weights[start:stop]
                build = None if weights is None else _weighted(weights)
                collect = _Collector(self, whole, tasks, last and extent.stop == total, extent, build=build)

                def visit(
                    f: Found,
                    signals: list[Tensor | None],
                    collect: _Collector = collect,
                    weights: Tensor | None = weights,
                ) -> None:
                    if f not in summed or curvatures is None or weights is None:
                        collect.visit(f, signals)
                    else:
                        curvatures.add_columns(f, signals, weights)

                sweep(
                    group.edges,
                    seeds if stop - start > 1 else [seed[0] for seed in seeds],
                    found,
                    visit,
                    batched=stop - start > 1,
                    create_graph=self.create_graph,
                    bare=group.bare,
                )
                collect.flush()
            before += group.count

    def _columns_at_once(self, group: Columns, found: Sequence[Found]) -> int:
        """As many as fit, in chunks of about one size: where signals are small, calls are what takes time.

        All of the graph must be there: what is computed again is not the same for all columns.
        """
        if not self.graph.holds_inputs:
            return 1
        entries = sum(shape.numel() for f in found for shape in f.use.shapes)
        room = self.bites.signals
        if group.weights is not None:
            room = min(room, max(room, SIGNALS) // SHARE)
        fitting = max(1, room // (8 * max(entries, 1)))
        return -(-group.count // -(-group.count // fitting))

    def _consume(
        self,
        leaf: Tensor,
        parts: list[Part],
        tasks: list[_Task],
        columns: Extent,
        build: Build | None = None,
    ) -> None:
        """Take the statistics of one leaf, bite by bite, and merge them into its partial results.

        ``build`` makes what they are taken of, by default the structure of all uses together.
        """
        build = _met if build is None else build
        samples = self.graph.samples
        first = [task for task in tasks if task.row.after is None]
        second = [task for task in tasks if task.row.after is not None]
        for chosen, group in [*_by_subsampling(first), *_by_subsampling(second)]:
            count = samples if chosen is None else len(chosen)
            whole = any(task.row.whole for task in group)
            for task in group:
                self._begin_second(leaf, task)
            most = self._most.get(id(leaf), count)
            asked = [task.row.statistic for task in group]
            step = count if whole else min(self._samples_at_once(leaf, parts, asked, build is _met), most)
            start = 0
            while start < count:
                stop = min(count, start + step)
                if chosen is None:
                    bite: slice | Tensor = slice(None) if step >= count else slice(start, stop)
                else:
                    bite = torch.tensor(chosen[start:stop]) % samples
                structure: Structure | Product | Diagonal | None = None
                try:
                    structure = build(parts, bite, self.bites.held)
                    if isinstance(structure, Outer):
                        structure = self._in_place(leaf, structure, group, columns, Extent(start, stop, count))
                    values = self._values(leaf, structure, group)
                except torch.OutOfMemoryError:
                    if whole or stop - start == 1:
                        raise
                    step = self._most[id(leaf)] = (stop - start) // 2
                    self._warn_of_halving(leaf, step)
                    continue
                for task, value in zip(group, values, strict=True):
                    self._partial_of(leaf, task).put(value, columns, Extent(start, stop, count))
                if self.log is not None:
                    self.log(leaf, [f for f, _, _ in parts], structure, step)
                del structure, values
                start = _after(start, step, count)

    def _begin_second(self, leaf: Tensor, task: _Task) -> None:
        """What is made of the first pass, once; no smaller bite of samples would take less memory for it."""
        key = (id(task.extension), id(leaf))
        if task.row.after is None or key in self._first:
            return
        partial = [self._partial.pop((id(task.extension), i, id(leaf)), None) for i in range(task.index)]
        self._first[key] = task.row.after([None if each is None else each.result() for each in partial])

    def _values(self, leaf: Tensor, structure: Structure | Product | Diagonal, tasks: list[_Task]) -> list[Any]:
        """What is asked of a bite; rows of a second pass are given what was made of the first."""
        if tasks[0].row.after is None:
            return together(structure, [task.row.statistic for task in tasks])
        return [task.row.statistic(structure, self._first[id(task.extension), id(leaf)]) for task in tasks]

    def _in_place(
        self, leaf: Tensor, structure: Outer, tasks: list[_Task], columns: Extent, samples: Extent
    ) -> Outer:
        """The same, with per-sample gradients written to where they are kept, if they are asked for."""
        kept = [task for task in tasks if task.row.statistic is per_sample_grad]
        signal = structure.signal
        if not kept or signal is None or structure.fold is not fold_to(leaf.shape):
            return structure
        if columns.stop - columns.start != 1 or leaf.dtype != signal.dtype:
            return structure
        room = self._partial_of(leaf, kept[0]).room(signal.new_empty(()), leaf.shape, columns, samples)
        return structure if room is None else replace(structure, room=room)

    def _merge(self, leaf: Tensor, task: _Task, value: Any) -> None:
        """Merge a value of all samples into what is there."""
        self._partial_of(leaf, task).put(value, ONE, ONE)

    def _warn_of_halving(self, leaf: Tensor, step: int) -> None:
        warnings.warn(
            f"The device ran out of memory at parameter {self.graph.name(leaf)!r}; what is finished is kept, "
            f"and the work goes on with {step} samples at a time.",
            PackpropWarning,
            stacklevel=2,
        )

    def partial_results(self) -> Iterator[Tensor]:
        """Tensors of results that are not finished yet."""
        for partial in self._partial.values():
            yield from partial.tensors()
        yield from tensors_in([*self._first.values()])
        yield from self._gradients.values()

    def _partial_of(self, leaf: Tensor, task: _Task) -> Partial:
        if self._spare is None:
            self._spare = self.begin()
        key = (id(task.extension), task.index, id(leaf))
        if key not in self._partial:
            spare = self._spare.pop((task.extension, id(leaf)), None)
            self._partial[key] = Partial(task.row.over_v, task.row.over_n, spare)
        return self._partial[key]

    def vanish(self, leaf: Tensor, columns: Extent, tasks: list[_Task]) -> None:
        """A leaf that a sweep has not reached: its gradients are zero."""
        adding = [task for task in tasks if not task.row.over_v.grows]
        missing = [t for t in adding if (id(t.extension), t.index, id(leaf)) not in self._partial]
        if missing:  # a factor's shape is that of the structure, so zeros must meet the uses
            parts = [
                (found, site, [leaf.new_zeros(1, *shape) for shape in found.use.shapes])
                for found in self.graph.found
                for site in found.sites
                if site.leaf is leaf
            ]
            self._consume(leaf, parts, missing, columns)  # type: ignore[arg-type]  # lists of tensors alone
        for task in tasks:
            if not task.row.over_v.grows:
                continue
            chosen = task.extension.subsampling
            count = self.graph.samples if chosen is None else len(chosen)
            zeros = Dense(leaf.new_zeros(columns.stop - columns.start, count, *leaf.shape))
            self._partial_of(leaf, task).put(task.row.statistic(zeros), columns, Extent(0, count, count))

    def _samples_at_once(
        self, leaf: Tensor, parts: list[Part], statistics: Sequence[Statistic], plain: bool
    ) -> int:
        """How many samples fit into the scratch memory; ``plain`` where nothing else than rows is taken."""
        groups = max((site.entry.fans.groups if site.entry.fans else 1) for _, site, _ in parts)
        thin = all(forms_no_rows(statistic, groups, leaf) for statistic in statistics)
        formed = plain and all(statistic in OF_ROWS for statistic in statistics)
        entries, room = 0, self.bites.scratch
        for found, site, signals in parts:
            columns = next((signal.shape[0] for signal in signals if signal is not None), 0)
            own = sum(shape.numel() for shape in found.use.shapes) // self.graph.samples
            fans = site.entry.fans
            affine = site.direct and fans is not None and own % (fans.groups * fans.fan_out) == 0
            extents = self._extents(found, site, fans) if fans is not None and affine else None
            scratch = site.entry.scratch
            if formed and columns == 1 and fans is not None and extents is not None:
                if len(parts) == 1 and not self.create_graph and goes_in_turn(statistics, extents):
                    entries += extents._replace(unfolds=fans.unfolds).unfolded  # of all images of a sample
                    entries += leaf.numel() if per_sample_grad in statistics else 0
                    continue
                if convolved_by_groups(extents):
                    scratch = site.entry.single
            each = max(scratch, leaf.numel(), own)
            if not columns:  # what comes of inputs alone is a matrix that each bite is added to
                entries += site.entry.alone or each
                room = max(room, (fans.fan_in if fans else 0) ** 2 * leaf.element_size())
            elif thin and extents is not None and extents.positions == 1:
                entries += extents.groups * (extents.fan_in + 2 * extents.fan_out * columns)
            else:
                entries += each * columns
        if not entries:
            return self.graph.samples
        return max(1, min(self.graph.samples, room // (entries * leaf.element_size())))

    def note(self, leaf: Tensor, tensors: Iterable[Tensor | None]) -> None:
        """Remember, without waiting for the device, what tells whether tensors are finite."""
        extremes = self._extremes.setdefault(id(leaf), [])
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                values = tensor.detach()
                extremes += (torch.view_as_real(values) if values.is_complex() else values).aminmax()
        if len(extremes) > 32:  # many sweeps; NaN is neither lost in them
            extremes[:] = torch.stack(extremes).aminmax()

    def _finish(self, leaf: Tensor) -> None:
        results: dict[Extension, list[Any]] = {}
        for extension in (*self.extensions, SUMMED):
            first = self._first.pop((id(extension), id(leaf)), [])
            rest = range(len(first), len(extension.rows))
            found = [self._partial.pop((id(extension), i, id(leaf)), None) for i in rest]
            if any(partial is not None for partial in found):
                results[extension] = first + [None if each is None else each.result() for each in found]
        if SUMMED in results:
            self._gradients[id(leaf)] = results.pop(SUMMED)[0].to(leaf.dtype)
        # NaN in a signal is NaN in the sums that it enters; where there are none, the signals were looked at
        smallest: dict[Seed, Tensor] = {}
        for extension, values in results.items():
            for row, value in zip(extension.rows, values, strict=True):
                if not row.sums or row.seed == INPUTS:
                    continue
                for tensor in tensors_in(value):
                    if tensor.numel() <= smallest.get(row.seed, tensor).numel():
                        smallest[row.seed] = tensor
        if id(leaf) in self._gradients:
            smallest.setdefault(GRADIENT, self._gradients[id(leaf)])
        self.note(leaf, smallest.values())
        self.done(leaf, results)

    def _warn_if_not_finite(self) -> None:
        if _all_finite([each for own in self._extremes.values() for each in own]):
            return
        for leaf in self.graph.leaves():
            if not _all_finite(self._extremes.get(id(leaf), [])):
                warnings.warn(
                    f"The signal at parameter {self.graph.name(leaf)!r} holds NaN or infinite values; so do "
                    "the quantities computed from it.",
                    PackpropWarning,
                    stacklevel=2,
                )
                return


class _Collector:
    """Waits until the signals of all uses of a leaf have arrived, then has them consumed.

    Args:
        observation: What consumes them.
        found: The uses.
        tasks: What is asked of every leaf.
        last: Whether all results are there after this sweep.
        columns: The columns that are swept.
        more: What is asked of some leaves before that.
        build: What statistics are taken of; by default the structure of all uses of a leaf.
    """

    def __init__(
        self,
        observation: Observation,
        found: Sequence[Found],
        tasks: list[_Task],
        last: bool,
        columns: Extent,
        more: Mapping[int, list[_Task]] = MappingProxyType({}),
        build: Build | None = None,
    ) -> None:
        self._observation, self._tasks, self._more = observation, tasks, more
        self._last, self._columns, self._build = last, columns, build
        self._found = found
        self._parts: dict[int, list[Part]] = {}
        self._leaves = {id(site.leaf): site.leaf for f in found for site in f.sites}
        self._expected = _uses_by_leaf(found)
        self._sums = any(task.row.sums for task in tasks)

    def visit(self, found: Found, signals: list[Tensor | None]) -> None:
        """One use with its signals."""
        for site in found.take():
            key = id(site.leaf)
            if not self._sums and key not in self._more:
                self._observation.note(site.leaf, signals)
            parts = self._parts.setdefault(key, [])
            parts.append((found, site, signals))
            if len(parts) == self._expected[key]:
                self._consume(key)

    def flush(self) -> None:
        """End of the sweep: leaves that it has reached at some of their uses only, or at none."""
        for key in list(self._parts):
            if any(task.row.statistic not in OF_ROWS for task in self._tasks):
                self._parts[key] += self._unreached(key)
            self._consume(key)
        for leaf in list(self._leaves.values()):
            self._observation.vanish(leaf, self._columns, self._tasks)
            self._done(leaf)

    def _unreached(self, key: int) -> list[Part]:
        """Zeros for the uses that are missing: a factor is that of all uses together, in every sweep."""
        there = {found for found, _, _ in self._parts[key]}
        given = [signal for _, _, signals in self._parts[key] for signal in signals if signal is not None]
        return [
            (found, site, [given[0].new_zeros(len(given[0]), *shape) for shape in found.use.shapes])
            for found in self._found
            if found not in there and any(id(site.leaf) == key for site in found.sites)
            for site in found.take()
            if id(site.leaf) == key
        ]

    def _consume(self, key: int) -> None:
        leaf = self._leaves[key]
        tasks = [*self._more.get(key, ()), *self._tasks]
        self._observation._consume(leaf, self._parts.pop(key), tasks, self._columns, self._build)
        self._done(leaf)

    def _done(self, leaf: Tensor) -> None:
        del self._leaves[id(leaf)]
        if self._last:
            self._observation._finish(leaf)


def _steps(count: int, step: int) -> list[int]:
    """Where chunks begin; without data, those that the others are like: two, and the last."""
    starts = [*range(0, count, step)]
    return [*starts[:2], starts[-1]] if is_dry() and len(starts) > 3 else starts


def _after(start: int, step: int, count: int) -> int:
    """Where the next bite begins: as in ``_steps``."""
    following = start + step
    if is_dry() and start > 0 and following < count:
        return max(following, (count - 1) // step * step)
    return following


def _all_finite(scalars: Sequence[Tensor]) -> bool:
    """Whether all of some scalars are finite; waits for each device once."""
    if is_dry():
        return True
    places: dict[torch.device, list[Tensor]] = {}
    for scalar in scalars:
        places.setdefault(scalar.device, []).append(scalar)
    return all(math.isfinite(value) for same in places.values() for value in torch.stack(same).tolist())


def _uses_by_leaf(found: Sequence[Found]) -> dict[int, int]:
    """How many times each leaf enters the uses, by identity."""
    times: dict[int, int] = {}
    for each in found:
        for site in each.sites:
            times[id(site.leaf)] = times.get(id(site.leaf), 0) + 1
    return times


def _met(parts: list[Part], samples: Samples, held: int | None) -> Structure:
    """The structure of all uses of a leaf together."""
    return join([site.meet(signals, found.layouts, samples, held) for found, site, signals in parts])


def _weighted(weights: Tensor) -> Build:
    """Squares weighted for each column and sample ``[v, n]``."""
    return lambda parts, samples, held: Product(_met(parts, samples, held), weights=choose(weights, samples, 1))


def _products_with(others: list[Part]) -> Build:
    """Products of two sets of columns."""
    return lambda parts, samples, held: Product(_met(parts, samples, held), _met(others, samples, held))


def _diagonal(parts: list[Part], samples: Samples, held: int | None) -> Diagonal:
    """Squares of what multiplies the leaf, weighted by signals."""
    ((found, site, signals),) = parts
    squares = site.squares(signals, found.layouts, samples)
    assert squares is not None
    return Diagonal(squares)


def _by_subsampling(tasks: list[_Task]) -> list[tuple[list[int] | None, list[_Task]]]:
    groups: dict[tuple[int, ...] | None, list[_Task]] = {}
    for task in tasks:
        chosen = task.extension.subsampling
        groups.setdefault(None if chosen is None else tuple(chosen), []).append(task)
    return [(None if key is None else list(key), group) for key, group in groups.items()]


def _check_second_passes(extensions: Sequence[Extension]) -> None:
    for extension in extensions:
        for index, row in enumerate(extension.rows):
            if row.after is None:
                continue
            before, swept = extension.rows[:index], ("gradient", "ggn", "empirical", "jacobian")
            fits = row.seed.kind in swept and all(each.seed in (INPUTS, row.seed) for each in before)
            if not fits or index != len(extension.rows) - 1:
                raise BadInput(
                    f"{extension.name}() was asked for.",
                    f"row {index}, which comes after others",
                    "a second pass is one over the columns of the first",
                    "make it the last row, of a seed that is swept, behind rows of that seed or of inputs",
                )


def _check_subsampling(extensions: Sequence[Extension], samples: int) -> None:
    for extension in extensions:
        for index in extension.subsampling or ():
            if not -samples <= index < samples:
                raise BadInput(
                    f"{extension.name}(subsampling={list(extension.subsampling or ())}) was asked for.",
                    f"index {index}",
                    f"the batch has {samples} samples",
                    f"give indices from 0 to {samples - 1}",
                )
