"""Functions that look up rows of a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from packprop.algebra.structures import Lookup, Structure
from packprop.functions.building import rowwise
from packprop.functions.entry import Call, Entry, Scratch
from packprop.functions.fallback import fallback
from packprop.functions.registry import made_later, register_use
from packprop.tensors.precision import accumulation_dtype


@register_use(F.embedding)
@made_later((1, "weight"))
def _embedding(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[Entry]:
    table, width = weight.shape

    def build(cotangent: Tensor | None, index: Tensor) -> Structure:
        index = index.reshape(index.shape[0], -1)
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, width)
            if padding_idx is not None:
                cotangent = cotangent * (index != padding_idx % table)[None, :, :, None]
        return Lookup(index, cotangent, table, accumulation_dtype(weight.dtype))

    last = len(call.shape) - 1
    return [
        Entry(
            weight,
            "Lookup",
            rowwise(build, "embedding", input),
            refusal=_refusal(max_norm, scale_grad_by_freq),
            admits=lambda axis: axis != last,
            scratch=Scratch(weight.numel()),
            linear=True,
            sparse=sparse,
        )
    ]


@register_use(F.embedding_bag)
def _embedding_bag(
    call: Call,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    *_: Any,
    **__: Any,
) -> list[Entry]:
    refusal = _refusal(max_norm, scale_grad_by_freq)
    return [
        replace(fallback(call, parameter), refusal=refusal, linear=True, sparse=sparse and parameter is weight)
        for parameter in call.parameters
    ]


def _refusal(max_norm: float | None, scale_grad_by_freq: bool) -> tuple[str, str] | None:
    """Why a table with these options has no gradient of single samples, and what to do instead."""
    if max_norm is not None:
        return (
            "max_norm rescales rows of the table in place during the forward pass, so that the parameter "
            "that was used is no longer there",
            "rescale the table yourself after the optimizer's step, and drop max_norm",
        )
    if scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides by counts over the whole batch: rows of single samples depend on "
            "the others",
            "drop scale_grad_by_freq",
        )
    return None
