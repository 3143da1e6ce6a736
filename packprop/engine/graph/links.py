"""The edge where the columns of a loss are fed in: its input, or the input of a function before it.

See NOTE [Links] in ``engine/functions/losses/links.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.losses.description import Loss, describe, from_canonical
from packprop.engine.functions.losses.links import CARRYING, Link
from packprop.engine.functions.nodes import made_by, name_of_node, saved_option
from packprop.engine.graph.pull import pull_columns
from packprop.engine.recording.marks import RecordedLoss
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.traced import decided


@dataclass(frozen=True)
class Entrance:
    """The rule of a loss, and the edge where its columns are fed in.

    Args:
        rule: The rule, with the axis of classes that the graph shows. It refuses curvature if a function
            that it needs before the loss is missing.
        made: The output of the function before the loss, in the shape of the columns, if there is one.
    """

    rule: Loss
    edge: GradientEdge
    made: GradientEdge | None = None

    def values(self, given: Tensor) -> Tensor:
        """Map the loss's input to the values at which its root is taken, in the same shape."""
        return given if self.made is None or self.rule.link is None else self.rule.link.undone(given)

    def put(self, call: RecordedLoss, layout: Layout, class_axis: int | None, columns: Tensor) -> Tensor:
        """Map columns ``[v, n, t, c]`` to the vectors that are fed in, ``[v, *f]``."""
        placed = from_canonical(columns, call.shape, layout, class_axis)
        if self.made is None:
            return placed
        if self.made != call.edge:
            differentiable = torch.is_grad_enabled()
            (carried,) = pull_columns([call.edge], [self.made], [placed], create_graph=differentiable)
            assert carried is not None
            placed = carried
        return placed.to(made_by(self.edge.node)[self.edge.output_nr].dtype)


def entrance_of(call: RecordedLoss) -> Entrance:
    """Return the entrance of a loss."""
    rule = describe(call.function, call.args, call.kwargs)
    found = None if rule.link is None else _before(call.edge, rule.link)
    if rule.link is None or found is None:
        return Entrance(rule, call.edge)
    made, node, edge = found
    if rule.link.of_rows:
        axis = _axis_of_rows(call, made, node, rule.class_axis)
        if axis is None:
            return Entrance(rule, call.edge)
        rule = replace(rule, class_axis=axis)
    return Entrance(replace(rule, refusal=None), edge, made)


def _before(edge: GradientEdge, link: Link) -> tuple[GradientEdge, Node, GradientEdge] | None:
    """Return the output, node and input of a link before a loss; ``None`` if there is none."""
    while name_of_node(edge.node) in CARRYING:
        above = [GradientEdge(node, number) for node, number in edge.node.next_functions if node is not None]
        if len(above) != 1:
            return None
        (edge,) = above
    for chain in link.chains:
        at = edge
        for name in chain:
            if name_of_node(at.node) != name:
                break
            node, (above_node, number) = at.node, at.node.next_functions[0]
            if above_node is None:
                break
            at = GradientEdge(above_node, number)
        else:
            return edge, node, at
    return None


def _axis_of_rows(call: RecordedLoss, made: GradientEdge, node: Node, wanted: int | None) -> int | None:
    """Return the axis of a loss's input along which a node combines entries; ``None`` if there is none.

    Random numbers that are constant along the right axis stay constant along the node's own axis when they are
    pulled back to it.
    """
    shape = torch.Size(made_by(made.node)[made.output_nr].shape)
    own = saved_option(node, "dim") % max(1, len(shape))
    if made == call.edge or not shape:
        return own if wanted in (own, None) else None
    axes = range(len(call.shape)) if wanted is None else [wanted]
    axes = [axis for axis in axes if call.shape[axis] == shape[own]]
    if is_dry_run():
        return axes[-1] if axes else None
    return decided(
        f"the axis of classes of a loss over {list(call.shape)}",
        lambda: next((axis for axis in axes if _is_same_along(call, axis, made, own)), None),
    )


def _is_same_along(call: RecordedLoss, axis: int, made: GradientEdge, own: int) -> bool:
    """Tell whether numbers that are constant along an axis of a loss's input stay so along ``own``."""
    like = made_by(call.edge.node)[call.edge.output_nr]
    positions = [1 if place == axis else extent for place, extent in enumerate(call.shape)]
    noise = torch.rand(positions, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
    numbers = noise.to(like.dtype).to(like.device).expand(call.shape)
    pulled = pull_columns([call.edge], [made], [numbers], batched=False)[0]
    if pulled is None:
        return False
    if not pulled.numel():
        return True
    spread = pulled.amax(own) - pulled.amin(own)
    return bool((spread <= 16 * torch.finfo(pulled.dtype).eps).all())  # the numbers are below one
