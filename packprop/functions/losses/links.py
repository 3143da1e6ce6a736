"""Functions that belong to a loss although they are called before it, as ``log_softmax`` does to ``nll_loss``.

# NOTE [Links]
Some losses take probabilities, rates, or logarithms of them. In these they are linear, as ``nll_loss`` and
``kl_div`` are, or they curve in a way that has nothing to do with how they curve in the model's output. In what
``log_softmax``, ``sigmoid`` or ``exp`` was given to make them they are ``cross_entropy``,
``binary_cross_entropy_with_logits`` and ``poisson_nll_loss`` of logarithms. Curvature is that in this tensor:
it does not depend on where the model is said to end and the loss to begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packprop.functions.nodes import names_of_nodes
from packprop.functions.operands import REARRANGING

CARRYING = (REARRANGING - names_of_nodes("Cat Stack Tril Triu Neg")) | names_of_nodes(
    "Index IndexSelect MaskedSelect HandedOn"
)
"""Nodes of one input, whose entries are those of the result: they may stand behind a link."""


@dataclass(frozen=True)
class Link:
    """A function that must have made the input of a loss; the loss curves in what this function was given.

    Args:
        chains: Names of the nodes that it may leave, from its output to its input.
        undone: From its output to its input, up to what makes no difference to the loss.
        of_rows: Whether it takes the entries along one axis together.
    """

    chains: tuple[tuple[str, ...], ...]
    undone: Callable[[Tensor], Tensor]
    of_rows: bool = False


def _log_odds(probabilities: Tensor) -> Tensor:
    limits = torch.finfo(probabilities.dtype)
    return probabilities.clamp(limits.tiny, 1 - limits.eps / 2).logit()


def _logarithm(rates: Tensor) -> Tensor:
    return rates.clamp(min=torch.finfo(rates.dtype).tiny).log()


LOG_SOFTMAX = Link((("LogSoftmax",), ("Log", "Softmax")), lambda log_probabilities: log_probabilities, True)
SIGMOID = Link((("Sigmoid",),), _log_odds)
EXPONENTIAL = Link((("Exp",),), _logarithm)
