"""How the inputs and outputs of a pass may be read: numbers of samples, and the axes that may hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from packprop.errors import PackpropError
from packprop.graph.documents import layouts_of_documents
from packprop.graph.evidence import Reading
from packprop.graph.graph import Graph
from packprop.graph.separation import ModelOutput
from packprop.tensors.layout import Layout, layout_of_rows, possible_layouts


def choices(graph: Graph, outputs: Sequence[ModelOutput]) -> Iterator[tuple[Reading, list[Layout]]]:
    """Readings, and for each the layouts at the model's outputs that may be, the usual ones first."""
    for reading in readings(graph, outputs):
        if reading.in_turn:
            yield from ((reading, layouts) for layouts in layouts_in_turn(outputs, reading.samples))
            continue
        if reading.documents:
            yield reading, layouts_of_documents(graph, outputs)
            continue
        for usual in (True, False):
            layouts = [layouts_of(output, reading, usual) for output in outputs]
            if all(layouts):
                own = reading._replace(usual=reading.usual and usual)
                for choice in range(max(map(len, layouts), default=0)):
                    yield own, [layout[min(choice, len(layout) - 1)] for layout in layouts]


def layouts_of(output: ModelOutput, reading: Reading, usual: bool = True) -> list[Layout]:
    """How the model's output may hold the samples.

    Where samples lead the model's inputs they usually lead its output: another layout may take positions for
    samples. Where they come second in the inputs, they may be anywhere; parts before samples are tried first.

    Args:
        output: The output.
        reading: How the inputs are read.
        usual: Whether the usual ones are asked for, or the others.
    """
    layouts = [
        layout
        for layout in possible_layouts(output.shape, reading.samples)
        if layout.axis is None or layout.axis != output.loss.class_axis
    ]
    if not output.decides:
        return layouts
    known = output.loss.sample_axis
    if known is not None:
        return [layout for layout in layouts if layout.axis in (None, known) and layout.parts == 1] * usual
    if reading.axis == 0:
        return [layout for layout in layouts if (layout.axis in (None, 0) and layout.major) == usual]
    if not usual:
        return []
    ordered = sorted(layouts, key=lambda layout: layout.axis == 0 and layout.parts > 1 and layout.major)
    if reading.axis is None:  # in a dry run, the first is taken
        ordered.sort(key=lambda layout: layout.parts > 1)
    return ordered


