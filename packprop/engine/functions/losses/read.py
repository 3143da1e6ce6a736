"""Losses read from their nodes: the function and its arguments, from the tensors that a node saved.

``cross_entropy`` is read as ``nll_loss`` of the output of ``log_softmax``; see NOTE [Links].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.losses.description import PROVEN, SYMMETRIC
from packprop.engine.functions.nodes import name_of_node, saved_option
from packprop.engine.tensors.precision import NARROW

REDUCTIONS = ("none", "mean", "sum")
"""Names of reductions, by the number that nodes save."""

OF_TWO = ("self", "target")
"""Names of the saved arguments of most losses."""

LOSS_NODES: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    "NllLoss": (F.nll_loss, OF_TWO, ("weight", "ignore_index")),
    "NllLoss2D": (F.nll_loss, OF_TWO, ("weight", "ignore_index")),
    "MseLoss": (F.mse_loss, OF_TWO, ()),
    "SmoothL1Loss": (F.smooth_l1_loss, OF_TWO, ("beta",)),
    "HuberLoss": (F.huber_loss, OF_TWO, ("delta",)),
    "SoftMarginLoss": (F.soft_margin_loss, OF_TWO, ()),
    "BinaryCrossEntropy": (F.binary_cross_entropy, OF_TWO, ("weight",)),
    "BinaryCrossEntropyWithLogits": (F.binary_cross_entropy_with_logits, OF_TWO, ("weight", "pos_weight")),
    "MultiMarginLoss": (F.multi_margin_loss, OF_TWO, ("p", "margin", "weight")),
    "MultilabelMarginLoss": (F.multilabel_margin_loss, OF_TWO, ()),
    "CtcLoss": (
        F.ctc_loss,
        ("log_probs", "targets", "input_lengths", "target_lengths"),
        ("blank", "zero_infinity"),
    ),
}
"""Names of nodes -> the loss function, its saved arguments, and its options other than the reduction."""

MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}
"""Loss modules that leave one of ``LOSS_NODES`` -> the functions that they call."""


def leaves_its_node(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Tell whether the node that a loss module will leave tells its whole call, so that no mode need see it."""
    function = MODULES.get(type(module))
    if function is None or len(args) != 2 or not all(isinstance(each, Tensor) for each in args):
        return False
    if function is F.cross_entropy and (module.label_smoothing or args[1].is_floating_point()):
        return False
    return _is_told(function, *args)


def tells_its_loss(node: Node, function: Callable[..., Any], given: Tensor, target: Any) -> bool:
    """Tell whether the node that a loss made tells its whole call, so that it needs no mark."""
    return name_of_node(node) in LOSS_NODES and _is_told(function, given, target)


def _is_told(function: Callable[..., Any], given: Tensor, target: Any) -> bool:
    """Tell whether the node of a loss tells its whole call.

    A node does not tell whether the function has a user's rule, nor which argument was broadcast. In low
    precision, the log-probabilities that it saved are rounded once more than the logits. PyTorch reshapes
    log-probabilities with one axis of positions, or with more than two, before their node: to go through this
    takes time and memory of the size of the logits.
    """
    is_of_classes = function in (F.cross_entropy, F.nll_loss)
    has_rule = function in PROVEN or (function is F.cross_entropy and F.nll_loss in PROVEN)
    are_repeated = function in SYMMETRIC and given.shape != target.shape
    are_reshaped = is_of_classes and given.dim() not in (1, 2, 4)
    return not (has_rule or are_repeated or are_reshaped or given.dtype in NARROW)


def loss_of_node(node: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], GradientEdge] | None:
    """Return function, arguments, options and input's edge of the loss that made a node of ``LOSS_NODES``.

    Return ``None`` if the input needs no gradient, nor the target of a loss whose arguments may be swapped.

    Raises:
        RuntimeError: If the graph was freed.
    """
    function, arguments, options = LOSS_NODES[name_of_node(node)]
    turned = node.next_functions[0][0] is None and function in SYMMETRIC
    above, number = node.next_functions[turned]
    if above is None:
        return None
    arguments = arguments[::-1] if turned else arguments
    kwargs = {option: saved_option(node, option) for option in options}
    # a node without this option has one term for each sample; other nodes reduce them
    kwargs["reduction"] = REDUCTIONS[getattr(node, "_saved_reduction", 0)]
    return function, tuple(saved_option(node, name) for name in arguments), kwargs, GradientEdge(above, number)
