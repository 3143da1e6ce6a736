"""How a loss reduces its terms, and how many there are: by this, losses of several batches are put together."""

from __future__ import annotations

import inspect

from torch import Tensor

from packprop.functions.losses.description import describe
from packprop.recording.marks import RecordedLoss


def reduction_and_divisor(call: RecordedLoss) -> tuple[str, Tensor | float] | None:
    """``"mean"`` or ``"sum"``, and what the sum of terms is divided by; ``None`` if that is not known."""
    divisor = describe(call.function, call.args, call.kwargs).divisor
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    deprecated = [given.arguments.get(flag) for flag in ("size_average", "reduce")]
    reduction = given.arguments.get("reduction", "mean")
    # without the argument, a divisor of 1 may come from a sum or from a mean over one term
    known = divisor is not None and ("reduction" in given.arguments or divisor != 1)
    if known and deprecated == [None, None] and reduction in ("mean", "sum"):
        assert divisor is not None
        return reduction, divisor
    return None
