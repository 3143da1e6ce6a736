"""Functions that combine a parameter with data entry by entry."""

from __future__ import annotations

import torch
from torch import Tensor

from packprop.engine.functions.building import broadcast, scaled
from packprop.engine.functions.entry import Entry
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.nodes import is_rounded, made_by, names_of_nodes
from packprop.engine.functions.operands import ENTRY_BY_ENTRY
from packprop.engine.functions.registry import rule_of
from packprop.engine.tensors.precision import accumulation_dtype


@rule_of("Expand", "Alias")
def _expand(call: NodeCall) -> Entry:
    return scaled(call)


@rule_of("Add", "Sub")
def _sum(call: NodeCall) -> Entry:
    sign = -1.0 if call.name == "Sub" else 1.0
    return scaled(call, sign * float(call.option("alpha")) if call.place else 1.0)


@rule_of("Rsub")
def _difference(call: NodeCall) -> Entry:
    """Return the entry of an operand of ``other - alpha * self``."""
    return scaled(call, 1.0 if call.place else -float(call.option("alpha")))


@rule_of("Mul")
def _product(call: NodeCall) -> Entry:
    return scaled(call, call.saved("self" if call.place else "other"), linear=True)


@rule_of("Div")
def _quotient(call: NodeCall) -> Entry:
    if call.place or is_rounded(call.node):
        return broadcast(call)
    other, wide = call.saved("other"), accumulation_dtype(made_by(call.node)[0].dtype)
    return scaled(call, lambda: other().to(wide).reciprocal(), linear=True)


@rule_of("PreluKernel")
def _prelu(call: NodeCall) -> Entry | None:
    saved = call.saved("self")

    def negative_part() -> Tensor:
        x = saved()
        return torch.where(x >= 0, 0.0, x)  # constant at zero, as in autograd's own second derivative

    return scaled(call, negative_part, linear=True) if call.place else None


@rule_of(*(ENTRY_BY_ENTRY - names_of_nodes("Add Sub Rsub Mul Div Stack NativeDropout")))
def _entry_by_entry(call: NodeCall) -> Entry:
    return broadcast(call)
