"""Losses read from their nodes: the function and its arguments, from the tensors that a node saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.functions.nodes import axis_of_rows, name_of_node, saved_option

REDUCTIONS = ("none", "mean", "sum")
"""Names of reductions, by the number that nodes save."""


class ReadLoss(NamedTuple):
    """A call of a loss function, read from its node.

    Args:
        function: The loss function.
        args: Its arguments, the input first. For ``cross_entropy``, log-probabilities in place of the logits;
            the loss is the same for both.
        kwargs: Its options.
        edge: The edge of its input.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edge: GradientEdge


LOSS_NODES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "NllLoss": (F.nll_loss, ("weight", "ignore_index")),
    "NllLoss2D": (F.nll_loss, ("weight", "ignore_index")),
    "MseLoss": (F.mse_loss, ()),
    "SmoothL1Loss": (F.smooth_l1_loss, ("beta",)),
    "HuberLoss": (F.huber_loss, ("delta",)),
    "SoftMarginLoss": (F.soft_margin_loss, ()),
    "BinaryCrossEntropy": (F.binary_cross_entropy, ("weight",)),
    "BinaryCrossEntropyWithLogits": (F.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
}
"""Loss functions by the names of their nodes, with their options other than the reduction."""


def loss_of_node(node: Any) -> ReadLoss | None:
    """Return the call of the loss that made a node; ``None`` if it is not a loss, or the node does not tell.

    Raises:
        RuntimeError: If the graph was freed.
    """
    name = name_of_node(node)
    known = LOSS_NODES.get(name)
    above, number = node.next_functions[0] if known is not None else (None, 0)
    if known is None or above is None:
        return None
    function, options = known
    kwargs = {option: saved_option(node, option) for option in options}
    kwargs["reduction"] = REDUCTIONS[node._saved_reduction]
    given, target = node._saved_self, node._saved_target
    edge = GradientEdge(above, number)
    if function is F.nll_loss:
        logits = _logits_of(edge, given)
        if logits is not None:
            edge, shape = logits
            target = target.reshape(shape[:1] + shape[2:]) if len(shape) > 1 else target
            return ReadLoss(F.cross_entropy, (given.reshape(shape), target), kwargs, edge)
    return ReadLoss(function, (given, target), kwargs, edge)


def _logits_of(edge: GradientEdge, given: Tensor) -> tuple[GradientEdge, torch.Size] | None:
    """Return the logits, and their shape, if ``log_softmax`` over the classes made the input; else ``None``."""
    node: Node = edge.node
    if name_of_node(node) in ("View", "UnsafeView", "ReshapeAlias"):  # to an image with an axis of extent 1
        node, number = node.next_functions[0]  # type: ignore[assignment]  # checked below
        if node is None or number:
            return None
    if name_of_node(node) != "LogSoftmax":
        return None
    shape = torch.Size(node._input_metadata[0].shape)
    axis = 1 if len(shape) > 1 else 0
    above, number = node.next_functions[0]
    if above is None or axis_of_rows(node, len(shape)) != axis or shape[axis] != given.shape[axis]:
        return None
    if shape[:1] != given.shape[:1] or (node is not edge.node and len(shape) < 3):
        return None
    return GradientEdge(above, number), shape
