"""A head and its loss in one function, for kernels that compute both without calling their functions."""

from __future__ import annotations

from packprop.engine.functions.entry import Entry
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.nodes import WITHOUT_SECOND_DERIVATIVE
from packprop.engine.functions.registry import rule_of
from packprop.engine.functions.samplewise import samplewise

SUMMED = (
    "linear_cross_entropy with options sums over all samples inside one kernel, which takes its gradient in "
    "the forward pass: nothing is left of single samples, and second derivatives would count as zero",
    "call it with options=None; or, to hold the logits of some tokens only, F.linear and F.cross_entropy(..., "
    'reduction="sum") on chunks of tokens, each chunk in torch.utils.checkpoint(..., use_reentrant=False)',
)


@rule_of(*(f"{name}_defaultBackward" for name in WITHOUT_SECOND_DERIVATIVE))
def _summed_in_chunks(call: NodeCall) -> Entry:
    return samplewise(call, refusal=SUMMED)
