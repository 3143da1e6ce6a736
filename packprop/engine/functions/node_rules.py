"""Entries of the parameters of one node: by its rule, or by calling the node for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import Node

from packprop.engine.functions.building import anywhere, samplewise
from packprop.engine.functions.entry import Entry
from packprop.engine.functions.node_calls import Computed, NodeCall, NodeSlot, has_complex_numbers, operand_at
from packprop.engine.functions.nodes import LINEAR, name_of_node
from packprop.engine.functions.operands import takes_sparse
from packprop.engine.functions.own_rules import checked
from packprop.engine.functions.rearranging import of_leaf
from packprop.engine.functions.registry import rule_for
from packprop.engine.functions.rules.lookup import of_table  # and with its package, all rules


def entries_of_node(
    node: Node,
    places: Iterable[int],
    shapes: Sequence[torch.Size],
    holds: bool,
    slots: list[NodeSlot] | None = None,
) -> list[Entry]:
    """Return one entry for each place among the ``next_functions`` of a node where a parameter enters it.

    ``shapes`` are the shapes of its outputs. With ``holds``, entries read the node's saved tensors now.
    ``slots`` gets the slots of all nodes that the entries read.
    """
    rule = rule_for(node)
    if rule is not None and (has_complex_numbers(node) or takes_sparse(node)):  # rules are for neither
        rule = None
    entries, slot = [], NodeSlot(node, slots)
    for place in places:
        form = "entries" if rule is None else rule.form
        call = NodeCall(slot, place, operand_at(slot, place, form), shapes, holds)
        entry = None
        if rule is not None and call.operand.tensor.numel():
            entry = checked(call, rule)
        if entry is None:
            entry = samplewise(call, linear=name_of_node(node) in LINEAR)
        else:
            entry = anywhere(call, entry)
        if isinstance(entry.parameter, Computed):
            entry = of_table(call, entry)
        entries.append(of_leaf(call, entry) if isinstance(entry.parameter, Computed) else entry)
    return entries
