"""The place of the samples in every tensor of a pass: known from the graph, not guessed from shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakIdKeyDictionary

from packprop.engine.functions.nodes import name_of_node
from packprop.engine.functions.verdicts import Verdicts
from packprop.engine.graph.completeness import (
    MARK_THE_LOSS,
    UNKNOWN_LOSS,
    require_complete,
    require_data,
    require_separable,
)
from packprop.engine.graph.graph import WHOLE, Graph, ReachedUse
from packprop.engine.graph.kept_walk import KeptWalk, Outline, may_be_kept
from packprop.engine.graph.own_backward import require_linear_backward, require_no_nested_backward, starts_of
from packprop.engine.recording.marks import HANDLES
from packprop.engine.samples.documents import without_plan
from packprop.engine.samples.feeding import Feed, first_of, model_outputs
from packprop.engine.samples.hidden_mixing import Look, constants_of, dependence, find_hidden
from packprop.engine.samples.loss_mixing import require_separate_losses
from packprop.engine.samples.loss_rows import declaration, locate_rows, require_samples
from packprop.engine.samples.separation import admitted_layouts, places_at, separate
from packprop.engine.samples.tracing import PICKS
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.traced import is_traced, require_untraced
from packprop.errors import PackpropError

MANY = 256
"""The number of kinds of passes that packprop remembers for a module."""


FAULTS = 8
"""packprop keeps no further walk with a key after walks with this key have failed in this many passes."""


MANY_WALKS = 16
"""The number of walks that packprop keeps for a module."""


MANY_SAMPLES = 32
"""With at least this many samples, random halves are enough for other shapes of a known structure."""


@dataclass(frozen=True)
class _SampleLocations:
    """The places where the tensors of a pass hold the samples.

    Args:
        samples: The number of samples.
        sources: Layouts of the places that ``model_outputs`` returns.
        uses: Layouts of the outputs of each use.
        is_lasting: Whether the layouts hold for every later pass of the same structure.
    """

    samples: int
    sources: list[Layout]
    uses: list[list[Layout]]
    is_lasting: bool


@dataclass
class _Memory:
    """The findings of earlier passes, by their signatures.

    Args:
        locations: The locations of the samples, if they hold for all values.
        examined: Passes in which values hide no mixing, by signature and documents.
        looks: The schedules of looks at passes whose values or opaque functions keep the samples apart.
        structures: Structures of ``examined`` passes, whatever their shapes.
        separate_losses: Passes whose losses are sums over samples for all values.
    """

    locations: dict[int, _SampleLocations] = field(default_factory=dict)
    examined: Verdicts = field(default_factory=Verdicts)
    looks: dict[int, Look] = field(default_factory=dict)
    structures: set[int] = field(default_factory=set)
    separate_losses: set[int] = field(default_factory=set)


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The findings of passes, by the module that was called first; without a module, by the first leaf."""


def _memory_of(graph: Graph) -> _Memory:
    modules = graph.modules
    key = modules[0] if modules else graph.leaves()[0]
    memory = _KNOWN.get(key)
    if memory is None:
        memory = _KNOWN[key] = _Memory()
    return cast(_Memory, memory)


def check_graph(graph: Graph, of_samples: bool = True) -> None:
    """Locate the samples of a graph; refuse it if a use is unknown, or if samples are mixed.

    Args:
        graph: The graph of the pass, which gets the layouts of its uses and losses.
        of_samples: Whether quantities are made of single samples; else the batch counts as one sample.
    """
    if not graph.uses:
        require_complete(graph)
        why, instead = f"no use of a parameter is known: {UNKNOWN_LOSS}", MARK_THE_LOSS
        if not any(root.requires_grad for root in graph.roots):
            why = "it depends on no parameter that requires gradients"
            instead = "set requires_grad=True on the parameters to be differentiated"
        raise PackpropError(
            "A backward pass with extensions was started.",
            "the tensor that backward() was called on",
            why,
            instead,
        )
    if of_samples:
        require_separable(graph)
    require_complete(graph)
    if not (is_dry_run() or is_traced()):
        require_data(graph)
    if of_samples:
        if graph.leaves():
            _locate_samples(graph)
    else:
        graph.samples = 1
        for use in graph.uses:
            use.layouts = [WHOLE] * len(use.shapes)


class _Reread(Exception):
    """Raised if sweeps show that a use that was read off the graph is made of parameters alone."""


