"""Follow rows of a tensor upstream, to where they run along axes of their own; see NOTE [Rows of a loss]."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.nodes import (
    ENTRYWISE,
    NORMALISATIONS,
    RESHAPES,
    made_by,
    name_of_node,
    names_of_nodes,
    saved_option,
)
from packprop.engine.functions.operands import is_mask
from packprop.engine.tensors.dry import is_dry_run

SAME = ENTRYWISE | names_of_nodes(
    "Add Sub Rsub Mul Div ToCopy LogSoftmax Softmax NativeDropout NativeLayerNorm MaskedFill Where"
)
"""Functions whose output has the rows of each input of the same shape."""


ROWS_OF_MATRICES = {"Mm": 0, "Addmm": 1}
"""Products of matrices, with the place of the factor whose rows their output has."""


PICKS = names_of_nodes("Select Unbind")
"""Functions that take one entry along an axis."""


PARTS = names_of_nodes(
    "Slice Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Index IndexSelect MaskedSelect"
)
"""Functions that take some entries along an axis."""


class Rows(NamedTuple):
    """The place that the rows of a loss's input come from.

    Args:
        lead: Extents of the axes that the rows run along, in the tensor that packprop followed them to.
        places: The place of each row among these, flattened ``[k]``; ``None`` for all of them in order.
        merged: Whether a reshape merged the axes.
        whole: The tensor that parts were taken from: node, and number of its output; ``None`` for no parts.
    """

    lead: tuple[int, ...]
    places: Sequence[int] | None = None
    merged: bool = False
    whole: tuple[Node, int] | None = None

    def owners(self, axis: int) -> list[int]:
        """Return the index of each row along one of the axes, as Python integers, which a dry run knows."""
        places = range(math.prod(self.lead)) if self.places is None else self.places
        inner, extent = math.prod(self.lead[axis + 1 :]), self.lead[axis]
        return [place // inner % extent for place in places]


ONE_ROW = Rows(())
"""The row of a tensor without an axis of rows, such as ``f[n]``."""


def followed(
    edge: GradientEdge, shape: torch.Size, is_row: bool, parameters: Container[Node] = ()
) -> list[Rows]:
    """Return the places that the rows along the leading axis of a tensor come from, as the graph shows them.

    If the tensor is a sum of several tensors, there is a place for each that leads to a reshape that merged
    axes. If none does, there is only the place of the first tensor.

    Args:
        edge: The edge of the tensor.
        shape: The shape of the tensor.
        is_row: Whether the tensor is a row itself, without an axis of rows.
        parameters: Nodes made of parameters, which no sample enters.
    """
    found: list[Rows] = []
    stack = [(ONE_ROW if is_row else Rows((shape[0],)), edge, shape)]
    given, seen = shape, set()
    while stack:
        rows, edge, shape = stack.pop()
        place = edge.node, edge.output_nr, rows.lead, rows.places and tuple(rows.places), rows.whole
        if place in seen:
            continue
        seen.add(place)
        further = [] if edge.node in parameters else _further(rows, edge, shape, given)
        further = [each for each in further if each[1].node not in parameters]  # rows of a table are no samples
        if rows.merged:  # the nearest reshape is known: only parts count from here on
            further = further[:1]
        if not further:
            found.append(rows)
        stack += reversed(further)
    return [rows for rows in found if rows.merged] or found[:1]


def _further(
    rows: Rows, edge: GradientEdge, shape: torch.Size, given: torch.Size
) -> list[tuple[Rows, GradientEdge, torch.Size]]:
    """Return the rows in each input whose rows a node's output has, with the edge and shape of that input."""
    name = name_of_node(edge.node)
    each: list[tuple[Rows, GradientEdge, torch.Size]] = []
    for above in _inputs_with_rows(edge.node, name, shape):
        before, own = _shape_of(above), rows if name not in RESHAPES else None
        if name in RESHAPES and not _is_folded_norm(above, shape):
            own = _reshaped(rows, before, shape, name in ("Squeeze", "Unsqueeze"), given)
        elif name in PARTS | PICKS:
            own = _part(rows, edge, above, before, shape)
        if own is not None:
            each.append((own, above, before))
    return each


def _inputs_with_rows(node: Node, name: str, shape: torch.Size) -> list[GradientEdge]:
    """Return the inputs of a node whose rows its output has; none if they are not known."""
    inputs = [None if above is None else GradientEdge(above, number) for above, number in node.next_functions]
    if name in SAME:
        return [each for each in inputs if each is not None and _shape_of(each) == shape]
    if name in ROWS_OF_MATRICES:
        inputs = [inputs[ROWS_OF_MATRICES[name]]] if len(shape) == 2 else []
    elif name not in RESHAPES | PARTS | PICKS:
        return []
    return [each for each in inputs[:1] if each is not None]


def _reshaped(
    rows: Rows, before: torch.Size, shape: torch.Size, keeps_axes: bool, given: torch.Size
) -> Rows | None:
    """Return the rows in front of a reshape; ``None`` if they do not run along whole axes there.

    Args:
        rows: The rows behind the reshape.
        before: The shape in front of it.
        shape: The shape behind it.
        keeps_axes: Whether the reshape merges nothing, but adds or removes an axis of one.
        given: The shape of the tensor that packprop started from; its own axes were not merged in it.
    """
    if rows == Rows((1,)) and shape == (1, *before):
        return ONE_ROW
    if rows == ONE_ROW:
        return rows if before == shape else Rows((1,)) if before == (1, *shape) else None
    count = _axes_of(rows, shape)
    if keeps_axes:
        axes = _leading(before, math.prod(shape[:count]))
        return None if axes is None or axes > count else rows
    same = len(before) - (len(shape) - count)
    if same > 0 and before[same:] == shape[count:]:
        axes = same
    else:
        axes = _leading(before, math.prod(shape[:count]))
    if axes is None:
        return _cut(rows, before, shape)
    is_in_given = len(before) == len(given) and before[:axes] == given[:axes]
    if len(rows.lead) > 1 or axes < 2 or axes <= count or is_in_given:
        return rows
    return rows._replace(lead=tuple(before[:axes]), merged=True)


