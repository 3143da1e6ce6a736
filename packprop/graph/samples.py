"""Where the samples are: known from the graph, not guessed from shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from packprop.errors import PackpropError
from packprop.graph.completeness import EXTEND_FIRST, UNSEEN, require_complete, require_separable
from packprop.graph.graph import WHOLE, Graph, ReachedUse
from packprop.graph.hidden_mixing import Dependence, dependence, find_hidden
from packprop.graph.loss_mixing import require_separate_losses
from packprop.graph.own_backward import require_linear_backward, starts_of
from packprop.graph.separation import ModelOutput, Separation, admitted_layouts, model_outputs, separate
from packprop.graph.sweep import ONE_COLUMN_WITHOUT_INPUTS, sweep
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout, possible_layouts


@dataclass(frozen=True)
class _SampleLocations:
    """Where the tensors of a pass hold the samples.

    Args:
        samples: Number of samples.
        sources: Layouts where samples are fed in: where ``model_outputs`` says.
        uses: Layouts at the outputs of each use.
        is_lasting: Whether they hold for every later pass of the same structure.
    """

    samples: int
    sources: list[Layout]
    uses: list[list[Layout]]
    is_lasting: bool


@dataclass
class _Memory:
    """What earlier passes have shown.

    Args:
        locations: Where the samples are, by the signature of the pass, where this holds for all values.
        examined: Signatures of passes that were looked at for mixing that values hide.
        structures: Structures that were looked at so, at some shapes, for any two samples.
        separate_losses: Signatures of passes whose losses are sums over samples for all values.
    """

    locations: dict[int, _SampleLocations] = field(default_factory=dict)
    examined: set[int] = field(default_factory=set)
    structures: set[int] = field(default_factory=set)
    separate_losses: set[int] = field(default_factory=set)


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What passes have shown, by the module that was called first; without a module, by the first leaf."""


def _memory_of(graph: Graph) -> _Memory:
    modules = graph.modules
    key = modules[0] if modules else graph.leaves()[0]
    memory = _KNOWN.get(key)
    if memory is None:
        memory = _KNOWN[key] = _Memory()
    return cast(_Memory, memory)


def check_graph(graph: Graph, of_samples: bool = True) -> None:
    """Check all that must hold before any work: every use was recorded, and the samples are separate.

    Args:
        graph: Gets its samples located.
        of_samples: Whether quantities of single samples are asked for; else the batch is taken as a whole.
    """
    if not graph.uses:
        require_complete(graph)
        raise PackpropError(
            "A backward pass with extensions was started.",
            "the tensor that backward() was called on",
            "its graph holds no recorded use of a parameter: the forward pass ran on a module that is not "
            f"extended, {UNSEEN}",
            EXTEND_FIRST,
        )
    if of_samples:
        require_separable(graph)
    require_complete(graph)
    if graph.leaves() and of_samples:
        locate_samples(graph)
    elif not of_samples:
        graph.samples = 1
        for use in graph.uses:
            use.layouts = [WHOLE] * len(use.recorded.shapes)


def locate_samples(graph: Graph) -> None:
    """Find the number of samples and the layout of every use and loss.

    Raises:
        PackpropError: If the samples are mixed, or no number of samples fits both inputs and loss.
    """
    memory = _memory_of(graph)
    locations = memory.locations.get(graph.signature)
    if locations is None and is_dry_run():
        locations = _usual_locations(graph)
        if locations.samples > 1:
            _sweep_once(graph)
    if locations is None:
        with graph.hooks.quiet():
            locations = _find_locations(graph, memory)
        if locations.is_lasting and not any(forward.reordered for forward in graph.forwards):
            memory.locations[graph.signature] = locations
    graph.samples = locations.samples
    graph.source_layouts = locations.sources
    for loss, layout in zip(graph.losses, locations.sources, strict=False):  # inputs of losses come first
        loss.layout = layout
    for use, layouts in zip(graph.uses, locations.uses, strict=True):
        use.layouts = layouts


def require_terms(graph: Graph) -> None:
    """Refuse losses that are no sum of one term for each sample; the graph's samples have been located.

    Raises:
        PackpropError: If a loss mixes samples.
    """
    memory = _memory_of(graph)
    if graph.samples == 1 or is_dry_run() or graph.signature in memory.separate_losses:
        return
    if require_separate_losses(graph, model_outputs(graph), graph.source_layouts):
        memory.separate_losses.add(graph.signature)


def copy_sample_locations(copy: nn.Module, original: nn.Module) -> None:
    """Take over for the copy of a module what passes through the original have shown."""
    memory = _KNOWN.get(original)
    if memory is not None:
        _KNOWN[copy] = deepcopy(memory)


