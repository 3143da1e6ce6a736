"""Calls of single nodes: on each sample's part of the cotangent, or entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.algebra.structures import Dense, Structure
from packprop.engine.functions.building import select_samples, sum_over_broadcast
from packprop.engine.functions.entry import Cotangents, Entry, Samples, Scratch
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype

AT_ONCE = 2**22
"""Largest number of entries of cotangents in one chunk, with a masked copy for each sample."""


def broadcast(call: NodeCall, **known: Any) -> Entry:
    """Return the entry of an operand that any entrywise node broadcasts against its output."""
    parameter = call.operand.tensor

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        product = call.products([cotangent])
        if product.shape != cotangent.shape:
            return samplewise(call).structure_of(cotangents, layouts, samples)
        product = select_samples(layout.to_front(product, 1), samples, 1)
        rows = sum_over_broadcast(product, layout, call.aligned, samples)
        return Dense(rows.reshape(*rows.shape[:2], *parameter.shape))

    return Entry(parameter, "Scale", structure_of, calls_node=lambda layouts: call.edge, **known)


def samplewise(call: NodeCall, **known: Any) -> Entry:
    """Return the entry of a node without a rule, called on each sample's part of the cotangent."""
    parameter = call.operand.tensor

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        arrived = [each for each in cotangents if each is not None]
        if not arrived:
            return Dense(None)
        numbers = _numbers(samples, layouts[0].samples)
        columns = len(arrived[0])
        entries = sum(each[:1].numel() for each in arrived) * columns
        step = max(1, AT_ONCE // max(1, entries))
        rows = []
        for start in range(0, len(numbers), step):
            own = numbers[start : start + step]
            masked = [
                None if each is None else _of_samples(own, each, layout).flatten(0, 1)
                for each, layout in zip(cotangents, layouts, strict=False)
            ]
            products = call.products(masked)
            if call.operand.shape != products.shape[1:]:
                ones = [1] * (products.dim() - 1 - len(call.operand.shape))
                products = products.sum_to_size(len(products), *ones, *call.operand.shape)
            rows.append(products.reshape(columns, len(own), *call.operand.shape))
        whole = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        whole = whole.mT if call.operand.is_transposed else whole
        whole = whole.reshape(*whole.shape[:2], *parameter.shape)
        return Dense(whole.to(accumulation_dtype(whole.dtype)))

    return Entry(
        parameter,
        "Dense",
        structure_of,
        scratch=Scratch(parameter.numel()),
        calls_node=lambda layouts: call.edge,
        by_rule=False,
        **known,
    )


def anywhere(call: NodeCall, entry: Entry) -> Entry:
    """Return an entry that uses the rule if it admits the samples, and else calls the node for each sample."""

    def is_admitted(layouts: Sequence[Layout]) -> bool:
        first = layouts[0]
        return first.axis is None or (not first.joined[1:] and entry.admits(first.axis))

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        if is_admitted(layouts):
            return entry.structure_of(cotangents, layouts, samples)
        return samplewise(call).structure_of(cotangents, layouts, samples)

    def calls_node(layouts: Sequence[Layout]) -> GradientEdge | None:
        return entry.calls_node(layouts) if is_admitted(layouts) else call.edge

    return entry.but(structure_of=structure_of, admits=lambda axis: True, calls_node=calls_node)


def _numbers(samples: Samples, count: int) -> list[int]:
    if isinstance(samples, slice):
        return list(range(count)[samples])
    return list(range(len(samples))) if is_dry_run() else samples.tolist()


def _of_samples(numbers: Sequence[int], cotangent: Tensor, layout: Layout) -> Tensor:
    """Return a cotangent ``[v, *y]`` for each of some samples, zero in all other rows: ``[v, m, *y]``."""
    if layout.axis is None:
        return cotangent.unsqueeze(1)
    owner = layout.sample_of(cotangent.device)
    own = owner == torch.tensor(list(numbers), device=cotangent.device).unsqueeze(1)  # [m, k]
    behind = cotangent.dim() - 1 - layout.behind
    form = [len(numbers), *[1] * layout.axis, *(layout.joined or (-1,)), *[1] * behind]
    return torch.where(own.reshape(form), cotangent.unsqueeze(1), cotangent.new_zeros(()))
