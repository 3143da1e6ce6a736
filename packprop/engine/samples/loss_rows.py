"""The sample that each row of a loss's input belongs to.

# NOTE [Rows of a loss]
Sample n is row n of what a loss takes, along axis 0 or the declared ``sample_axis``, as in ``vmap``. A loss
over ``[n t, c]`` takes rows that were flattened: the graph holds the reshape, and the tensor in front of it has
the samples on that axis. So packprop follows the rows upstream, through functions that keep the leading axis,
to the nearest reshape that merged axes into it. It reads nothing else from the graph, with one exception:
several losses that take parts of one tensor (a head in chunks, a loop over rows) take the rows of that tensor.

The model's inputs say nothing here. packprop checks afterwards that the rows stay apart on their way through
the model; see NOTE [Separation].
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from packprop.engine.functions.losses import LOSSES
from packprop.engine.graph.graph import WHOLE, Graph
from packprop.engine.graph.search import nodes_above
from packprop.engine.samples.documents import layouts_of_documents
from packprop.engine.samples.feeding import ModelOutput
from packprop.engine.samples.tracing import Rows, followed
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout, layout_of_rows, possible_layouts
from packprop.errors import PackpropError


def require_samples(graph: Graph, outputs: Sequence[ModelOutput]) -> None:
    """Refuse a pass with no place to feed samples in, no axis of samples, or no sample in the batch."""
    if not outputs:
        raise PackpropError(
            graph.asked,
            "the tensor that backward() was called on",
            "neither a recorded loss nor the output of an extended module lies between it and the parameters",
            "let a loss function of torch make it, as an extended module or as a function inside "
            "`with packprop.record():`; or extend a module of your own, without parameters, that takes the "
            "model's output and the targets (two arguments, even if the targets are only zeros)",
        )
    for output in outputs:
        axis = output.loss.sample_axis or 0
        if not output.shape or output.loss.one_sample or output.shape[axis]:
            continue
        raise PackpropError(
            graph.asked,
            f"the model's output, of shape {list(output.shape)}",
            "the batch is empty",
            "leave the pass out (`if len(x):`), or ask without probes, plans and other ranks",
        )
    if not (graph.losses or graph.open or all(output.shape for output in outputs)):
        raise PackpropError(
            graph.asked,
            "the model's output, one number",
            "no loss function that packprop has a rule for made it, and a number has no axis for the samples",
            "let the model return what the number is computed from, and compute the loss outside of it; or "
            "let it call a loss function of torch; or a module without parameters that takes what the number "
            "is computed from and the targets, after packprop.extend(module)",
        )


def locate_rows(graph: Graph, outputs: Sequence[ModelOutput]) -> tuple[int, list[list[Layout]]]:
    """Return the number of samples, and choices of one layout for each output; see NOTE [Rows of a loss].

    There are several choices if no known loss takes some tensor: the sweeps tell which is right. The first is
    the one that a loss would use.

    Raises:
        PackpropError: If the outputs have different numbers of samples, or no axis that can hold them.
    """
    if graph.documents is not None:
        layouts = layouts_of_documents(graph, outputs)
        return layouts[0].samples, [layouts]
    axis = declared_axis(graph)
    found = _taken_in_turn(
        [_rows_of(graph, output, axis) if output.decides else None for output in outputs], axis
    )
    layouts_found = [
        _layout(graph, output, rows, axis) if output.decides else None
        for output, rows in zip(outputs, found, strict=True)
    ]
    numbers = {layout.samples for layout in layouts_found if layout is not None}
    if len(numbers) > 1:
        raise _disagreement(graph, outputs, layouts_found)
    samples = numbers.pop() if numbers else 1
    each: list[list[Layout]] = []
    for output, layout in zip(outputs, layouts_found, strict=True):
        if output.beside is not None:
            layout = _beside(graph, output, outputs[output.beside], layouts_found[output.beside], axis)
        each.append([layout] if layout is not None else _anywhere(graph, outputs, output, samples, axis))
    choices = range(max(map(len, each)))
    return samples, [[layouts[min(choice, len(layouts) - 1)] for layouts in each] for choice in choices]


def declared_axis(graph: Graph) -> int | None:
    """Return the declared ``sample_axis`` of a pass, or ``None``; refuse several different ones."""
    declared = [forward.declared for forward in graph.forwards] + [loss.call.declared for loss in graph.losses]
    said = sorted({each for each in declared if each is not None})
    if len(said) > 1:
        raise PackpropError(
            graph.asked,
            f"models with sample_axis={said[0]} and sample_axis={said[1]}",
            "one loss takes the outputs of both, and has one axis of samples",
            "declare the same axis for all of them: that of what the loss takes",
        )
    return said[0] if said else None


def declaration(graph: Graph) -> str:
    """Return the words that messages append for the declared axis; empty if none was declared."""
    said = declared_axis(graph)
    return "" if said is None else f", along sample_axis={said}"


def _rows_of(graph: Graph, output: ModelOutput, declared: int | None) -> Rows | None:
    """Return the place of the rows of a model's output; ``None`` if the loss knows its axis of samples.

    Raises:
        PackpropError: If the output is a sum of tensors whose rows belong to different samples.
    """
    if output.loss.sample_axis is not None:
        return None
    parameters = () if graph.reading is None else graph.reading.made_of_parameters
    is_row = output.loss.one_sample or not output.shape
    found = followed(output.edge, output.shape, is_row, parameters)
    if len(found) > 1:
        axes = [_axis_among(rows, output.shape, declared) for rows in found]
        if all(0 <= axis < len(rows.lead) for rows, axis in zip(found, axes, strict=True)):
            owners = {tuple(rows.owners(axis)) for rows, axis in zip(found, axes, strict=True)}
            if len(owners) > 1:
                raise PackpropError(
                    graph.asked,
                    f"what a loss takes, of shape {list(output.shape)}",
                    "it is made of several tensors whose rows were flattened differently, "
                    f"{' and '.join(dict.fromkeys(str(list(rows.lead)) for rows in found))}: nothing shows to "
                    "which sample a row belongs",
                    "flatten both from the same axes, or after the sum, (a + b).flatten(0, 1); or declare the "
                    "sample of each row: `with packprop.record(documents=...):` around the loss",
                )
    return found[0]


def _axis_among(rows: Rows, shape: torch.Size, declared: int | None) -> int:
    """Return the axis of samples among the axes that merged rows of a tensor run along."""
    axis = declared or 0
    return axis + len(rows.lead) + len(shape) - 1 if axis < 0 else axis


def _taken_in_turn(found: Sequence[Rows | None], declared: int | None) -> list[Rows | None]:
    """Return the rows of several losses; parts that they take of one tensor count as merged.

    A leading axis of which all losses take the same entry, as in a loop over rows of ``out[-1]``, is no axis of
    rows, unless a ``sample_axis`` was declared, which counts from there.
    """
    taken: dict[tuple[Node, int], set[tuple[int, ...]]] = defaultdict(set)
    for rows in found:
        if rows is not None and rows.whole is not None and rows.places is not None:
            taken[rows.whole].add(tuple(rows.places))
    each: list[Rows | None] = []
    for rows in found:
        parts = set() if rows is None or rows.whole is None else taken[rows.whole]
        if rows is not None and len(parts) > 1 and not rows.merged:
            while not declared and len(rows.lead) > 1 and rows.lead[0] > 1:
                inner = math.prod(rows.lead[1:])
                if len({place // inner for places in parts for place in places}) > 1:
                    break
                parts = {tuple(place % inner for place in places) for places in parts}
                rows = rows._replace(lead=rows.lead[1:], places=[place % inner for place in rows.places or ()])
            rows = rows._replace(merged=True)
        each.append(rows)
    return each


def _layout(graph: Graph, output: ModelOutput, rows: Rows | None, declared: int | None) -> Layout:
    """Return the layout of an output of the model, given the place of its rows."""
    shape, known = output.shape, output.loss.sample_axis
    if rows is None:  # the loss knows its axis
        return _along(known or 0, shape[known or 0])
    if not rows.merged:
        if output.loss.one_sample or not shape:
            return WHOLE
        axis = declared or 0
        axis = axis + len(shape) if axis < 0 else axis
        if not 0 <= axis < len(shape) or axis == output.loss.class_axis:
            raise _absent(graph, output, declared)
        return _along(axis, shape[axis])
    if not shape:
        raise PackpropError(
            graph.asked,
            "several losses, each of a single number",
            "numbers have no axis that holds the samples",
            "give each loss a row: F.mse_loss(out[n : n + 1], y[n : n + 1]), or one loss all rows",
        )
    axis = _axis_among(rows, shape, declared)
    if not 0 <= axis < len(rows.lead):
        raise _absent(graph, output, declared)
    samples = rows.lead[axis]
    if samples == 1:
        return WHOLE
    if rows.places is None and axis in (0, len(rows.lead) - 1):
        parts = math.prod(rows.lead) // samples if samples else 1
        return Layout(0, samples, parts, major=axis == 0 or parts == 1)
    owners = rows.owners(axis)
    parts = len(owners) // samples if samples else 1
    if owners == [n for n in range(samples) for _ in range(parts)]:
        return Layout(0, samples, parts)
    if owners == [*range(samples)] * parts:
        return Layout(0, samples, parts, major=False)
    if is_dry_run():
        raise PackpropError(
            "A plan was asked for.",
            "losses that take chunks of the samples in turn",
            "a plan is made without data, and only data tell which rows of a chunk belong to which sample",
            "let each chunk hold some positions of all samples (hidden.split(size, dim=1)), or leave the plan "
            "and memory=... out",
        )
    owners = owners * shape[0] if output.loss.one_sample else owners
    return layout_of_rows(0, torch.tensor(owners, device="cpu"), samples)


def _along(axis: int, samples: int) -> Layout:
    return WHOLE if samples == 1 else Layout(axis, samples)


def _anywhere(
    graph: Graph, outputs: Sequence[ModelOutput], output: ModelOutput, samples: int, declared: int | None
) -> list[Layout]:
    """Return layouts that a tensor that no loss takes may have; the one that a loss would use comes first.

    There are others only if the tensor shares uses with a loss: there the sweeps tell which layout is right.
    """
    uses = {node for use in graph.uses for node in use.anchors}
    uses &= {*nodes_above(each.edge.node for each in outputs if each.decides)}
    shares_uses = any(node in uses for node in nodes_above([output.edge.node]))
    layouts = possible_layouts(output.shape, samples) if shares_uses else []
    try:
        usual = _layout(graph, output, _rows_of(graph, output, declared), declared)
    except PackpropError:
        usual = None
    if usual is not None and usual.samples == samples:
        layouts.insert(0, usual)
    has_rows = any(each.shape and not each.loss.one_sample for each in outputs if each.decides)
    if usual is not None and usual.samples > 1 and not has_rows and graph.losses:  # of numbers, such as means
        found = [WHOLE if each.decides else None for each in outputs]
        raise _disagreement(graph, [*outputs, output], [*found, usual])
    if not layouts:
        raise PackpropError(
            graph.asked,
            f"a tensor of shape {list(output.shape)} that a term of the loss is made of",
            f"its rows are not the {samples} samples of the loss, and nothing shows whose they are",
            "let a recorded loss function make the term, and declare the sample of each row of both: "
            "`with packprop.record(documents=...):` around each of the two",
        )
    return layouts


def _beside(
    graph: Graph, output: ModelOutput, given: ModelOutput, layout: Layout | None, declared: int | None
) -> Layout:
    """Return the layout of another argument of a loss, which follows from the layout of the first argument.

    Functions of torch take the arguments entry by entry, and align the last axes; only a variance may lack the
    last one. Other losses take the samples as in the first argument, or without its positions.
    """
    assert layout is not None
    assert output.beside is not None
    if layout.axis is None:
        return layout
    function = graph.losses[output.beside].call.function
    is_variance = function is F.gaussian_nll_loss and output.shape == given.shape[:-1]
    lacking = len(given.shape) - len(output.shape) if function in LOSSES and not is_variance else 0
    here = layout if not lacking else layout._replace(axis=layout.axis - lacking)
    if (
        layout.axis >= lacking
        and output.shape[here.axis : here.behind] == given.shape[layout.axis : layout.behind]
    ):
        return here
    if function not in LOSSES:
        usual = _layout(graph, output, _rows_of(graph, output, declared), declared)
        if usual.samples == layout.samples:
            return usual
    name = getattr(function, "__name__", function)
    raise PackpropError(
        graph.asked,
        f"the loss {name}, which takes tensors of shapes {list(given.shape)} and {list(output.shape)} that "
        "depend on parameters",
        "sample n is row n of the first one, and the other one has no such rows",
        "give both the same axis of samples; or detach the other one",
    )


def _absent(graph: Graph, output: ModelOutput, declared: int | None) -> PackpropError:
    is_classes = declared is not None and declared % max(1, len(output.shape)) == output.loss.class_axis
    return PackpropError(
        graph.asked,
        f"what a loss takes, of shape {list(output.shape)}",
        f"sample_axis={declared or 0} is declared to hold the samples, "
        + ("and it is that of the classes" if is_classes else "and there is no such axis"),
        "leave sample_axis out if the loss takes the samples along axis 0, whatever the model's inputs have "
        "there; or declare the axis of what the loss takes",
    )


def _disagreement(
    graph: Graph, outputs: Sequence[ModelOutput], layouts: Sequence[Layout | None]
) -> PackpropError:
    pairs = zip(outputs, layouts, strict=True)
    said = [f"{layout.samples} in {list(output.shape)}" for output, layout in pairs if layout is not None]
    return PackpropError(
        graph.asked,
        f"{len(said)} losses, or outputs of the model",
        f"they take different numbers of samples: {', '.join(said)}. Sample n is row n of what each loss takes",
        "flatten positions in front of the loss, logits.flatten(0, 1), so that the graph shows whose they are; "
        "declare the axis of what the losses take (sample_axis=...), or the sample of each row, with a "
        "`with packprop.record(documents=...):` around each loss; or take each loss in a pass of its own",
    )
