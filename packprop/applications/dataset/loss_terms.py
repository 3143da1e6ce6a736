"""The reduction of a batch's loss, and its divisor: by these a batch gets its weight among others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from packprop.engine.functions import describe
from packprop.engine.graph import Graph
from packprop.engine.passes import reduction_and_divisor
from packprop.engine.recording import RecordedLoss
from packprop.errors import PackpropError

TELL = (
    "write it as a module without parameters that takes the model's output and the targets, with an "
    "attribute reduction='mean' or 'sum'; tell what it divides by with @packprop.register_loss(MyLoss); and "
    "extend the module: packprop.extend(MyLoss())"
)
"""Advice on a loss that is none of torch's."""


def loss_terms(graph: Graph) -> tuple[str, Tensor | float]:
    """Return the reduction of the batch's loss (``"mean"`` or ``"sum"``), and its divisor.

    The divisor of several means is the number of samples, which all have the same part of each; ``NaN`` if they
    have not.

    Raises:
        PackpropError: If it is not known.
    """
    calls = [loss.call for loss in graph.losses]
    if graph.without_loss or not calls:
        raise _unknown(
            "the loss of a batch, part of which no loss function makes that packprop knows",
            "nothing tells what that part is divided by, so that batches cannot be given their weight",
            "write it with loss functions of torch, F.mse_loss(a, b) for (a - b).square().mean(), and give "
            f"all of them the same reduction; or {TELL}",
        )
    found = []
    for call in calls:
        known = reduction_and_divisor(call)
        if known is None:
            raise _unknown(
                f"the loss {call.function.__name__}",
                "what it is divided by is not known, so that batches cannot be given their weight",
                f"use a loss function of torch with reduction='mean' or reduction='sum'; or {TELL}",
            )
        found.append(known)
    if len({reduction for reduction, _ in found}) > 1:
        names = [f"{call.function.__name__} ({each})" for call, (each, _) in zip(calls, found, strict=True)]
        raise _unknown(
            f"the loss of a batch, made of {', '.join(names)}",
            "a batch has another weight in a mean than in a sum",
            "give all of its loss functions the same reduction",
        )
    if len(found) == 1 or found[0][0] == "sum":
        return found[0]
    whole = [divisor == _all_terms(call) for call, (_, divisor) in zip(calls, found, strict=True)]
    tensors = [each for each in whole if isinstance(each, Tensor)]
    if not all(each for each in whole if not isinstance(each, Tensor)):
        return "mean", math.nan
    if not tensors:
        return "mean", float(graph.samples)
    each_has_its_part = torch.stack([each.cpu() for each in tensors]).all()
    return "mean", torch.where(each_has_its_part, float(graph.samples), math.nan)


def number_of_terms(divisor: Tensor | float) -> float:
    """Return the divisor of a batch's loss as a number.

    Raises:
        PackpropError: If it is ``NaN``.
    """
    terms = float(divisor)
    if math.isnan(terms):
        raise _unknown(
            "the loss of a batch, made of several means",
            "in one of them some samples count more than others (targets that are ignored, weights), so that a "
            "batch has another weight in it than in the rest",
            "give all loss functions reduction='sum', and divide by numbers that are the same in all "
            "batches; or ask for one loss after the other",
        )
    return terms


def _all_terms(call: RecordedLoss) -> float:
    """Return the number of terms of a loss that counts each of them once."""
    axis = describe(call.function, call.args, call.kwargs).class_axis
    return call.shape.numel() / (1 if axis is None else call.shape[axis])


def _unknown(where: str, why: str, instead: str) -> PackpropError:
    return PackpropError("Quantities of a loss over several batches were asked for.", where, why, instead)