def _usual_locations(graph: Graph) -> _SampleLocations:
    """Samples where they usually are: without data there is nothing to feed in."""
    outputs = model_outputs(graph)
    _require_samples(graph, outputs)
    samples, leading = next(iter(_sample_counts(graph, outputs)))
    chosen = [(_layouts_of(output, samples, leading) or [Layout(None, 1)])[0] for output in outputs]
    uses = []
    for use in graph.uses:
        layouts = [admitted_layouts(use, index, samples) for index in range(len(use.recorded.shapes))]
        if not all(layouts):
            raise _mixed(graph, use)
        uses.append([layout[0] for layout in layouts])
    return _SampleLocations(samples, chosen, uses, False)


def _sweep_once(graph: Graph) -> None:
    """Make one of the sweeps that locating the samples takes in a real pass, for its memory."""
    outputs = model_outputs(graph)
    seeds = [torch.empty(output.shape, dtype=output.dtype, device=output.device) for output in outputs]
    edges = [output.edge for output in outputs]
    sweep(edges, seeds, graph.uses, lambda *_: None, ONE_COLUMN_WITHOUT_INPUTS)


@dataclass(frozen=True)
class _Candidate:
    """A number of samples, and places at the model's outputs, that keep the samples of this pass apart.

    Args:
        chosen: Where the outputs hold the samples.
        found: What random numbers have shown.
        shown: What NaN has shown; ``None`` where it was not fed in.
    """

    samples: int
    chosen: list[Layout]
    found: Separation
    shown: Dependence | None

    def locations(self) -> _SampleLocations:
        """The places, as far as they are known."""
        fitting = self.found.fitting if self.shown is None else self.shown.fitting
        assert fitting is not None
        uses = [[layouts[0] for layouts in places] for places in fitting.values()]
        lasting = self.samples == 1 or (
            self.shown is not None
            and self.shown.is_conclusive
            and not self.shown.on_values
            and all(layout.rows is None for places in uses for layout in places)
        )
        return _SampleLocations(self.samples, self.chosen, uses, lasting)


def _find_locations(graph: Graph, memory: _Memory) -> _SampleLocations:
    """Try numbers of samples, and layouts at the model's outputs, until one keeps the samples apart.

    Where numbers that came back show nothing, as behind a head of zeros, one that keeps them apart for all
    values is looked for, too.
    """
    outputs = model_outputs(graph)
    _require_samples(graph, outputs)
    first: _Candidate | None = None
    mixing: ReachedUse | None = None
    examine = graph.signature not in memory.examined
    for samples, chosen in _choices(graph, outputs):
        if first is not None and samples == 1:
            break
        found = separate(graph, outputs, chosen, samples)
        if found.fitting is None:
            mixing = mixing or found.mixing
            continue
        shown = None
        if examine and samples > 1:
            every = graph.structure not in memory.structures
            shown = dependence(graph, outputs, chosen, found.fitting, every)
        candidate = _Candidate(samples, chosen, found, shown)
        if shown is None or not shown.on_values:
            first = candidate
            break
        first = first or candidate
        if first.found.is_conclusive:
            break
    if first is None or first.samples == 1:
        require_linear_backward(graph.asked, starts_of(graph.roots))
    if first is None:
        if mixing is not None:
            raise _mixed(graph, mixing)
        shapes = [shape for forward in graph.forwards for shape in forward.sizes]
        raise _disagreement(graph, [output.samples for output in outputs if output.decides], shapes)
    if first.shown is not None:
        if first.shown.on_values:
            hidden = find_hidden(graph, outputs, first.chosen, first.shown.fitting)
            if hidden is not None:
                raise _mixed(graph, *hidden)
        memory.examined.add(graph.signature)
        memory.structures.add(graph.structure)
    return first.locations()


def _choices(graph: Graph, outputs: Sequence[ModelOutput]) -> Iterator[tuple[int, list[Layout]]]:
    """Numbers of samples, and for each the layouts at the model's outputs that may be, the usual ones first."""
    for samples, leading in _sample_counts(graph, outputs):
        layouts = [_layouts_of(output, samples, leading) for output in outputs]
        if all(layouts):
            for choice in range(max(map(len, layouts), default=0)):
                yield samples, [layout[min(choice, len(layout) - 1)] for layout in layouts]


def _layouts_of(output: ModelOutput, samples: int, leading: bool) -> list[Layout]:
    """How the model's output may hold the samples.

    Where samples lead the model's inputs they lead its output: any other layout would take positions for
    samples. Where they come second in the inputs, they may be anywhere; parts before samples are tried first.
    """
    layouts = [
        layout
        for layout in possible_layouts(output.shape, samples)
        if layout.axis is None or layout.axis != output.loss.class_axis
    ]
    if not output.decides:
        return layouts
    known = output.loss.sample_axis
    if known is not None:
        return [layout for layout in layouts if layout.axis in (None, known) and layout.parts == 1]
    if leading:
        return [layout for layout in layouts if layout.axis is None or (layout.axis == 0 and layout.major)]
    return sorted(layouts, key=lambda layout: layout.axis == 0 and layout.parts > 1 and layout.major)


