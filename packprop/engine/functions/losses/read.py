"""Losses read from their nodes: the function and its arguments, from the tensors that a node saved.

``cross_entropy`` is read as ``nll_loss`` of the output of ``log_softmax``; see NOTE [Links].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch.autograd.graph import GradientEdge

from packprop.engine.functions.nodes import name_of_node, saved_option

REDUCTIONS = ("none", "mean", "sum")
"""Names of reductions, by the number that nodes save."""


class ReadLoss(NamedTuple):
    """A call of a loss function, read from its node.

    Args:
        function: The loss function.
        args: Its arguments, the input first.
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
    return ReadLoss(function, (given, target), kwargs, edge)
