"""Functions that look up rows of a table."""

from __future__ import annotations

import math

from torch import Tensor

from packprop.algebra.structures import Lookup, Structure
from packprop.functions.building import rowwise
from packprop.functions.entry import Entry, Scratch
from packprop.functions.node_calls import NodeCall
from packprop.functions.registry import rule_of
from packprop.functions.samplewise import samplewise
from packprop.tensors.precision import accumulation_dtype

SCALED_BY_COUNTS = (
    "scale_grad_by_freq divides by counts over the whole batch: rows of single samples depend on the others",
    "drop scale_grad_by_freq",
)
"""The reason why a table has no per-sample gradients, and what to do instead."""


@rule_of("Embedding", form="shape")
def _embedding(call: NodeCall) -> Entry:
    if call.option("scale_grad_by_freq"):
        return _called(call)
    table, width = call.operand.shape
    padding, dtype = call.option("padding_idx"), call.operand.tensor.dtype

    def build(cotangent: Tensor | None, index: Tensor) -> Structure:
        index = index.reshape(index.shape[0], -1)
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, width)
            if padding >= 0:
                cotangent = cotangent * (index != padding)[None, :, :, None]
        return Lookup(index, cotangent, table, accumulation_dtype(dtype))

    last = len(call.shape) - 1
    return Entry(
        call.operand.tensor,
        "Lookup",
        rowwise(build, call.saved("indices")),
        admits=lambda axis: axis != last,
        scratch=Scratch(math.prod(call.operand.shape)),
        linear=True,
        sparse=_is_sparse(call),
    )


@rule_of("EmbeddingBag", form="shape")
def _embedding_bag(call: NodeCall) -> Entry | None:
    return None if call.place else _called(call)


def _called(call: NodeCall) -> Entry:
    refusal = SCALED_BY_COUNTS if call.option("scale_grad_by_freq") else None
    return samplewise(call, linear=True, refusal=refusal, sparse=_is_sparse(call))


def _is_sparse(call: NodeCall) -> bool:
    return call.has_option("sparse") and bool(call.option("sparse"))
