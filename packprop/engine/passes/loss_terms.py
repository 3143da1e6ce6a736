"""The reduction of a loss and its number of terms, from which packprop combines losses of several batches."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from torch import Tensor

from packprop.engine.functions.losses.description import describe
from packprop.engine.recording.marks import RecordedLoss
from packprop.engine.tensors.layout import Layout

REDUCTIONS: dict[str, Literal["mean", "sum"]] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
"""Values of a loss's argument ``reduction``, each with what it does to terms."""


def reduction_and_divisor(
    call: RecordedLoss, layout: Layout | None = None
) -> tuple[str, Tensor | float] | None:
    """Return ``"mean"`` or ``"sum"``, and the divisor of the sum of terms; ``None`` if it is not known.

    ``layout`` says where the loss's input holds the samples: ``batchmean`` divides by the first extent of the
    input, whatever that counts.
    """
    divisor = describe(call.function, call.args, call.kwargs).divisor
    given = _arguments(call)
    reduction = REDUCTIONS.get(given.get("reduction", "mean"))
    # without the argument, a divisor of 1 may come from a sum or from a mean over one term
    known = divisor is not None and ("reduction" in given or divisor != 1)
    if not known or reduction is None or _deprecated(given) != [None, None]:
        return None
    assert divisor is not None
    counts_steps = layout is not None and (layout.axes or (0,))[0] != 0
    return None if counts_steps and is_of_batch(call, reduction, divisor) else (reduction, divisor)


def reduction_of(call: RecordedLoss) -> Literal["mean", "sum"] | None:
    """Return whether a loss is a mean or a sum over its samples; ``None`` for neither, or if it is not known.

    A mean over samples of sums is a mean, and so is a mean whose divisor is not known.
    """
    given = _arguments(call)
    averages, reduces = _deprecated(given)
    if reduces is False:
        return None
    if averages is not None or reduces is not None:  # in torch they override reduction
        return "sum" if averages is False else "mean"
    if "reduction" in given:
        return REDUCTIONS.get(given["reduction"])
    return None if reduction_and_divisor(call) is None else "mean"


def is_of_batch(call: RecordedLoss, reduction: str, divisor: Tensor | float) -> bool:
    """Tell whether the first extent of a loss's input divides the sum (``batchmean``), not all its terms."""
    if reduction != "mean" or isinstance(divisor, Tensor):
        return False
    return divisor == call.shape[0] and divisor != all_terms(call)


def all_terms(call: RecordedLoss) -> float:
    """Return the number of terms of a loss that counts each of them once."""
    axis = describe(call.function, call.args, call.kwargs).class_axis
    return call.shape.numel() / (1 if axis is None else call.shape[axis])


def _arguments(call: RecordedLoss) -> dict[str, Any]:
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    of_module = getattr(call.function, "reduction", None)  # of a user's own loss module
    return given.arguments if of_module is None else {"reduction": of_module, **given.arguments}


def _deprecated(given: dict[str, Any]) -> list[bool | None]:
    """Return ``size_average`` and ``reduce``, which torch still takes."""
    return [given.get("size_average"), given.get("reduce")]
