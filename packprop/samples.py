"""Where the samples are: known from the graph, not guessed from shapes.

# NOTE [Separation]
A sample has a quantity of its own at a use if the signal in its rows comes from its own part of the loss
alone. That is what is checked, by the linearity of a backward pass: random numbers are fed in at the loss,
those of sample n multiplied by ``2^k`` with a power k of its own, then by ``2^-k``. If the samples are
separate, the rows of each come back multiplied by just that, exactly so in floating point; what leaks from
one sample into another comes back with the wrong power, and amplified in one of the two sweeps. Of all the
ways in which an output's shape can hold N samples the first that passes is taken; where none does, the
samples are mixed between the use and the loss. The check costs two sweeps; its verdict is kept for passes of
the same structure and shapes, unless nothing came back at a use, or data decide on the order of rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.errors import PackpropError
from packprop.graph import Found, Graph, require_complete
from packprop.losses import describe, number_of_samples
from packprop.memory import is_dry
from packprop.nodes import ENTRYWISE, name_of_node
from packprop.sweep import sweep
from packprop.tape import Forward, Use
from packprop.types import Layout, accumulation_dtype, layouts


@dataclass(frozen=True)
class _Verdict:
    samples: int
    fed: list[Layout]
    uses: list[list[Layout]]
    lasting: bool
    """Whether a later pass of the same structure must come to the same verdict."""


_VERDICTS: weakref.WeakKeyDictionary[nn.Module, dict[int, _Verdict]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Source:
    """An output of the model that samples are fed in at."""

    edge: GradientEdge
    shape: torch.Size
    samples: int
    class_axis: int | None
    dtype: torch.dtype
    device: torch.device

    @property
    def unbatched(self) -> bool:
        """Whether the loss took its input for one sample."""
        return len(self.shape) == 1 and self.class_axis == 0


def check_graph(graph: Graph) -> None:
    """Everything that must hold before any work: uses are there, all of them, and samples are separate."""
    if not graph.found:
        raise PackpropError(
            "A backward pass with extensions was started.",
            "the tensor that backward() was called on",
            "its graph holds no recorded use of a parameter: the forward pass ran on a module that is not "
            "extended, under packprop.disable(), or before extend() was called",
            "call packprop.extend(model) first, then run the forward pass again, outside of disable()",
        )
    require_complete(graph)
    if graph.leaves():
        settle(graph)


def settle(graph: Graph) -> None:
    """Find the number of samples and the layout of every use and loss.

    Raises:
        PackpropError: If the samples are mixed, or no number of samples fits both inputs and loss.
    """
    modules = graph.modules
    kept = _VERDICTS.setdefault(modules[0], {}) if modules else {}
    verdict = kept.get(graph.signature)
    if verdict is None and is_dry():
        verdict = _assumed(graph)
        if verdict.samples > 1:
            _sweep_once(graph)
    if verdict is None:
        verdict = _find(graph)
        if verdict.lasting and not any(forward.reordered for forward in graph.forwards):
            kept[graph.signature] = verdict
    graph.samples = verdict.samples
    graph.fed = verdict.fed
    for loss, layout in zip(graph.losses, verdict.fed if graph.losses else [], strict=True):
        loss.layout = layout
    for found, where in zip(graph.found, verdict.uses, strict=True):
        found.layouts = where


def same_verdicts(copy: nn.Module, original: nn.Module) -> None:
    """What was found out of passes through a module holds for its copy."""
    _VERDICTS[copy] = dict(_VERDICTS.get(original, {}))


def _assumed(graph: Graph) -> _Verdict:
    """Where the samples are if they are where they usually are: nothing can be fed in without data."""
    sources = _sources(graph)
    if not sources or any(source.samples == 0 for source in sources):
        _raise_empty(graph, sources)
    samples, leading = next(iter(_candidates(graph, sources)))
    chosen = [(_ways(source, samples, leading) or [Layout(None, 1)])[0] for source in sources]
    uses = []
    for found in graph.found:
        ways = [[way for way in layouts(shape, samples) if _admitted(found, way)] for shape in found.use.shapes]
        if not all(ways):
            raise _mixed(graph, found)
        uses.append([way[0] for way in ways])
    return _Verdict(samples, chosen if graph.losses else [], uses, False)


def _sweep_once(graph: Graph) -> None:
    """What finding the samples would take: one of its sweeps."""
    sources = _sources(graph)
    seeds = [torch.empty(source.shape, dtype=source.dtype, device=source.device) for source in sources]
    sweep([source.edge for source in sources], seeds, graph.found, lambda *_: None, inputs=False)


def _sources(graph: Graph) -> list[_Source]:
    if graph.losses:
        found = []
        for loss in graph.losses:
            call = loss.call
            given = call.input
            axis = describe(call.function, call.args, call.kwargs).class_axis
            count = number_of_samples(call.function, call.args, call.kwargs)
            found.append(_Source(call.edge, given.shape, count, axis, given.dtype, given.device))
        return found
    leaf = graph.leaves()[0]
    return [
        _Source(edge, shape, shape[0] if shape else 0, None, leaf.dtype, leaf.device)
        for edge, forward, shape in graph.outputs
        if forward.has_parameters
    ]


def _find(graph: Graph) -> _Verdict:
    sources = _sources(graph)
    if not sources or any(source.samples == 0 for source in sources):
        _raise_empty(graph, sources)
    failed: Found | None = None
    for samples, leading in _candidates(graph, sources):
        ways = [_ways(source, samples, leading) for source in sources]
        for choice in range(max(map(len, ways), default=0)):
            chosen = [way[min(choice, len(way) - 1)] for way in ways if way]
            if len(chosen) < len(ways):
                break
            found, failure, telling = _probe(graph, sources, chosen, samples)
            if found is not None:
                return _Verdict(samples, chosen, found, telling)
            failed = failed or failure
    if failed is None:
        sizes = [shape for forward in graph.forwards for shape in forward.sizes]
        raise _disagreement([source.samples for source in sources], sizes)
    raise _mixed(graph, failed)


def _ways(source: _Source, samples: int, leading: bool) -> list[Layout]:
    """How the model's output may hold the samples.

    Where they lead the model's inputs they lead its output: any other way would take positions for samples.
    Where they come second in the inputs, they may be anywhere, parts before samples first.
    """
    ways = [way for way in layouts(source.shape, samples) if way.axis is None or way.axis != source.class_axis]
    if leading:
        return [way for way in ways if way.axis is None or (way.axis == 0 and way.major)]
    return sorted(ways, key=lambda way: way.axis == 0 and way.parts > 1 and way.major)


def _candidates(graph: Graph, sources: Sequence[_Source]) -> list[tuple[int, bool]]:
    """Numbers of samples that fit both what went into the model and what went into the loss.

    Each with whether it is the extent of a leading axis.
    """
    extents = [source.samples for source in sources]
    rows = extents[0]
    calls = [forward for forward in graph.forwards if forward.has_parameters]  # a loss module has none
    shapes = [shape for forward in calls for shape in forward.sizes if len(shape)]
    by_call = [[shape[0] for shape in forward.sizes if len(shape)] for forward in calls]
    leading = [size for sizes in by_call for size in sizes]
    second = {shape[1] for shape in shapes if len(shape) > 1}

    def fits(size: int) -> bool:
        """Divides the loss's rows, and rows of the inputs of every call."""
        return (
            size > 0
            and all(extent % size == 0 for extent in extents)
            and all(not sizes or any(own % size == 0 for own in sizes) for sizes in by_call)
        )

    if not shapes or (rows in leading and fits(rows)):
        return [(rows, True)]  # inputs and loss agree: nothing else may be tried
    whole = extents[0]
    ordered = [(size, True) for size in sorted({size for size in leading if fits(size)}, reverse=True)]
    later = {size for size in second if size > 0 and whole % size == 0}
    ordered += [(size, False) for size in sorted(later, reverse=True)]
    ordered += [(1, True)] * any(source.unbatched for source in sources)
    if not ordered:
        raise _disagreement(extents, shapes)
    return ordered


