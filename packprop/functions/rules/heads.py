"""A head that is one function with its loss, where a kernel computes both without the functions they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from packprop.functions.entry import Call, Entry
from packprop.functions.fallback import fallback
from packprop.functions.registry import register_use

SUMMED = (
    "linear_cross_entropy with options sums over all samples inside one kernel, which takes its gradient in "
    "the forward pass: nothing is left of single samples, and second derivatives would count as zero",
    "call it with options=None; or, to hold the logits of some tokens only, F.linear and F.cross_entropy(..., "
    'reduction="sum") on chunks of tokens, each chunk in torch.utils.checkpoint(..., use_reentrant=False)',
)


def _linear_cross_entropy(
    call: Call, input: Tensor, linear_weight: Tensor, target: Tensor, *, reduction: str = "mean", **_: Any
) -> list[Entry] | None:
    if reduction == "none":
        return None
    return [replace(fallback(call, parameter), refusal=SUMMED) for parameter in call.parameters]


# A call without options is seen as the functions that it is made of.
if hasattr(F, "linear_cross_entropy"):
    register_use(F.linear_cross_entropy)(_linear_cross_entropy)