def _sample_counts(graph: Graph, outputs: Sequence[ModelOutput]) -> list[tuple[int, bool]]:
    """Numbers of samples that fit both what went into the model and what went into the loss.

    Each comes with whether it is the extent of a leading axis. One sample is a number that nothing can
    contradict, mixed as many may be: it is tried only for a batch of one by its axes, and where the loss takes
    one.
    """
    deciding = [output for output in outputs if output.decides]
    extents = [output.samples for output in deciding]
    rows = extents[0]
    if any(output.loss.sample_axis is not None for output in deciding) and len(set(extents)) == 1:
        return [(rows, False)]  # the loss knows
    calls = [forward for forward in graph.forwards if forward.has_parameters]  # a loss module has none
    shapes = [shape for forward in calls for shape in forward.sizes if len(shape)]
    leading_by_call = [[shape[0] for shape in forward.sizes if len(shape)] for forward in calls]
    leading = [size for sizes in leading_by_call for size in sizes]

    def fits(size: int) -> bool:
        """Whether it divides the rows of every loss, and rows of some input of every call."""
        return (
            size > 0
            and all(extent % size == 0 for extent in extents)
            and all(not sizes or any(own % size == 0 for own in sizes) for sizes in leading_by_call)
        )

    if not shapes or (rows in leading and fits(rows)):
        return [(rows, True)]  # inputs and loss agree: nothing else may be tried
    alone = all(sizes[0] == 1 for sizes in leading_by_call if sizes)  # a batch of one
    counts = [
        (size, True)
        for size in sorted({size for size in leading if fits(size)}, reverse=True)
        if size > 1 or alone
    ]
    second = {shape[1] for shape in shapes if len(shape) > 1}
    counts += [
        (size, False)
        for size in sorted(second, reverse=True)
        if size > 0 and rows % size == 0 and (size > 1 or rows == 1)
    ]
    counts += [(1, True)] * any(output.loss.one_sample for output in outputs)
    if not counts:
        raise _disagreement(graph, extents, shapes)
    return counts


def _disagreement(graph: Graph, extents: list[int], shapes: list[torch.Size]) -> PackpropError:
    return PackpropError(
        graph.asked,
        f"the loss's input, whose leading axis has {', '.join(map(str, sorted(set(extents))))} entries",
        f"the inputs of the model have shapes {', '.join(str(list(shape)) for shape in shapes)}: no number of "
        "samples fits the leading axes of both",
        "put the samples on the leading axis of the model's inputs and of the loss's input",
    )


def _mixed(graph: Graph, mixing: ReachedUse, hiding: Tensor | None = None) -> PackpropError:
    place = graph.uses.index(mixing)
    after = f" and {graph.label(graph.uses[place - 1])}" if place else " and the loss"
    where = f"between {graph.label(mixing)}{after}"
    if hiding is not None:
        name = graph.name(hiding)
        return PackpropError(
            graph.asked,
            where,
            f"the samples are mixed there, and only the present values of {name!r} hide it: the loss of one "
            f"sample depends on the inputs of others as soon as {name!r} changes",
            "keep the samples independent of each other, or set requires_grad=False on that parameter",
        )
    return PackpropError(
        graph.asked,
        where,
        "the samples are mixed there: the loss of one sample depends on the inputs of others, or no axis "
        f"of the output, of shape {list(mixing.recorded.shapes[0])}, holds the samples",
        "keep the samples on one axis and independent of each other (no statistics over the batch), or set "
        "requires_grad=False on the parameters upstream",
    )


def _require_samples(graph: Graph, outputs: Sequence[ModelOutput]) -> None:
    if not outputs:
        raise PackpropError(
            graph.asked,
            "the tensor that backward() was called on",
            "neither a recorded loss nor the output of an extended module lies between it and the parameters",
            "extend the loss module, or compute the loss inside `with packprop.record():`",
        )
    if any(output.samples == 0 for output in outputs):
        raise PackpropError(
            graph.asked,
            f"the model's output, of shape {list(outputs[0].shape)}",
            "it holds no samples: the batch is empty, or the model returned a scalar that no loss made which "
            "packprop has a rule for",
            "pass at least one sample; let the model return what the scalar is computed from, and compute the "
            "loss outside of it; or give the loss function that it calls a rule by packprop.register_loss",
        )
