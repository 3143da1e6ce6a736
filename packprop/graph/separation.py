"""Where the samples are: known from the graph, not guessed from shapes.

# NOTE [Separation]
A sample has a quantity of its own at a use if the cotangent in its rows comes from its own part of the loss
alone. That is what is checked, by the linearity of a backward pass: random numbers are fed in at the loss,
those of sample n multiplied by ``2^k`` with a power k of its own, then by ``2^-k``. If the samples are
separate, the rows of each come back multiplied by just that, exactly so in floating point; what leaks from
one sample into another comes back with the wrong power, and amplified in one of the two sweeps. Of all the
ways in which an output's shape can hold N samples the first that passes is taken; where none does, the
samples are mixed between the use and the loss. The check costs two sweeps; its verdict is kept for passes of
the same structure and shapes, unless nothing came back at a use, or data decide on the order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.functions.losses.description import describe
from packprop.functions.losses.rules import number_of_samples
from packprop.functions.nodes import ENTRYWISE, name_of_node
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.sweep import sweep
from packprop.recording.marks import ForwardCall, RecordedUse
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout, possible_layouts
from packprop.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class ModelOutput:
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


def model_outputs(graph: Graph) -> list[ModelOutput]:
    """Where samples can be fed in: at the inputs of the losses, or without these at outputs of the model."""
    if graph.losses:
        found = []
        for loss in graph.losses:
            call = loss.call
            given = call.input
            axis = describe(call.function, call.args, call.kwargs).class_axis
            count = number_of_samples(call.function, call.args, call.kwargs)
            found.append(ModelOutput(call.edge, given.shape, count, axis, given.dtype, given.device))
        return found
    leaf = graph.leaves()[0]
    return [
        ModelOutput(edge, shape, shape[0] if shape else 0, None, leaf.dtype, leaf.device)
        for edge, forward, shape in graph.outputs
        if forward.has_parameters
    ]


def probe(
    graph: Graph, sources: Sequence[ModelOutput], chosen: Sequence[Layout], samples: int
) -> tuple[list[list[Layout]] | None, ReachedUse | None, bool]:
    """Layouts of all uses under one choice at the sources; or the first use, from the loss, that mixes.

    Also whether something came back at every use: zeros tell nothing, as behind a head of zeros.
    """
    if samples == 1:
        return [[Layout(None, 1)] * len(f.recorded.shapes) for f in graph.uses], None, True
    fitting = {
        f: [
            [layout for layout in possible_layouts(shape, samples) if is_admitted(f, layout)]
            for shape in f.recorded.shapes
        ]
        for f in graph.uses
    }
    generator = torch.Generator().manual_seed(samples)
    noise = [torch.randn(source.shape, generator=generator) for source in sources]
    powers = _powers(samples, min(torch.finfo(source.dtype).max for source in sources), generator)
    sizes: list[dict[tuple[ReachedUse, int, Layout], Tensor]] = []
    for exponents in (powers, -powers):
        seen: dict[tuple[ReachedUse, int, Layout], Tensor] = {}
        sizes.append(seen)

        def visit(
            found: ReachedUse,
            cotangents: list[Tensor | None],
            seen: dict[tuple[ReachedUse, int, Layout], Tensor] = seen,
            exponents: Tensor = exponents,
        ) -> None:
            for index, cotangent in enumerate(cotangents):
                if cotangent is None:
                    continue
                for layout in fitting[found][index]:
                    rows = layout.to_front(cotangent, 1)[0].unsqueeze(-1)
                    rest, wide = tuple(range(1, rows.dim())), accumulation_dtype(rows.dtype)
                    sums = torch.linalg.vector_norm(rows, 1, rest, dtype=wide)  # copies nothing
                    seen[found, index, layout] = sums.to("cpu", torch.float64) * torch.exp2(-exponents)

        seeds = []
        for source, layout, random in zip(sources, chosen, noise, strict=True):
            factors = torch.exp2(exponents)[layout.sample_of(exponents.device)]
            form = [-1 if axis == layout.axis else 1 for axis in range(random.dim())]
            seeds.append((random * factors.view(form)).to(source.device, source.dtype))
        sweep([source.edge for source in sources], seeds, graph.uses, visit, inputs=False)
    tolerance = max(torch.finfo(source.dtype).eps for source in sources) ** 0.5
    for (found, index, layout), up in sizes[0].items():
        down = sizes[1].get((found, index, layout), up)
        known = up.isfinite() & down.isfinite()
        if bool((known & ((up - down).abs() > tolerance * torch.maximum(up, down))).any()):
            fitting[found][index].remove(layout)
    for found in graph.uses:  # those nearest to the loss come first
        if not all(fitting[found]):
            return None, found, False
    heard = {found for (found, _, _), rows in sizes[0].items() if bool((rows > 0).any())}
    return (
        [[layouts[0] for layouts in fitting[found]] for found in graph.uses],
        None,
        len(heard) == len(graph.uses),
    )


def layouts_at(graph: Graph, places: Sequence[tuple[GradientEdge, torch.Size]]) -> list[Layout] | int:
    """Where tensors between the losses and the uses hold the samples.

    What is known already is not looked at again: inputs of losses, outputs of uses, and what comes out of an
    entrywise function of these. The rest is found by the same check as for uses.

    Args:
        graph: With its samples located.
        places: Where the tensors came from, and their shapes.

    Returns:
        A layout for each; or the index of the first that holds them in no way that is seen.
    """
    known: dict[tuple[Node | None, int], tuple[torch.Size, Layout]] = {
        key: (f.recorded.shapes[index], f.layouts[index]) for f in graph.uses for index, key in f.nodes.items()
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
    nowhere = ForwardCall(lambda: None)
    found = {
        place: ReachedUse(
            RecordedUse("", [], [], [shape], nowhere), {0: (edge.node, edge.output_nr)}, first=True
        )
        for place, (edge, shape) in enumerate(places)
        if own[place] is None
    }
    if is_dry_run():  # as in ``_assumed``
        for place in found:
            usual = possible_layouts(places[place][1], graph.samples)
            if not usual:
                return place
            own[place] = usual[0]
    elif found:
        unknown = replace(graph, uses=list(found.values()))
        layouts, failed, _ = probe(unknown, model_outputs(graph), graph.fed, graph.samples)
        if layouts is None:
            return next(place for place, f in found.items() if f is failed)
        for place, (layout,) in zip(found, layouts, strict=True):
            own[place] = layout
    return [layout for layout in own if layout is not None]


def is_admitted(found: ReachedUse, layout: Layout) -> bool:
    """Whether the entries of a use allow the samples to be there."""
    return layout.axis is None or all(site.entry.admits(layout.axis) for site in found.sites)


def _powers(samples: int, largest: float, generator: torch.Generator) -> Tensor:
    """Exponents of two, as different as the range of the precision allows, in random order."""
    reach = 24 if largest > 1e30 else 4
    spread = torch.arange(samples, dtype=torch.float64) % (2 * reach + 1) - reach
    return spread[torch.randperm(samples, generator=generator)]