def _locate_samples(graph: Graph) -> None:
    """Find the number of samples and the layout of every use and loss."""
    memory = _memory_of(graph)
    locations = memory.locations.get(graph.signature) if graph.documents is None else None
    if locations is None:
        require_no_nested_backward("A quantity beyond the gradient was asked for.", starts_of(graph.roots))
        try:
            if is_dry_run():
                locations = _usual_locations(graph)
            else:
                require_untraced("where the samples are")
                with graph.hooks.quiet():
                    locations = _find_locations(graph, memory)
        except _Reread:
            assert graph.again is not None
            graph.__dict__.update(vars(graph.again()), asked=graph.asked)
            return check_graph(graph)
    graph.samples = locations.samples
    graph.source_layouts = locations.sources
    for loss, layout in zip(graph.losses, locations.sources, strict=False):  # inputs of losses come first
        loss.layout = layout
    for use, layouts in zip(graph.uses, locations.uses, strict=True):
        use.layouts = layouts
    lasts = locations.is_lasting and not graph.is_opaque  # opaque functions may differ in the next pass
    if lasts and graph.signature not in memory.locations and not is_order_of_data(graph):
        if len(memory.locations) == MANY:
            memory.locations.clear()
        memory.locations[graph.signature] = locations


def is_order_of_data(graph: Graph) -> bool:
    """Tell whether data may decide on the order of the samples, so that packprop locates them in each pass."""
    if graph.hides_order or graph.documents is not None:
        return True
    if not graph.reorderings or graph.samples == 1:
        return False
    with graph.hooks.quiet():
        places = places_at(graph, [edge for edge, _ in graph.reorderings])
    if isinstance(places, int):
        return True
    return any(place.layout.axis in axes for place, (_, axes) in zip(places, graph.reorderings, strict=True))


def require_terms(graph: Graph) -> None:
    """Refuse losses that are no sum of one term for each sample, in a graph whose samples have been located.

    Raises:
        PackpropError: If a loss mixes samples.
    """
    if graph.is_settled:
        return
    memory = _memory_of(graph)
    if graph.samples == 1 or is_dry_run() or graph.signature in memory.separate_losses:
        return
    require_untraced("whether the loss is a sum of one term for each sample")
    with graph.hooks.quiet():
        lasting = require_separate_losses(graph, model_outputs(graph), graph.source_layouts)
    graph.is_settled = True
    if lasting and graph.signature in memory.locations:  # data may also decide on the order of losses
        memory.separate_losses.add(graph.signature)


def kept_walk(outlined: Outline) -> KeptWalk | None:
    """Return the kept walk for graphs of an outline; ``None`` if there is none."""
    module = outlined.module
    handles = None if module is None else vars(module).get(HANDLES)
    return None if handles is None else handles.walks.get(outlined.key)


def keep_walk(graph: Graph, outlined: Outline) -> None:
    """Keep the walk through a graph if it holds for every later graph with this outline.

    Drop walks with parameters that the model no longer has.
    """
    module = outlined.module
    if module is None or not may_be_kept(graph, outlined):
        return
    memory, handles = _KNOWN.get(module), vars(module).get(HANDLES)
    if memory is None or handles is None or graph.signature not in memory.locations:
        return
    before = handles.walks.get(outlined.key)
    if before is not None and (not before.is_stale or before.faults >= FAULTS):
        return
    with contextlib.suppress(PackpropError):  # the Hessian of the whole loss does not require it
        require_terms(graph)
    if graph.signature not in memory.separate_losses:
        return
    own = set(map(id, module.parameters()))
    for key, walk in [*handles.walks.items()]:  # another thread may keep one meanwhile
        if not own.issuperset(map(id, walk.leaves)):
            handles.walks.pop(key, None)
    if len(handles.walks) >= MANY_WALKS:
        handles.walks.clear()
    if own.issuperset(map(id, outlined.leaves)):
        handles.walks[outlined.key] = KeptWalk(graph, outlined, 0 if before is None else before.faults)


def copy_sample_locations(copy: nn.Module, original: nn.Module) -> None:
    """Give the copy of a module the findings of passes through the original."""
    memory = _KNOWN.get(original)
    if memory is not None:
        _KNOWN[copy] = deepcopy(memory)


def _usual_locations(graph: Graph) -> _SampleLocations:
    """Return the usual locations of the samples, for a dry run, which has no numbers to feed in."""
    outputs = model_outputs(graph)
    require_samples(graph, outputs)
    graph.samples, (chosen, *_) = locate_rows(graph, outputs)
    samples, uses = graph.samples, []
    for use in graph.uses:
        layouts = [admitted_layouts(use, index, samples) for index in range(len(use.shapes))]
        if not all(layouts):
            _require_settled(graph, [use])
            if graph.hides_order or graph.reorderings:
                raise without_plan(graph.label(use))
            raise _mixed(graph, use)
        uses.append([layout[0] for layout in layouts])
    if samples > 1:  # for the memory of one of the sweeps that a real pass makes
        seeds = [torch.empty(output.shape, dtype=output.dtype, device=output.device) for output in outputs]
        Feed(outputs, chosen, graph.uses).sizes(seeds, {})
    return _SampleLocations(samples, chosen, uses, False)


