"""Which sample each row of a loss's input belongs to.

# NOTE [Rows of a loss]
Sample n is row n of what a loss takes, along axis 0 or the declared ``sample_axis``, as ``vmap`` has it. A loss
over ``[n t, c]`` takes rows that were flattened: the graph holds the reshape, and the tensor in front of it has
the samples on that axis. So packprop follows the rows upstream, through functions that keep the leading axis,
to the nearest reshape that merged axes into it. It reads nothing else from the graph, with one exception:
several losses that take parts of one tensor (a head in chunks, a loop over rows) take the rows of that tensor.

The model's inputs say nothing here. Whether the rows stay apart on their way through the model is checked
afterwards, see NOTE [Separation].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import GradientEdge, Node

from packprop.errors import PackpropError
from packprop.functions.nodes import ENTRYWISE, RESHAPES, name_of_node, names_of_nodes
from packprop.graph.documents import layouts_of_documents
from packprop.graph.graph import WHOLE, Graph
from packprop.graph.separation import ModelOutput
from packprop.graph.traversal import made_by
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout, layout_of_rows, possible_layouts

SAME = ENTRYWISE | names_of_nodes(
    "Add Sub Rsub Mul Div ToCopy LogSoftmax Softmax NativeDropout NativeLayerNorm MaskedFill Where"
)
"""Functions whose output has the rows of an input of the same shape."""


ROWS_OF_MATRICES = {"Mm": 0, "Addmm": 1}
"""Products of matrices, with the place of the factor whose rows their output has."""


PICKS = names_of_nodes("Select Unbind")
"""Functions that take one entry along an axis."""


PARTS = names_of_nodes("Slice Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Index")
"""Functions that take some entries along an axis."""


Numbers = npt.NDArray[np.int64]
"""Whole numbers that hold data in a dry run, too."""


class Rows(NamedTuple):
    """Where the rows of a loss's input come from.

    Args:
        lead: Extents of the axes that the rows run along, in the tensor that they were followed to.
        places: The place of each row among these, flattened ``[k]``; ``None`` for all of them in order.
        merged: Whether a reshape merged the axes.
        whole: The tensor that parts were taken of, by node and number; ``None`` if none were.
    """

    lead: tuple[int, ...]
    places: Numbers | None = None
    merged: bool = False
    whole: tuple[Node, int] | None = None

    def owners(self, axis: int) -> Numbers:
        """The index of each row along one of the axes ``[k]``."""
        places = np.arange(math.prod(self.lead)) if self.places is None else self.places
        return places // math.prod(self.lead[axis + 1 :]) % self.lead[axis]


def locate_rows(graph: Graph, outputs: Sequence[ModelOutput]) -> tuple[int, list[list[Layout]]]:
    """The number of samples, and where the outputs of the model hold them; see NOTE [Rows of a loss].

    Returns:
        The number, and choices of one layout for each output. There are several where no loss is known to take
        a tensor: the sweeps tell which is right, and the first is where a loss would take the samples.

    Raises:
        PackpropError: If losses disagree, or the declared axis is not there.
    """
    if graph.documents is not None:
        layouts = layouts_of_documents(graph, outputs)
        return layouts[0].samples, [layouts]
    axis = declared_axis(graph)
    found = [
        _followed(output) if output.decides and output.loss.sample_axis is None else None for output in outputs
    ]
    wholes = Counter(rows.whole for rows in found if rows is not None and rows.whole is not None)
    layouts_found = [
        _layout(
            graph, output, rows, axis, rows is not None and rows.whole is not None and wholes[rows.whole] > 1
        )
        if output.decides
        else None
        for output, rows in zip(outputs, found, strict=True)
    ]
    numbers = {layout.samples for layout in layouts_found if layout is not None}
    if len(numbers) > 1:
        raise _disagreement(graph, outputs, layouts_found)
    samples = numbers.pop() if numbers else 1
    each = [
        _anywhere(graph, output, samples, axis) if layout is None else [layout]
        for output, layout in zip(outputs, layouts_found, strict=True)
    ]
    choices = range(max(map(len, each)))
    return samples, [[layouts[min(choice, len(layouts) - 1)] for layouts in each] for choice in choices]


def declared_axis(graph: Graph) -> int | None:
    """The ``sample_axis`` that was declared for the models of a pass.

    Raises:
        PackpropError: If several were.
    """
    said = sorted({forward.declared for forward in graph.forwards if forward.declared is not None})
    if len(said) > 1:
        raise PackpropError(
            graph.asked,
            f"models with sample_axis={said[0]} and sample_axis={said[1]}",
            "one loss takes what both made, and has one axis of samples",
            "declare one axis, that of what the loss takes: packprop.record(sample_axis=...)",
        )
    return said[0] if said else None


def declaration(graph: Graph) -> str:
    """The declaration as users wrote it; empty if there is none."""
    said = declared_axis(graph)
    return "" if said is None else f"sample_axis={said}"


def _followed(output: ModelOutput) -> Rows:
    """The rows of an output of the model, as far as the graph shows where they come from."""
    if output.loss.one_sample or not output.shape:
        return _picked(output)
    rows, edge, shape = Rows((output.shape[0],)), output.edge, output.shape
    while True:
        name = name_of_node(edge.node)
        above = _input_with_rows(edge.node, name, shape)
        if above is None:
            return rows
        before = _shape_of(above)
        if name in RESHAPES:
            further = _unflattened(rows, before, shape, keeps_axes=name in ("Squeeze", "Unsqueeze"))
        elif name in PARTS:
            further = _part(rows, edge, above, before, shape)
        elif name in PICKS:
            further = rows if _axis(edge.node, before) >= _axes_of(rows, shape) else None
        else:
            further = rows
        if further is None:
            return rows
        rows, edge, shape = further, above, before


def _picked(output: ModelOutput) -> Rows:
    """The row that a loss without an axis of samples takes: one entry of a tensor."""
    edge, picks = output.edge, []
    while name_of_node(edge.node) in PICKS:
        node, number = edge.node.next_functions[0]
        assert node is not None
        above = GradientEdge(node, number)
        axis = _axis(edge.node, _shape_of(above))
        picks.append((axis, _index(edge, _shape_of(above)[axis])))
        edge = above
    shape = _shape_of(edge)
    axes, index = list(range(len(shape))), {}
    for axis, place in reversed(picks):  # the first to be applied was met last
        index[axes.pop(axis)] = place
    lead = len(index)
    if not picks or sorted(index) != list(range(lead)):
        return Rows((1,))
    place = 0
    for axis in range(lead):
        place = place * shape[axis] + index[axis]
    return Rows(tuple(shape[:lead]), np.array([place]), whole=(edge.node, edge.output_nr))


def _input_with_rows(node: Node, name: str, shape: torch.Size) -> GradientEdge | None:
    """The input of a node whose rows its output has; ``None`` where that is not known."""
    inputs = [None if above is None else GradientEdge(above, number) for above, number in node.next_functions]
    if name in SAME:
        return next((each for each in inputs if each is not None and _shape_of(each) == shape), None)
    if name in ROWS_OF_MATRICES:
        factor = inputs[ROWS_OF_MATRICES[name]]
        return factor if len(shape) == 2 else None
    return inputs[0] if name in RESHAPES | PARTS | PICKS else None


def _unflattened(rows: Rows, before: torch.Size, shape: torch.Size, keeps_axes: bool) -> Rows | None:
    """The rows in front of a reshape; ``None`` where the leading axes are not whole there."""
    count = _axes_of(rows, shape)
    same = len(before) - (len(shape) - count)
    if same > 0 and before[same:] == shape[count:]:
        axes: int | None = same
    else:
        axes = _leading(before, math.prod(shape[:count]))
    if axes is None:
        return _cut(rows, before, shape)
    if rows.merged or keeps_axes or axes < 2 or axes <= count:
        return rows
    return rows._replace(lead=tuple(before[:axes]), merged=True)


def _cut(rows: Rows, before: torch.Size, shape: torch.Size) -> Rows | None:
    """The rows in front of a reshape that cut those of a matrix, ``[n, t c]`` to ``[n t, c]``."""
    if rows.merged or len(before) != 2 or not before[0] or shape[0] % before[0] or shape[0] <= before[0]:
        return None
    return rows._replace(lead=(before[0], shape[0] // before[0]), merged=True)


def _part(
    rows: Rows, edge: GradientEdge, above: GradientEdge, before: torch.Size, shape: torch.Size
) -> Rows | None:
    """The rows in the tensor that some entries along an axis were taken of."""
    node: Any = edge.node
    if name_of_node(node) == "Index":
        return _chosen(rows, node, above, before)
    axis, count = _axis(node, before), _axes_of(rows, shape)
    if axis >= count:
        return rows
    if len(rows.lead) != count or math.prod(before[:count]) == 0:
        return None
    taken = np.arange(before[axis])[_slice(edge, before[axis])]
    if len(taken) != rows.lead[axis]:
        return None
    lead = (*rows.lead[:axis], before[axis], *rows.lead[axis + 1 :])
    places = np.arange(math.prod(lead)).reshape(lead).take(taken, axis).flatten()
    places = places if rows.places is None else places[rows.places]
    return rows._replace(lead=lead, places=places, whole=(above.node, above.output_nr))


def _chosen(rows: Rows, node: Any, above: GradientEdge, before: torch.Size) -> Rows | None:
    """The rows in the tensor that an index or a mask of its leading axes took them of."""
    indices = [each for each in node._saved_indices if each is not None]
    if len(indices) != 1 or node._saved_indices[0] is None or rows.merged or is_dry_run():
        return None
    index = indices[0].cpu()
    if index.dtype == torch.bool:
        lead, places = tuple(before[: index.dim()]), index.flatten().nonzero().flatten()
    elif index.dim() == 1:
        lead, places = tuple(before[:1]), index.remainder(before[0])
    else:
        return None
    own: Numbers = places.numpy()
    own = own if rows.places is None else own[rows.places]
    return Rows(lead, own, len(lead) > 1, (above.node, above.output_nr))


def _layout(
    graph: Graph, output: ModelOutput, rows: Rows | None, declared: int | None, in_turn: bool
) -> Layout:
    """Where an output of the model holds the samples."""
    shape, known = output.shape, output.loss.sample_axis
    if rows is None:  # the loss knows its axis
        return _along(known or 0, shape[known or 0])
    if not (rows.merged or (in_turn and rows.places is not None)):
        if output.loss.one_sample or not shape:
            return WHOLE
        axis = declared or 0
        axis = axis + len(shape) if axis < 0 else axis
        if not 0 <= axis < len(shape) or axis == output.loss.class_axis:
            raise _absent(graph, output, declared)
        return _along(axis, shape[axis])
    if not shape:
        raise _numbers(graph)
    axis = declared or 0
    axis = axis + len(rows.lead) + len(shape) - 1 if axis < 0 else axis
    if not 0 <= axis < len(rows.lead):
        raise _absent(graph, output, declared)
    samples = rows.lead[axis]
    if samples == 1:
        return WHOLE
    owners = rows.owners(axis)
    parts = len(owners) // samples if samples else 1
    if np.array_equal(owners, np.arange(samples).repeat(parts)):
        return Layout(0, samples, parts)
    if np.array_equal(owners, np.tile(np.arange(samples), parts)):
        return Layout(0, samples, parts, major=False)
    if is_dry_run():
        raise PackpropError(
            "A plan was asked for.",
            "losses that take chunks of the samples in turn",
            "a plan is made without data, and only data tell which rows of a chunk belong to which sample",
            "let each chunk hold some positions of all samples (hidden.split(size, dim=1)), or leave the plan "
            "and memory=... out",
        )
    owners = owners.repeat(shape[0]) if output.loss.one_sample else owners
    return layout_of_rows(0, torch.from_numpy(owners), samples)


def _along(axis: int, samples: int) -> Layout:
    return WHOLE if samples == 1 else Layout(axis, samples)


def _anywhere(graph: Graph, output: ModelOutput, samples: int, declared: int | None) -> list[Layout]:
    """Where a tensor that no loss is known to take may hold the samples: first of all where a loss would."""
    layouts = possible_layouts(output.shape, samples)
    try:
        usual = _layout(graph, output, _followed(output), declared, False)
    except PackpropError:
        usual = None
    if usual is not None and usual.samples == samples:
        layouts.insert(0, usual)
    if not layouts:
        raise PackpropError(
            graph.asked,
            f"a tensor of shape {list(output.shape)} that a term of the loss is made of",
            f"no axis of it holds the {samples} samples of the loss",
            "take the term in a pass of its own",
        )
    return layouts


def _axis(node: Any, before: torch.Size) -> int:
    """The axis that a node took entries along; autograd shows negative numbers without their sign."""
    axis = int(node._saved_dim)
    return (axis - 2**64 if axis >= 2**63 else axis) % max(1, len(before))


def _index(edge: GradientEdge, extent: int) -> int:
    """The entry that ``Select`` or ``Unbind`` took."""
    node: Any = edge.node
    if name_of_node(node) == "Unbind":
        return edge.output_nr
    index = int(node._saved_index)
    return (index - 2**64 if index >= 2**63 else index) % extent


def _slice(edge: GradientEdge, extent: int) -> slice:
    """The entries that a slice or a split took."""
    node: Any = edge.node
    name = name_of_node(node)
    if name == "Slice":
        start, stop = (_signed(each) for each in (node._saved_start, node._saved_end))
        return slice(start, stop, int(node._saved_step))
    if name.endswith("WithSizes"):
        sizes = [int(size) for size in node._saved_split_sizes]
    else:
        sizes = [int(node._saved_split_size)] * (edge.output_nr + 1)
    start = sum(sizes[: edge.output_nr])
    return slice(start, min(extent, start + sizes[edge.output_nr]))


def _signed(number: Any) -> int | None:
    if number is None:
        return None
    return int(number) - 2**64 if number >= 2**63 else int(number)


def _axes_of(rows: Rows, shape: torch.Size) -> int:
    """How many leading axes of a tensor the rows run along."""
    own = len(rows.lead)
    if tuple(shape[:own]) == rows.lead:
        return own
    axes = _leading(shape, math.prod(rows.lead))
    return 1 if axes is None else axes


def _leading(shape: torch.Size, entries: int) -> int | None:
    """The fewest leading axes with so many entries in all."""
    sizes = (axes for axes in range(1, len(shape) + 1) if math.prod(shape[:axes]) == entries)
    return next(sizes, None)


def _shape_of(edge: GradientEdge) -> torch.Size:
    return torch.Size(made_by(edge.node)[edge.output_nr].shape)


def _absent(graph: Graph, output: ModelOutput, declared: int | None) -> PackpropError:
    is_classes = declared is not None and declared % max(1, len(output.shape)) == output.loss.class_axis
    return PackpropError(
        graph.asked,
        f"what a loss takes, of shape {list(output.shape)}",
        f"sample_axis={declared or 0} says which axis of it holds the samples, "
        + ("which is that of the classes" if is_classes else "and it has no such axis"),
        "leave sample_axis out where the loss takes the samples first, whatever the model's inputs have first; "
        "or declare the axis of what the loss takes",
    )


def _numbers(graph: Graph) -> PackpropError:
    return PackpropError(
        graph.asked,
        "several losses, each of a single number",
        "numbers have no axis that holds the samples",
        "give each loss a row: F.mse_loss(out[n : n + 1], y[n : n + 1]), or one loss all rows",
    )


def _disagreement(
    graph: Graph, outputs: Sequence[ModelOutput], layouts: Sequence[Layout | None]
) -> PackpropError:
    pairs = [(output, layout) for output, layout in zip(outputs, layouts, strict=True) if layout is not None]
    said = ", ".join(f"{layout.samples} in {list(output.shape)}" for output, layout in pairs)
    return PackpropError(
        graph.asked,
        f"{len(pairs)} losses, or outputs of the model",
        f"they take different numbers of samples: {said}. Sample n is row n of what each loss takes",
        "flatten positions in front of the loss, logits.flatten(0, 1), so that the graph shows whose they are; "
        "declare the axis of what the losses take (sample_axis=...); or take each loss in a pass of its own",
    )
