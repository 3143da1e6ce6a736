"""Losses that their nodes tell: which function was called on what, from what the node saved.

``cross_entropy`` is ``nll_loss`` of what ``log_softmax`` made, and is read as that; see NOTE [Links].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch.autograd.graph import GradientEdge

from packprop.functions.nodes import name_of_node, saved_option

REDUCTIONS = ("none", "mean", "sum")
"""What nodes save for a reduction -> its name."""


class ReadLoss(NamedTuple):
    """A call of a loss function, read off its node.

    Args:
        function: The loss function.
        args: Its arguments, the input first.
        kwargs: Its options.
        edge: Where its input came from.
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
"""Name of a node -> the function that made it, and its options beside the reduction."""


def loss_of_node(node: Any) -> ReadLoss | None:
    """The call of a loss that made a node; ``None`` if it is no loss that its node tells.

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
