"""Readings of a pass that nothing tells apart: one of them has to be declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from packprop.errors import PackpropError
from packprop.graph.evidence import Reading, Verdict, judge
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.readings import choices
from packprop.graph.separation import Fitting, ModelOutput, noise_at, separate
from packprop.graph.sweep import ONE_COLUMN_WITHOUT_INPUTS, sweep
from packprop.tensors.layout import Layout


def require_the_only_reading(
    graph: Graph, outputs: Sequence[ModelOutput], verdict: Verdict, reading: Reading
) -> None:
    """Refuse a reading that is not the usual one if another axis is as good.

    So where inputs are mixed along the samples' axis before any parameter. What is made of inputs alone is a
    constant, however it mixes them; but it may as well mix positions.

    Args:
        graph: What the pass goes through.
        outputs: The model's outputs.
        verdict: What changed inputs have shown of the reading.
        reading: The reading.
    """
    mixed = verdict.mixed
    if reading.axis is None or any(output.loss.sample_axis is not None for output in outputs):
        return  # it was declared, or the loss knows
    if mixed is not None and _keeps_a_batch_of_one(graph, mixed):
        raise _either_axis(graph, mixed, reading.axis, 1 - reading.axis)
    for other, chosen in choices(graph, outputs):
        if other.axis == reading.axis or other.samples == 1:
            continue
        found = separate(graph, outputs, chosen, other.samples)
        if found.fitting is not None:
            others = judge(graph, found.fitting, other)
            is_as_good = others.is_shown or (mixed is None and not verdict.is_shown and others.is_explained)
        else:  # a loop over samples and one over steps look alike
            is_as_good = _is_explained(graph, outputs, chosen, other)
        if is_as_good:
            assert other.axis is not None  # both were declared, or none
            raise _either_axis(graph, mixed, reading.axis, other.axis)


def may_be_rows(outputs: Sequence[ModelOutput], reading: Reading) -> bool:
    """Whether axis 1 is read as the samples, or as positions of one sample that a loss has as its rows."""
    several = any(output.decides and (output.samples > 1 or output.loss.one_sample) for output in outputs)
    return reading.axis == 1 or (reading.samples == 1 and several)


def _keeps_a_batch_of_one(graph: Graph, mixed: ReachedUse) -> bool:
    """Whether axis 1 has one entry, in the model's inputs and behind a use whose inputs are mixed along axis 0.

    One sample contradicts nothing that can be seen, so that only shapes speak for it: a channel of images,
    which may be alone as well, is gone behind a convolution. The last axis holds features.
    """
    sizes = [size for forward in graph.forwards if forward.has_parameters for size in forward.sizes]
    behind = mixed.recorded.shapes
    return all(size[1] == 1 for size in sizes if len(size) > 1) and all(
        len(shape) > 2 and shape[1] == 1 for shape in behind
    )


def _either_axis(graph: Graph, mixed: ReachedUse | None, axis: int, other: int) -> PackpropError:
    one, two = sorted((axis, other))
    if mixed is not None:
        where = f"the inputs of {graph.label(mixed)}"
        why = (
            f"they are mixed along axis {axis} of the model's inputs before any parameter comes in, and not "
            f"along axis {other}: either may hold the samples"
        )
    else:
        where = "the inputs of the model and of the loss"
        why = (
            "no position meets another one, and not all functions have the leading axis of the inputs: "
            f"axis {one} or axis {two} of the model's inputs may hold the samples"
        )
    instead = f"say which: extend(model, sample_axis={one}) or sample_axis={two}"
    return PackpropError(graph.asked, where, why, instead)


def is_explained_later(
    graph: Graph,
    outputs: Sequence[ModelOutput],
    reading: Reading,
    later: Iterable[tuple[Reading, list[Layout]]],
) -> bool:
    """Whether other places at the model's outputs explain all that was seen of a reading."""
    return any(_is_explained(graph, outputs, chosen, other) for other, chosen in later if other == reading)


def _is_explained(
    graph: Graph,
    outputs: Sequence[ModelOutput],
    chosen: Sequence[Layout],
    reading: Reading,
    in_parts: bool = True,
) -> bool:
    """Whether these places at the model's outputs keep the samples apart, and nothing seen contradicts it."""
    fitting = separate(graph, outputs, chosen, reading.samples, in_parts=in_parts).fitting
    return fitting is not None and judge(graph, fitting, reading).is_explained


def _each_holds_all(outputs: Sequence[ModelOutput], reading: Reading) -> bool:
    """Whether each loss has one row for each sample, as losses beside each other do."""
    return all(output.samples == reading.samples for output in outputs)


def require_the_only_order(
    graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout], reading: Reading, verdict: Verdict
) -> None:
    """Refuse to guess which rows of the outputs are the samples' where nothing was seen of the inputs.

    Positions that do not interact are kept apart as samples are, and as many of them look alike. The last of
    several axes holds features. An axis with one row for each sample is theirs, unless another one has as many.
    """
    if verdict.is_shown or reading.samples == 1 or reading.in_turn or reading.documents:
        return
    if any(output.loss.sample_axis is not None for output in outputs):
        return  # the loss knows
    others = [
        layouts
        for other, layouts in choices(graph, outputs)
        if other._replace(usual=True) == reading._replace(usual=True)
        and not any(_is_last(output, layout) for output, layout in zip(outputs, layouts, strict=True))
        and (max(layout.parts for layout in chosen) > 1 or all(layout.parts == 1 for layout in layouts))
    ]
    for layouts in (*others, *_in_other_orders(outputs, chosen)):
        if layouts != chosen and _is_explained(graph, outputs, layouts, reading, reading.axis is None):
            shapes = ", ".join(str(list(output.shape)) for output in outputs if output.decides)
            if reading.axis is None:
                instead = (
                    "call the first layers outside of reentrant checkpoints and of those with a context_fn, "
                    "and on the inputs themselves or what torch functions have made of them"
                )
            else:
                instead = (
                    f"say where they are in the model's inputs: extend(model, sample_axis={reading.axis}), or "
                    "another axis; it is then looked at where their rows go"
                )
            raise PackpropError(
                graph.asked,
                f"the inputs of the loss, of shape {shapes}",
                f"it is not clear which of their rows belong to which of {reading.samples} samples: no "
                "position meets another one, and it was not seen where the rows of the model's inputs go",
                instead,
            )