def _is_folded_norm(above: GradientEdge, shape: torch.Size) -> bool:
    """Tell whether a reshape unfolds an instance norm, which PyTorch computes on ``[1, n c, t]``."""
    before = _shape_of(above)
    return name_of_node(above.node) in NORMALISATIONS and before[0] == 1 and len(before) == len(shape)


def _cut(rows: Rows, before: torch.Size, shape: torch.Size) -> Rows | None:
    """Return the rows in front of a reshape that cut those of a matrix, from ``[n, t c]`` to ``[n t, c]``."""
    if rows.merged or len(before) != 2 or not before[0] or shape[0] % before[0] or shape[0] <= before[0]:
        return None
    return rows._replace(lead=(before[0], shape[0] // before[0]), merged=True)


def _part(
    rows: Rows, edge: GradientEdge, above: GradientEdge, before: torch.Size, shape: torch.Size
) -> Rows | None:
    """Return the rows in the tensor that a node took one or some entries from, along an axis."""
    name, whole = name_of_node(edge.node), (above.node, above.output_nr)
    if name == "Index":
        return _chosen(rows, saved_option(edge.node, "indices"), above, before)
    if name == "MaskedSelect":
        mask = saved_option(edge.node, "mask")
        return _chosen(rows, [mask], above, before) if mask.shape == before else None  # it may be broadcast
    axis = int(saved_option(edge.node, "dim")) % max(1, len(before))
    count, is_taken = _axes_of(rows, shape), rows.whole == (edge.node, edge.output_nr)
    if axis >= count and not (name in PICKS and rows == ONE_ROW and axis == 0):
        return rows
    if name == "IndexSelect":
        return _chosen(rows, [saved_option(edge.node, "index")], above, before) if axis == 0 else None
    if len(rows.lead) != count or math.prod(before[:count]) == 0:
        return None
    taken = _entries(edge, before[axis])
    behind = rows.lead[axis:]
    if name in PICKS:  # rows taken from its output then also run along the axis that it removes
        if rows != ONE_ROW and (rows.merged or not is_taken):
            return None
    elif len(taken) != rows.lead[axis]:
        return None
    else:
        behind = behind[1:]
    lead = (*rows.lead[:axis], before[axis], *behind)
    outer, inner = math.prod(lead[:axis]), math.prod(behind)
    places = [(o * before[axis] + t) * inner + i for o in range(outer) for t in taken for i in range(inner)]
    places = places if rows.places is None else [places[place] for place in rows.places]
    return rows._replace(lead=lead, places=places, whole=whole)


def _chosen(
    rows: Rows, indices: Sequence[Tensor | None], above: GradientEdge, before: torch.Size
) -> Rows | None:
    """Return the rows in the tensor that an index or a mask of its leading axes took them from."""
    if rows == ONE_ROW:  # entries of the row
        return rows
    if indices[0] is None or any(each is not None for each in indices[1:]) or rows.merged or is_dry_run():
        return None
    index = indices[0].cpu()
    if is_mask(index):
        lead, places = tuple(before[: index.dim()]), index.flatten().nonzero().flatten()
    elif index.dim() == 1:
        lead, places = tuple(before[:1]), index.remainder(before[0])
    else:
        return None
    own: list[int] = places.tolist()
    own = own if rows.places is None else [own[place] for place in rows.places]
    return Rows(lead, own, len(lead) > 1, (above.node, above.output_nr))


def _entries(edge: GradientEdge, extent: int) -> Sequence[int]:
    """Return the entries that a node took along an axis of this extent."""
    node, number = edge.node, edge.output_nr
    name = name_of_node(node)
    if name in PICKS:
        return [number if name == "Unbind" else int(saved_option(node, "index")) % extent]
    if name == "Slice":
        return range(extent)[slice(*(saved_option(node, each) for each in ("start", "end", "step")))]
    if name.endswith("WithSizes"):
        sizes = [int(size) for size in saved_option(node, "split_sizes")]
    else:
        sizes = [int(saved_option(node, "split_size"))] * (number + 1)
    start = sum(sizes[:number])
    return range(extent)[start : start + sizes[number]]


def _axes_of(rows: Rows, shape: torch.Size) -> int:
    """Return the number of leading axes of a tensor that the rows run along."""
    own = len(rows.lead)
    if tuple(shape[:own]) == rows.lead:
        return own
    axes = _leading(shape, math.prod(rows.lead))
    return 1 if axes is None else axes


def _leading(shape: torch.Size, entries: int) -> int | None:
    """Return the smallest number of leading axes with this many entries; ``None`` if there is none."""
    sizes = (axes for axes in range(1, len(shape) + 1) if math.prod(shape[:axes]) == entries)
    return next(sizes, None)


def _shape_of(edge: GradientEdge) -> torch.Size:
    return torch.Size(made_by(edge.node)[edge.output_nr].shape)