def layouts_in_turn(outputs: Sequence[ModelOutput], samples: int) -> Iterator[list[Layout]]:
    """Layouts of losses that take the rows of all samples in chunks, in the order of the graph or against it.

    A head that is taken in chunks of flattened tokens is such: a chunk has some tokens of one sample, or of
    several, and of others none. So are losses of single rows, each with or without an axis of samples.
    """
    rows = sum(output.samples for output in outputs)
    owners = torch.arange(samples).repeat_interleave(rows // samples)
    for order in (outputs, outputs[::-1]):
        chunks = zip(order, owners.split([output.samples for output in order]), strict=True)
        layouts = [
            layout_of_rows(0, chunk.repeat(output.shape[0] // max(1, output.samples)), samples)
            for output, chunk in chunks
        ]
        yield layouts if order is outputs else layouts[::-1]


def may_be_in_turn(outputs: Sequence[ModelOutput], samples: int) -> bool:
    """Whether so many samples may be taken one after the other by several losses."""
    return (
        samples > 1
        and len(outputs) > 1
        and all(output.decides and len(output.shape) > 0 for output in outputs)
        and not any(output.loss.sample_axis is not None for output in outputs)
        and sum(output.samples for output in outputs) % samples == 0
    )


def readings(graph: Graph, outputs: Sequence[ModelOutput]) -> list[Reading]:
    """Numbers of samples that fit both what went into the model and what went into the loss.

    One sample is a number that nothing can contradict, mixed as many may be: it is tried only for a batch of
    one by its axes, and where the only loss takes one.

    Raises:
        PackpropError: If there is none, or none that fits what was declared.
    """
    if graph.documents is not None:
        return [Reading(layouts_of_documents(graph, outputs)[0].samples, None, documents=True)]
    deciding = [output for output in outputs if output.decides]
    extents = [output.samples for output in deciding]
    if declared := _declared_samples(graph, outputs):
        return declared
    rows = extents[0]
    if any(output.loss.sample_axis is not None for output in deciding) and len(set(extents)) == 1:
        return [Reading(rows, 1), Reading(rows, 0)]  # the loss knows, but not on which axis they came
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

    every = [set(sizes) for sizes in leading_by_call if sizes]
    of_all = sorted(set.intersection(*every) if every else (), reverse=True)
    in_turn = [Reading(size, 0, in_turn=True) for size in of_all if may_be_in_turn(outputs, size)]
    second = sorted({shape[1] for shape in shapes if len(shape) > 1 and shape[1] > 0}, reverse=True)
    if of_all == [1]:  # of a batch of one, or of one step: it has to be asked which
        in_turn += [Reading(size, 1, in_turn=True) for size in second if may_be_in_turn(outputs, size)]
    if not shapes or (rows in leading and fits(rows)):  # inputs and loss agree: all else has to be shown
        others = [Reading(size, 1, usual=False) for size in second if size > 1]
        return [Reading(rows, 0), *others, *in_turn]
    alone = all(sizes[0] == 1 for sizes in leading_by_call if sizes)  # a batch of one
    found = [
        Reading(size, 0)
        for size in sorted({size for size in leading if fits(size)}, reverse=True)
        if size > 1 or alone
    ]
    one = rows == 1 and _keep_one(graph)
    found += [Reading(size, 1) for size in second if rows % size == 0 and (size > 1 or one)]
    if all(any(own % rows == 0 for own in sizes) for sizes in leading_by_call if sizes) and rows > 1:
        found.append(Reading(rows, 0))  # parts of samples are folded into the leading axis of the inputs
    found += in_turn
    found += [Reading(1, 0)] * (len(deciding) == 1 and deciding[0].loss.one_sample)
    if not found:
        raise disagreement(graph, outputs)
    return found


def _keep_one(graph: Graph) -> bool:
    """Whether some function has an axis of one entry that may be a batch of one: no features, no channels."""
    shapes = [shape for use in graph.uses for shape in use.recorded.shapes if len(shape)]
    return any(shape[0] == 1 or (len(shape) > 2 and shape[1] == 1) for shape in shapes)


def _declared_samples(graph: Graph, outputs: Sequence[ModelOutput]) -> list[Reading]:
    """Readings with as many samples as the axes hold that were declared; none if none were."""
    declared = [
        (size[axis], size, forward)
        for forward in graph.forwards
        for size, axis in zip(forward.sizes, forward.axes, strict=False)
        if axis is not None
    ]
    if not declared:
        return []
    numbers = sorted({number for number, _, _ in declared})
    said = declaration(graph)
    if len(numbers) > 1:
        found = " and ".join(f"{number} in {list(size)}" for number, size, _ in _by_number(declared))
        raise PackpropError(
            graph.asked,
            f"the inputs of the model, for which {said} was declared",
            f"they hold different numbers of samples there: {found}",
            "declare axes of as many samples, by the names of the arguments where they differ, None for those "
            "without samples",
        )
    in_turn = [Reading(numbers[0], None, in_turn=True)] * may_be_in_turn(outputs, numbers[0])
    for output in outputs:
        if numbers[0] == 0 or not layouts_of(output, Reading(numbers[0], None)):
            if in_turn:
                return in_turn
            raise PackpropError(
                graph.asked,
                f"the model's output, of shape {list(output.shape)}, for which {said} was declared",
                f"the inputs hold {numbers[0]} samples there, and no axis of this output has as many entries, "
                "or a multiple",
                "declare the axis of the inputs that holds the samples, and keep them on an axis of the output",
            )
    return [Reading(numbers[0], None), *in_turn]


def _by_number(declared: Sequence[tuple[int, torch.Size, object]]) -> list[tuple[int, torch.Size, object]]:
    return list({number: each for each in declared for number in each[:1]}.values())


def declaration(graph: Graph) -> str:
    """What was declared, as users wrote it; empty if nothing was."""
    said = [repr(forward.declared) for forward in graph.forwards if forward.declared is not None]
    return f"sample_axis={said[0]}" if said else ""


def disagreement(graph: Graph, outputs: Sequence[ModelOutput]) -> PackpropError:
    """No number of samples fits both the inputs and the loss."""
    extents = sorted({output.samples for output in outputs if output.decides})
    shapes = [shape for forward in graph.forwards for shape in forward.sizes]
    if any(output.loss.one_sample for output in outputs):
        return PackpropError(
            graph.asked,
            f"{len(outputs)} losses, of which some take one row without an axis of samples",
            f"the inputs of the model have shapes {', '.join(str(list(shape)) for shape in shapes)}: the "
            "losses are not those of each row of these in turn, in order and from that row alone",
            "give one loss all rows: F.cross_entropy(model(x), y); or, if the inputs are one sample without an "
            "axis of samples, give them one of one entry: model(x[None])",
        )
    return PackpropError(
        graph.asked,
        f"the loss's input, whose leading axis has {', '.join(map(str, extents))} entries",
        f"the inputs of the model have shapes {', '.join(str(list(shape)) for shape in shapes)}: no number of "
        "samples fits the leading axes of both",
        "put the samples on the leading axis of the model's inputs and of the loss's input, or say on which "
        "axis they are: extend(model, sample_axis=...)",
    )
