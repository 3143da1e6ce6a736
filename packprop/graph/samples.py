"""Where the samples are: known from the graph, not guessed from shapes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from packprop.errors import PackpropError
from packprop.graph.completeness import require_complete
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.separation import ModelOutput, is_admitted, model_outputs, probe
from packprop.graph.sweep import sweep
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout, possible_layouts


@dataclass(frozen=True)
class _Verdict:
    samples: int
    fed: list[Layout]
    uses: list[list[Layout]]
    lasting: bool
    """Whether a later pass of the same structure must come to the same verdict."""


_VERDICTS: weakref.WeakKeyDictionary[nn.Module, dict[int, _Verdict]] = weakref.WeakKeyDictionary()


def check_graph(graph: Graph) -> None:
    """Everything that must hold before any work: uses are there, all of them, and samples are separate."""
    if not graph.uses:
        raise PackpropError(
            "A backward pass with extensions was started.",
            "the tensor that backward() was called on",
            "its graph holds no recorded use of a parameter: the forward pass ran on a module that is not "
            "extended, under packprop.disable(), or before extend() was called",
            "call packprop.extend(model) first, then run the forward pass again, outside of disable()",
        )
    require_complete(graph)
    if graph.leaves():
        locate_samples(graph)


def locate_samples(graph: Graph) -> None:
    """Find the number of samples and the layout of every use and loss.

    Raises:
        PackpropError: If the samples are mixed, or no number of samples fits both inputs and loss.
    """
    modules = graph.modules
    kept = _VERDICTS.setdefault(modules[0], {}) if modules else {}
    verdict = kept.get(graph.signature)
    if verdict is None and is_dry_run():
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
    for found, where in zip(graph.uses, verdict.uses, strict=True):
        found.layouts = where


def copy_verdicts(copy: nn.Module, original: nn.Module) -> None:
    """What was found out of passes through a module holds for its copy."""
    _VERDICTS[copy] = dict(_VERDICTS.get(original, {}))


def _assumed(graph: Graph) -> _Verdict:
    """Where the samples are if they are where they usually are: nothing can be fed in without data."""
    sources = model_outputs(graph)
    if not sources or any(source.samples == 0 for source in sources):
        _raise_empty(graph, sources)
    samples, leading = next(iter(_sample_counts(graph, sources)))
    chosen = [(_layouts_of(source, samples, leading) or [Layout(None, 1)])[0] for source in sources]
    uses = []
    for found in graph.uses:
        layouts = [
            [layout for layout in possible_layouts(shape, samples) if is_admitted(found, layout)]
            for shape in found.recorded.shapes
        ]
        if not all(layouts):
            raise _mixed(graph, found)
        uses.append([layout[0] for layout in layouts])
    return _Verdict(samples, chosen if graph.losses else [], uses, False)


def _sweep_once(graph: Graph) -> None:
    """What finding the samples would take: one of its sweeps."""
    sources = model_outputs(graph)
    seeds = [torch.empty(source.shape, dtype=source.dtype, device=source.device) for source in sources]
    sweep([source.edge for source in sources], seeds, graph.uses, lambda *_: None, inputs=False)


def _find(graph: Graph) -> _Verdict:
    sources = model_outputs(graph)
    if not sources or any(source.samples == 0 for source in sources):
        _raise_empty(graph, sources)
    failed: ReachedUse | None = None
    for samples, leading in _sample_counts(graph, sources):
        layouts = [_layouts_of(source, samples, leading) for source in sources]
        for choice in range(max(map(len, layouts), default=0)):
            chosen = [layout[min(choice, len(layout) - 1)] for layout in layouts if layout]
            if len(chosen) < len(layouts):
                break
            found, failure, telling = probe(graph, sources, chosen, samples)
            if found is not None:
                return _Verdict(samples, chosen, found, telling)
            failed = failed or failure
    if failed is None:
        sizes = [shape for forward in graph.forwards for shape in forward.sizes]
        raise _disagreement([source.samples for source in sources], sizes)
    raise _mixed(graph, failed)


def _layouts_of(source: ModelOutput, samples: int, leading: bool) -> list[Layout]:
    """How the model's output may hold the samples.

    Where they lead the model's inputs they lead its output: any other way would take positions for samples.
    Where they come second in the inputs, they may be anywhere, parts before samples first.
    """
    layouts = [
        layout
        for layout in possible_layouts(source.shape, samples)
        if layout.axis is None or layout.axis != source.class_axis
    ]
    if leading:
        return [layout for layout in layouts if layout.axis is None or (layout.axis == 0 and layout.major)]
    return sorted(layouts, key=lambda layout: layout.axis == 0 and layout.parts > 1 and layout.major)


def _sample_counts(graph: Graph, sources: Sequence[ModelOutput]) -> list[tuple[int, bool]]:
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


def _mixed(graph: Graph, failed: ReachedUse) -> PackpropError:
    place = graph.uses.index(failed)
    after = f" and {graph.label(graph.uses[place - 1])}" if place else " and the loss"
    return PackpropError(
        "Quantities of single samples were asked for.",
        f"between {graph.label(failed)}{after}",
        "the samples are mixed there: the loss of one sample depends on the inputs of others, or no axis "
        f"of the output, of shape {list(failed.recorded.shapes[0])}, holds the samples",
        "keep the samples on one axis and independent of each other (no statistics over the batch), or set "
        "requires_grad=False on the parameters upstream",
    )


def _raise_empty(graph: Graph, sources: Sequence[ModelOutput]) -> None:
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