def _disagreement(extents: list[int], shapes: list[torch.Size]) -> PackpropError:
    return PackpropError(
        "Quantities of single samples were asked for.",
        f"the loss's input, whose leading axis has {', '.join(map(str, sorted(set(extents))))} entries",
        f"the inputs of the model have shapes {', '.join(str(list(shape)) for shape in shapes)}: no number of "
        "samples fits the leading axes of both",
        "put the samples on the leading axis of the model's inputs and of the loss's input",
    )


def _probe(
    graph: Graph, sources: Sequence[_Source], chosen: Sequence[Layout], samples: int
) -> tuple[list[list[Layout]] | None, Found | None, bool]:
    """Layouts of all uses under one choice at the sources; or the first use, from the loss, that mixes.

    Also whether something came back at every use: zeros tell nothing, as behind a head of zeros.
    """
    if samples == 1:
        return [[Layout(None, 1)] * len(f.use.shapes) for f in graph.found], None, True
    fitting = {
        f: [[way for way in layouts(shape, samples) if _admitted(f, way)] for shape in f.use.shapes]
        for f in graph.found
    }
    generator = torch.Generator().manual_seed(samples)
    noise = [torch.randn(source.shape, generator=generator) for source in sources]
    powers = _powers(samples, min(torch.finfo(source.dtype).max for source in sources), generator)
    sizes: list[dict[tuple[Found, int, Layout], Tensor]] = []
    for exponents in (powers, -powers):
        seen: dict[tuple[Found, int, Layout], Tensor] = {}
        sizes.append(seen)

        def visit(
            found: Found,
            signals: list[Tensor | None],
            seen: dict[tuple[Found, int, Layout], Tensor] = seen,
            exponents: Tensor = exponents,
        ) -> None:
            for index, signal in enumerate(signals):
                if signal is None:
                    continue
                for way in fitting[found][index]:
                    rows = way.to_front(signal, 1)[0].unsqueeze(-1)
                    rest, wide = tuple(range(1, rows.dim())), accumulation_dtype(rows.dtype)
                    sums = torch.linalg.vector_norm(rows, 1, rest, dtype=wide)  # copies nothing
                    seen[found, index, way] = sums.to("cpu", torch.float64) * torch.exp2(-exponents)

        seeds = []
        for source, way, random in zip(sources, chosen, noise, strict=True):
            factors = torch.exp2(exponents)[way.sample_of(exponents.device)]
            form = [-1 if axis == way.axis else 1 for axis in range(random.dim())]
            seeds.append((random * factors.view(form)).to(source.device, source.dtype))
        sweep([source.edge for source in sources], seeds, graph.found, visit, inputs=False)
    tolerance = max(torch.finfo(source.dtype).eps for source in sources) ** 0.5
    for (found, index, way), up in sizes[0].items():
        down = sizes[1].get((found, index, way), up)
        known = up.isfinite() & down.isfinite()
        if bool((known & ((up - down).abs() > tolerance * torch.maximum(up, down))).any()):
            fitting[found][index].remove(way)
    for found in graph.found:  # those nearest to the loss come first
        if not all(fitting[found]):
            return None, found, False
    heard = {found for (found, _, _), rows in sizes[0].items() if bool((rows > 0).any())}
    return [[ways[0] for ways in fitting[found]] for found in graph.found], None, len(heard) == len(graph.found)


