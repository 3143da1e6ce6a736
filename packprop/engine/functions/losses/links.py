"""Functions that belong to the loss after them, such as ``log_softmax`` before ``nll_loss``.

# NOTE [Links]
Some losses take probabilities, rates, or logarithms of them. They are linear in these, like ``nll_loss`` and
``kl_div``, or their curvature in these is unrelated to their curvature in the model's output. As functions of
the input of the ``log_softmax``, ``sigmoid`` or ``exp`` before them, they are ``cross_entropy``,
``binary_cross_entropy_with_logits`` and ``poisson_nll_loss`` of logarithms. packprop takes the curvature in
this input, so it does not depend on where you say that the model ends and the loss begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packprop.engine.functions.nodes import names_of_nodes
from packprop.engine.functions.operands import REARRANGING
from packprop.engine.tensors.precision import at_least

CARRYING = (REARRANGING - names_of_nodes("Cat Stack Tril Triu Neg")) | names_of_nodes(
    "Index IndexSelect MaskedSelect HandedOn"
)
"""Nodes that only rearrange or select entries of one input; they may come after a link."""


@dataclass(frozen=True)
class Link:
    """A function that must have made the input of a loss; packprop takes the curvature in its input.

    Args:
        chains: Names of the nodes that the function may leave, from its output to its input.
        function: The function; it takes its input, and the axis along which it combines entries.
        undone: Maps the output to the input, up to differences that do not change the loss.
        of_rows: Whether the function combines the entries along one axis.
    """

    chains: tuple[tuple[str, ...], ...]
    function: Callable[[Tensor, int | None], Tensor]
    undone: Callable[[Tensor], Tensor]
    of_rows: bool = False


def _log_odds(probabilities: Tensor) -> Tensor:
    limits = torch.finfo(probabilities.dtype)
    most = 1 - limits.eps / 2
    return at_least(torch.where(probabilities > most, most, probabilities), limits.tiny).logit()


def _logarithm(rates: Tensor) -> Tensor:
    return at_least(rates, torch.finfo(rates.dtype).tiny).log()


def _log_softmax(values: Tensor, axis: int | None) -> Tensor:
    return values.log_softmax(-1 if axis is None else axis)


LOG_SOFTMAX = Link((("LogSoftmax",), ("Log", "Softmax")), _log_softmax, lambda values: values, True)
SIGMOID = Link((("Sigmoid",),), lambda values, _: values.sigmoid(), _log_odds)
EXPONENTIAL = Link((("Exp",),), lambda values, _: values.exp(), _logarithm)
