"""The loss of each sample, from a second call of the recorded loss function without its reduction."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from packprop.engine.curvature.generic_loss import linear_factor
from packprop.engine.functions.losses.description import describe, without_classes
from packprop.engine.graph.graph import Graph
from packprop.engine.recording.switch import disable
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.state import version
from packprop.errors import PackpropError

ASKED = "Losses of single samples were asked for."


def sample_losses(graph: Graph) -> Tensor:
    """Return the terms of the loss, summed for each sample: ``[n]``, in at least float32.

    The terms include the weights of classes and terms, and the factor on the loss, but no divisor of a mean.

    Raises:
        PackpropError: If there is not exactly one recorded loss, its input was changed, or it does not return
            its terms.
    """
    if len(graph.losses) != 1:
        raise PackpropError(
            ASKED,
            f"a loss made of {len(graph.losses)} recorded loss functions",
            "which terms belong to a sample is known of one alone",
            "use one loss function of torch",
        )
    loss = graph.losses[0]
    call, name = loss.call, getattr(loss.call.function, "__name__", str(loss.call.function))
    if version(call.input) != call.version:
        raise PackpropError(
            ASKED,
            f"the input of {name}, of shape {list(call.shape)}",
            "it was changed in place after the loss was computed",
            "clone it before changing it",
        )
    rule = describe(call.function, call.args, call.kwargs)
    layout, shape = without_classes(loss.layout, call.shape, rule.class_axis)
    factor = linear_factor(graph, loss, ASKED)
    terms: Tensor | None = None
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    if "reduction" in inspect.signature(call.function).parameters:
        given.arguments["reduction"] = "none"
        with torch.no_grad(), disable():
            terms = call.function(*given.args, **given.kwargs)
    if terms is None or terms.shape != shape:
        raise PackpropError(
            ASKED,
            f"the loss {name}",
            "it does not return a term for each sample and position with reduction='none'",
            "use a loss function of torch that does, or store losses by hand: StoreWriter.write(loss=...)",
        )
    front = layout.to_front(terms.to(accumulation_dtype(terms.dtype)))
    return front.reshape(len(front), -1).sum(1) * factor
