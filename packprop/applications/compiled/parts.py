"""Graphs for compilers: a concatenation replaces the writes to the parts of a tensor.

# NOTE [Parts]
A pass that works on a few samples at a time allocates all results, and writes each part to its place. A
compiler without in-place writes turns every such write into a new tensor as large as all parts together, in
which one part differs: this work grows with the square of the number of parts. So if all parts are written
once, each before it is read, packprop makes them tensors of their own, and concatenates them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from packprop.applications.compiled.aliases import Aliases

_ATEN = torch.ops.aten

ROOMS = frozenset({_ATEN.new_empty.default, _ATEN.empty.memory_format})
"""Operations that allocate and write nothing."""


@dataclass(frozen=True)
class Part:
    """One part of a tensor.

    Args:
        views: The slice that it is written to, and reshaped views of it.
        write: The node that fills it.
        start: The index along the axis at which it begins.
        stop: The index at which it ends.
    """

    views: list[Node]
    write: Node
    start: int
    stop: int


@dataclass(frozen=True)
class Room:
    """A tensor that is written part by part.

    Args:
        views: The tensor, and views of all of it.
        parts: The parts, in the order of their places.
        axis: The axis along which the parts lie.
    """

    views: list[Node]
    parts: list[Part]
    axis: int

    def readers(self) -> list[tuple[Node, Node]]:
        """Return the readers of the whole tensor, each with the view that it reads."""
        known = {*self.views, *(part.views[0] for part in self.parts)}
        return [(view, user) for view in self.views for user in view.users if user not in known]


def put_together(graph: Graph) -> None:
    """Replace writes to all parts of a tensor by a concatenation; see NOTE [Parts]."""
    rooms = [node for node in graph.nodes if node.op == "call_function" and node.target in ROOMS]
    aliases, order = Aliases(graph), {node: place for place, node in enumerate(graph.nodes)}
    found = [room for node in rooms if (room := _room(node, aliases, order)) is not None]
    for room in found:
        last = max((part.write for part in room.parts), key=order.__getitem__)
        pieces = [_made(graph, part) for part in room.parts]
        with graph.inserting_after(last):
            joined = graph.call_function(_ATEN.cat.default, (pieces, room.axis))
        for view, reader in room.readers():
            reader.replace_input_with(view, joined)
        for part in room.parts:
            graph.erase_node(part.write)
    graph.eliminate_dead_code()


def _room(node: Node, aliases: Aliases, order: dict[Node, int]) -> Room | None:
    """Return a new tensor with its parts, if writes fill all of it, each part once and before it is read."""
    views, slices = [node], list[Node]()
    for view in views:
        for user in view.users:
            if user.target is _ATEN.slice.Tensor and user.args[0] is view:
                (views if _shape(user) == _shape(node) else slices).append(user)
    writes, whole = dict(aliases.writes_to(node)), _shape(node)
    parts = [part for view in slices if (part := _part(view, whole, writes, order)) is not None]
    parts.sort(key=lambda part: part.start)
    axes = {view.args[1] for view in slices}
    if len(parts) < 2 or len(parts) != len(slices) or len(parts) != len(writes) or len(axes) != 1:
        return None
    (axis,) = axes
    assert isinstance(axis, int)
    if [part.start for part in parts] != [0, *(part.stop for part in parts[:-1])]:
        return None
    if parts[-1].stop != whole[axis]:
        return None
    room, last = Room(views, parts, axis), max(order[part.write] for part in parts)
    early = any(order[reader] < last for _, reader in room.readers())
    strided = [each for each in order if each.target is _ATEN.as_strided.default]  # these may see other parts
    return None if early or any(aliases.share(each, node) for each in strided) else room


def _part(view: Node, whole: tuple[int, ...], writes: dict[Node, Node], order: dict[Node, int]) -> Part | None:
    """Return a slice of a tensor as a part, if one write fills it before it is read."""
    if len(view.args) != 4:
        return None
    _, axis, start, stop = view.args
    assert isinstance(axis, int)
    start, stop, _ = slice(start, stop).indices(whole[axis])
    views = [view]
    for each in views:
        views += [user for user in each.users if user.target is _ATEN.view.default]
    own = [(write, target) for write, target in writes.items() if target in views]
    if len(own) != 1:
        return None
    ((write, target),) = own
    readers = [user for each in views for user in each.users if user is not write and user not in views]
    if not _fills(write, target) or any(order[reader] < order[write] for reader in readers):
        return None
    return Part(views, write, start, stop)


def _fills(write: Node, target: Node) -> bool:
    """Tell whether a write fills all of its target, whatever values were there."""
    if write.target is not _ATEN.copy_.default:
        return write.target is _ATEN.bmm.out
    source = write.args[1]
    return isinstance(source, Node) and _kind(source) == _kind(target)


def _made(graph: Graph, part: Part) -> Node:
    """Make the part a tensor of its own, which takes the place of the slice and its views."""
    write = part.write
    with graph.inserting_before(write):
        if write.target is _ATEN.bmm.out:
            made = graph.call_function(_ATEN.bmm.default, write.args)
        else:  # later nodes may write to the source
            made = graph.call_function(_ATEN.clone.default, (write.args[1],))
        for view in [*part.views, write]:
            own = graph.call_function(_ATEN.view.default, (made, list(_shape(view))))
            for reader in [user for user in view.users if user is not write and user not in part.views]:
                reader.replace_input_with(view, own)
        return graph.call_function(_ATEN.view.default, (made, list(_shape(part.views[0]))))


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].shape)


def _kind(node: Node) -> tuple[tuple[int, ...], torch.dtype]:
    return _shape(node), node.meta["tensor_meta"].dtype
