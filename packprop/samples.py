"""Where the samples are: known from the graph, not guessed from shapes.

# NOTE [Separation]
A sample has a quantity of its own at a use if, when only some samples are fed in at the loss, the signal at the
use vanishes in the rows of all others. That is what is checked: random numbers are fed in for about half of the
samples, and of all the ways in which an output's shape can hold N samples the first is taken under which the
other half stays exactly zero. Where none does, the samples are mixed between the use and the loss. The check
costs one sweep; its verdict is kept for passes of the same structure and shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from packprop.errors import PackpropError
from packprop.graph import Found, Graph
from packprop.losses import describe, number_of_samples
from packprop.sweep import sweep
from packprop.types import Layout, layouts


@dataclass(frozen=True)
class _Verdict:
    samples: int
    losses: list[Layout]
    uses: list[list[Layout]]


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


def settle(graph: Graph) -> None:
    """Find the number of samples and the layout of every use and loss.

    Raises:
        PackpropError: If the samples are mixed, or no number of samples fits both inputs and loss.
    """
    modules = graph.modules
    kept = _VERDICTS.setdefault(modules[0], {}) if modules else {}
    verdict = kept.get(graph.signature)
    if verdict is None:
        verdict = kept[graph.signature] = _find(graph)
    graph.samples = verdict.samples
    for loss, layout in zip(graph.losses, verdict.losses, strict=True):
        loss.layout = layout
    for found, where in zip(graph.found, verdict.uses, strict=True):
        found.layouts = where


def _sources(graph: Graph) -> list[_Source]:
    if graph.losses and not graph.unlosed:
        found = []
        for loss in graph.losses:
            call = loss.call
            given = call.input
            axis = describe(call.function, call.args, call.kwargs).class_axis
            count = number_of_samples(call.function, call.args, call.kwargs)
            found.append(
                _Source(call.edge, given.shape, count, axis, given.dtype, given.device)
            )
        return found
    leaf = graph.leaves()[0]
    return [
        _Source(edge, shape, shape[0] if shape else 0, None, leaf.dtype, leaf.device)
        for edge, _, shape in graph.outputs
    ]


def _find(graph: Graph) -> _Verdict:
    sources = _sources(graph)
    if not sources or any(source.samples == 0 for source in sources):
        _raise_empty(graph, sources)
    failed: Found | None = None
    for samples in _candidates(graph, [source.samples for source in sources]):
        ways = [
            [way for way in layouts(source.shape, samples) if way.axis is None or way.axis != source.class_axis]
            for source in sources
        ]
        for choice in range(max(map(len, ways), default=0)):
            chosen = [way[min(choice, len(way) - 1)] for way in ways if way]
            if len(chosen) < len(ways):
                break
            found, failure = _probe(graph, sources, chosen, samples)
            if found is not None:
                losses = chosen if graph.losses and not graph.unlosed else [Layout(None, 1)] * len(graph.losses)
                return _Verdict(samples, losses, found)
            failed = failed or failure
    assert failed is not None
    _raise_mixed(graph, failed)
    raise AssertionError


def _candidates(graph: Graph, extents: list[int]) -> list[int]:
    """Numbers of samples that fit both what went into the model and what went into the loss."""
    rows = extents[0]
    shapes = [shape for forward in graph.forwards for shape in forward.sizes if len(shape)]
    leading = [shape[0] for shape in shapes]
    inner = [size for shape in shapes for size in shape[1:]]
    fits: Callable[[int], bool] = lambda size: size > 0 and all(e % size == 0 for e in extents)
    ordered = [rows] * (rows in leading or not shapes)
    ordered += sorted({size for size in leading if fits(size)}, reverse=True)
    ordered += [rows] * (rows in inner or rows == 1)
    ordered = [size for size in dict.fromkeys(ordered) if fits(size)]
    if not ordered:
        raise PackpropError(
            "Quantities of single samples were asked for.",
            f"the loss's input, whose leading axis has {', '.join(map(str, sorted(set(extents))))} entries",
            f"the inputs of the model have shapes {', '.join(str(list(shape)) for shape in shapes)}: their "
            "leading axis is neither equal to the loss's nor a divisor of it",
            "put the samples on the leading axis of the model's inputs and of the loss's input",
        )
    return ordered


def _probe(
    graph: Graph, sources: Sequence[_Source], chosen: Sequence[Layout], samples: int
) -> tuple[list[list[Layout]] | None, Found | None]:
    """Layouts of all uses under one choice at the sources; or the first use, from the loss, that mixes."""
    settled: dict[Found, list[Layout]] = {}
    if samples == 1:
        return [[Layout(None, 1)] * len(f.use.shapes) for f in graph.found], None
    generator = torch.Generator().manual_seed(samples)
    fed = torch.rand(samples, generator=generator) < 0.5
    fed[0], fed[-1] = True, False
    failures: list[Found] = []

    def visit(found: Found, signals: list[Tensor | None]) -> None:
        where = []
        for signal, shape in zip(signals, found.use.shapes, strict=True):
            fitting = [way for way in layouts(shape, samples) if _separate(signal, way, fed)]
            if not fitting:
                failures.append(found)
                return
            where.append(fitting[0])
        settled[found] = where

    seeds = []
    for source, way in zip(sources, chosen, strict=True):
        noise = torch.randn(source.shape, generator=generator).to(source.device, source.dtype)
        mask = fed.to(source.device)[way.sample_of(source.device)]
        seeds.append(noise * mask.view([-1 if axis == way.axis else 1 for axis in range(noise.dim())]))
    sweep([source.edge for source in sources], seeds, graph.found, visit)
    if failures:
        position = {found: place for place, found in enumerate(graph.found)}
        return None, min(failures, key=position.__getitem__)
    everywhere = [
        settled.get(f) or [(layouts(shape, samples) or [Layout(0, samples)])[0] for shape in f.use.shapes]
        for f in graph.found
    ]
    return everywhere, None


def _separate(signal: Tensor | None, way: Layout, fed: Tensor) -> bool:
    """Whether the rows of samples that were not fed are zero."""
    if signal is None:
        return True
    rows = way.to_front(signal, 1)[:, ~fed.to(signal.device)]
    return bool((torch.nan_to_num(rows, nan=0.0) == 0).all())


def _raise_mixed(graph: Graph, failed: Found) -> None:
    place = graph.found.index(failed)
    after = f" and {graph.label(graph.found[place - 1])}" if place else " and the loss"
    raise PackpropError(
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
            "it holds no samples: the batch is empty, or the model returned a scalar that no recorded loss made",
            "pass at least one sample; let a torch loss function, or an extended loss module, make the scalar",
        )
    raise PackpropError(
        "Quantities of single samples were asked for.",
        "the tensor that backward() was called on",
        "neither a recorded loss nor the output of an extended module lies between it and the parameters",
        "extend the loss module, or compute the loss inside `with packprop.record():`",
    )