def layouts_at(graph: Graph, places: Sequence[tuple[GradientEdge, torch.Size]]) -> list[Layout] | int:
    """Where tensors between the losses and the uses hold the samples.

    What is known already is not looked at again: inputs of losses, outputs of uses, and what comes out of an
    entrywise function of these. The rest is found by the same check as for uses.

    Args:
        graph: With its samples settled.
        places: Where the tensors came from, and their shapes.

    Returns:
        A layout for each; or the index of the first that holds them in no way that is seen.
    """
    known: dict[tuple[Node | None, int], tuple[torch.Size, Layout]] = {
        key: (f.use.shapes[index], f.layouts[index]) for f in graph.found for index, key in f.nodes.items()
    }
    for loss in graph.losses:
        known[loss.call.edge.node, loss.call.edge.output_nr] = loss.call.shape, loss.layout

    def settled(edge: GradientEdge, shape: torch.Size) -> Layout | None:
        key: tuple[Node | None, int] = edge.node, edge.output_nr
        if key not in known and name_of_node(edge.node) in ENTRYWISE:
            sources = [source for source in edge.node.next_functions if source[0] is not None]
            key = sources[0] if len(sources) == 1 else key
        there = known.get(key)
        return there[1] if there is not None and there[0] == shape else None

    own = [settled(edge, shape) for edge, shape in places]
    nowhere = Forward(lambda: None)
    found = {
        place: Found(Use("", [], [], [shape], nowhere), {0: (edge.node, edge.output_nr)}, first=True)
        for place, (edge, shape) in enumerate(places)
        if own[place] is None
    }
    if is_dry():  # as in ``_assumed``
        for place in found:
            usual = layouts(places[place][1], graph.samples)
            if not usual:
                return place
            own[place] = usual[0]
    elif found:
        unknown = replace(graph, found=list(found.values()))
        ways, failed, _ = _probe(unknown, _sources(graph), graph.fed, graph.samples)
        if ways is None:
            return next(place for place, f in found.items() if f is failed)
        for place, (way,) in zip(found, ways, strict=True):
            own[place] = way
    return [layout for layout in own if layout is not None]


def _admitted(found: Found, way: Layout) -> bool:
    return way.axis is None or all(site.entry.admits(way.axis) for site in found.sites)


def _powers(samples: int, largest: float, generator: torch.Generator) -> Tensor:
    """Exponents of two, as different as the range of the precision allows, in random order."""
    reach = 24 if largest > 1e30 else 4
    spread = torch.arange(samples, dtype=torch.float64) % (2 * reach + 1) - reach
    return spread[torch.randperm(samples, generator=generator)]


def _mixed(graph: Graph, failed: Found) -> PackpropError:
    place = graph.found.index(failed)
    after = f" and {graph.label(graph.found[place - 1])}" if place else " and the loss"
    return PackpropError(
        "Quantities of single samples were asked for.",
        f"between {graph.label(failed)}{after}",
        "the samples are mixed there: the loss of one sample depends on the inputs of others, or no axis "
        f"of the output, of shape {list(failed.use.shapes[0])}, holds the samples",
        "keep the samples on one axis and independent of each other (no statistics over the batch), or set "
        "requires_grad=False on the parameters upstream",
    )


def _raise_empty(graph: Graph, sources: Sequence[_Source]) -> None:
    if sources:
        raise PackpropError(
            "Quantities of single samples were asked for.",
            f"the model's output, of shape {list(sources[0].shape)}",
            "it holds no samples: the batch is empty, or the model returned a scalar that no recorded loss "
            "made",
            "pass at least one sample; let a torch loss function, or an extended loss module, make the scalar",
        )
    raise PackpropError(
        "Quantities of single samples were asked for.",
        "the tensor that backward() was called on",
        "neither a recorded loss nor the output of an extended module lies between it and the parameters",
        "extend the loss module, or compute the loss inside `with packprop.record():`",
    )