def _is_last(output: ModelOutput, layout: Layout) -> bool:
    return len(output.shape) > 1 and layout.axis == len(output.shape) - 1


def require_not_in_turn(
    graph: Graph, outputs: Sequence[ModelOutput], reading: Reading, fitting: Fitting
) -> None:
    """Refuse positions as samples where losses may take the samples themselves in turn.

    A model whose positions do not interact keeps both apart, in chunks of samples and in chunks of time.
    """
    if reading.in_turn or reading.axis is None or reading.samples == 1 or len(outputs) == 1:
        return
    lead = all(layouts[0].axis in (0, None) for places in fitting.values() for layouts in places)
    for other, chosen in choices(graph, outputs):
        same = (other.samples, other.axis) == (reading.samples, reading.axis)
        if not other.in_turn or (same and (lead or _each_holds_all(outputs, reading))):
            continue
        found = separate(graph, outputs, chosen, other.samples)
        if found.fitting is not None and judge(graph, found.fitting, other).fitting is not None:
            raise PackpropError(
                graph.asked,
                "the inputs of the losses",
                f"they may hold {reading.samples} samples each, or some rows of {other.samples} samples that "
                "lead the model's inputs, one loss after the other: no position meets another one",
                "say which: extend(model, sample_axis=0) if samples lead the model's inputs, sample_axis=1 if "
                "they come second",
            )


def require_whole_batches(
    graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout], reading: Reading
) -> None:
    """Refuse to guess which rows belong together where several batches, or parts of one, meet in one pass.

    The numbers of rows divide each other, and nothing else says whether rows of a larger batch belong to one
    sample, and in which order, unless they meet in the model.
    """
    if reading.in_turn or reading.axis is None or any(o.loss.sample_axis is not None for o in outputs):
        return
    calls = [forward for forward in graph.forwards if forward.has_parameters and forward.data]
    leading = [[size[0] for size in forward.data if len(size)] for forward in calls]
    samples, rows = reading.samples, [output.samples for output in outputs if output.decides]
    is_uneven = any(sizes and samples not in sizes for sizes in leading) and reading.axis == 0
    if not is_uneven and (len(calls) < 2 or max(rows, default=0) == samples):
        return
    if samples == 1 and is_uneven:
        if len(calls) > 1:
            raise _several_batches(graph, leading)
        return
    largest = max((size for sizes in leading for size in sizes), default=0)
    if is_uneven and set(rows) == {samples} and _leaves_rows_out(graph, outputs, chosen, largest):
        raise PackpropError(
            graph.asked,
            f"the inputs of the loss, which have {samples} rows",
            f"they are {samples} of the {largest} rows of the model's inputs: nothing says which, and those "
            "left out have gradients of zero",
            "give all rows to the loss, and leave some out there: by ignore_index, by weights that are zero, "
            "or by reduction='none' and a mask",
        )
    others = [(samples, flipped) for flipped in _in_other_orders(outputs, chosen)]
    if len(set(rows)) == 1 and rows[0] > samples:
        others.append((rows[0], [Layout(0, rows[0]) for _ in outputs]))
    for number, layouts in others:
        if _is_explained(graph, outputs, layouts, reading._replace(samples=number)):
            raise _several_batches(graph, leading)


def _in_other_orders(outputs: Sequence[ModelOutput], chosen: Sequence[Layout]) -> Iterator[list[Layout]]:
    """The layouts with one of those that hold several rows of a sample in the other order."""
    for place, (output, layout) in enumerate(zip(outputs, chosen, strict=True)):
        if output.decides and layout.parts > 1 and layout.rows is None:
            yield [
                each._replace(major=not each.major) if number == place else each
                for number, each in enumerate(chosen)
            ]


def _leaves_rows_out(graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout], rows: int) -> bool:
    """Whether some of so many rows of a function's output do not lead to the loss."""
    seeds = noise_at(outputs)
    found: list[bool] = []

    def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        for cotangent in cotangents:
            if cotangent is not None and cotangent.dim() > 1 and cotangent.shape[1] == rows:
                reached = cotangent[0].flatten(1).abs().amax(1) > 0
                found.append(bool(reached.any()) and not bool(reached.all()))

    sweep([output.edge for output in outputs], seeds, graph.uses, visit, ONE_COLUMN_WITHOUT_INPUTS)
    return any(found)


def _several_batches(graph: Graph, leading: Sequence[Sequence[int]]) -> PackpropError:
    sizes = ", ".join(str(sizes[0]) for sizes in leading if sizes)
    return PackpropError(
        graph.asked,
        f"calls of the model, with batches of {sizes} rows",
        "nothing says which of these rows belong to one sample: no row meets another one",
        "give all rows to the model in one call, or take the loss of each batch in a pass of its own",
    )