def _find_locations(graph: Graph, memory: _Memory) -> _SampleLocations:
    """Find layouts that keep the samples apart, and whether they do so for all values."""
    outputs = model_outputs(graph)
    require_samples(graph, outputs)
    graph.samples, choices = locate_rows(graph, outputs)
    samples = graph.samples
    mixing: list[ReachedUse] = []
    look, documents = memory.looks.get(graph.signature), graph.documents
    for chosen in choices:
        feed = Feed(outputs, chosen, graph.uses)
        fitting, unfit, doubtful = separate(graph, feed, samples, look.passes if look else 0)
        if not unfit:
            break
        mixing += unfit
    if unfit:
        _require_settled(graph, mixing)
    suspect = next((use for use in graph.uses if use.suspect), None)
    if samples > 1 and suspect is not None and not unfit:
        raise _mixed(graph, suspect)
    in_order = not unfit and all(layout.rows is None for own in first_of(fitting) for layout in own)
    own = any(isinstance(node, BackwardCFunction) for use in graph.uses for node in use.anchors)
    if samples == 1 or not in_order or own:
        require_linear_backward(graph.asked, starts_of(graph.roots))
    if unfit:
        raise _mixed(graph, mixing[0])
    if samples == 1:
        return _SampleLocations(1, chosen, first_of(fitting), True)
    case = graph.signature if documents is None else hash((graph.signature, documents.numpy().tobytes()))
    if case in memory.examined or not (look is None or look.is_due(graph) or doubtful):
        return _SampleLocations(samples, chosen, first_of(fitting), False)
    every = samples < MANY_SAMPLES or documents is not None or graph.structure not in memory.structures
    fitting, on_values, for_all = dependence(feed, samples, fitting, every)
    hidden = find_hidden(graph, feed, samples, fitting) if on_values else None
    if hidden is not None:
        _require_settled(graph, [hidden[0]])
        memory.looks.pop(graph.signature, None)  # so that the next pass is also refused
        raise _mixed(graph, *hidden)
    if not (on_values or graph.is_opaque):
        memory.examined.note(case)
        memory.structures.add(graph.structure)
    elif look is None:
        if len(memory.looks) == MANY:
            memory.looks.clear()
        memory.looks[graph.signature] = Look(constants_of(graph))
    return _SampleLocations(samples, chosen, first_of(fitting), for_all and in_order)


def _require_settled(graph: Graph, uses: Sequence[ReachedUse]) -> None:
    """Raise ``_Reread`` if some undecided uses, behind which samples meet, are made of parameters alone."""
    found = [graph.reading.reclassify(use, graph.samples) for use in uses if use.undecided]
    if any(found):
        raise _Reread


def _mixed(graph: Graph, mixing: ReachedUse, hiding: Tensor | None = None) -> PackpropError:
    """Return the error for samples mixed below a use; ``hiding`` is the leaf whose present values hide it."""
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
    if graph.documents is not None:
        return PackpropError(
            graph.asked,
            where,
            "documents meet there: the loss of one depends on the inputs of another one, as with a mask that "
            "does not keep them apart, or in a layer that runs over all positions of a row; or no axes of the "
            f"output, of shape {list(mixing.shapes[0])}, hold them",
            "keep documents apart (a block-diagonal mask), or leave record(documents=...) out: then a row is "
            "a sample",
        )
    picked = any(name_of_node(loss.call.edge.node) in PICKS for loss in graph.losses)
    one_row = "if a loss takes one sample, `out[i]`, keep its axis: `out[i:i+1]`; " if picked else ""
    return PackpropError(
        graph.asked,
        where,
        f"the samples are mixed there: the loss of one of the {graph.samples} samples depends on the inputs of "
        f"others, or the output of shape {list(mixing.shapes[0])} has no axis of samples. Sample n is row n of "
        f"the loss's input{declaration(graph)}",
        f"{one_row}remove statistics over the batch. If the loss takes another axis first, call "
        "extend(model, sample_axis=1). If several rows of the loss belong to one sample, flatten [n, t, c] "
        "directly in front of the loss, or give the sample of each row, packprop.record(documents=...), as for "
        "the nodes of graphs. Or set requires_grad=False on the parameters before this place",
    )
