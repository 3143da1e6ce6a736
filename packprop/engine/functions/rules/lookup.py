"""Functions that look up rows of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.structures import Lookup, Structure
from packprop.engine.functions.building import rowwise, samplewise
from packprop.engine.functions.entry import Cotangents, Entry, Samples, Scratch, StructureOf
from packprop.engine.functions.node_calls import Computed, NodeCall, operand_at
from packprop.engine.functions.nodes import is_rounded, made_by, name_of_node
from packprop.engine.functions.rearranging import before_rearranging
from packprop.engine.functions.registry import rule_of
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype

SCALED_BY_COUNTS = (
    "scale_grad_by_freq divides by counts over the whole batch: rows of single samples depend on the others",
    "drop scale_grad_by_freq",
)
"""The reason why a table has no per-sample gradients, and what to do instead."""


@rule_of("Embedding", form="shape")
def _embedding(call: NodeCall) -> Entry:
    if call.option("scale_grad_by_freq"):
        return _called(call)
    return _rows_of_table(call, call.saved("indices"), _build(call, call.option("padding_idx")))


@rule_of("IndexSelect", form="shape")
def _index_select(call: NodeCall) -> Entry | None:
    """Return the entry of a table ``[e, o]`` that the node takes whole rows of."""
    if len(call.operand.shape) != 2 or call.option("dim") not in (0, -2):
        return None
    return _rows_of_table(call, call.saved("index"), _build(call))


def _rows_of_table(call: NodeCall, indices: Callable[[], Tensor], build: Callable[..., Lookup]) -> Entry:
    last = len(call.shape) - 1
    return Entry(
        call.operand.tensor,
        "Lookup",
        rowwise(build, indices),
        admits=lambda axis: axis != last,
        features=last,
        scratch=Scratch(math.prod(call.operand.shape)),
        linear=True,
        sparse=call.is_sparse,
    )


def _build(call: NodeCall, padding: int = -1) -> Callable[[Tensor | None, Tensor], Lookup]:
    """Return a function that builds a structure from cotangents ``[v, n, *s, o]`` and indices ``[n, *s]``."""
    entries, width = call.operand.shape
    dtype = accumulation_dtype(call.operand.tensor.dtype)

    def build(cotangent: Tensor | None, index: Tensor) -> Lookup:
        index = index.reshape(index.shape[0], -1)
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, width)
            if padding >= 0:
                cotangent = cotangent * (index != padding)[None, :, :, None]
        return Lookup(index, cotangent, entries, dtype)

    return build


def of_table(call: NodeCall, entry: Entry) -> Entry:
    """Return the entry of a table, if the node takes rows of it that all samples share; else ``entry``.

    Models look up embeddings of positions in this way, once for all samples. The rows may be rearranged, and
    multiplied by constants.
    """
    node, way = before_rearranging(call.node.next_functions[call.place][0])
    squared = [*way]
    while node is not None and (scale := _scale(node, call)) is not None:
        node, more = before_rearranging(next(above for above, _ in node.next_functions if above is not None))
        way, squared = [*way, scale, *more], [*squared, scale, scale, *more]
    if entry.structure != "Scale" or node is None or name_of_node(node) != "Embedding":
        return entry
    shapes = [torch.Size(made_by(node)[0].shape)]
    slot = call.slot.beside(node)
    table = NodeCall(slot, 0, operand_at(slot, 0, "shape"), shapes, call.holds)
    if isinstance(table.operand.tensor, Computed) or table.option("scale_grad_by_freq"):
        return entry
    build, indices = _build(table, table.option("padding_idx")), table.saved("indices")

    def of_rows(structure_of: StructureOf, way: Sequence[Callable[[Tensor], Tensor]]) -> StructureOf:
        def of_shared(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
            rows, index = structure_of(cotangents, layouts, samples).rows, indices()
            for back in way:
                rows = None if rows is None else back(rows)
            chosen = samples if isinstance(samples, Tensor) else range(layouts[0].samples)[samples]
            return replace(build(rows, index.expand(len(chosen), *index.shape)), shared=table.node)

        return of_shared

    return entry.but(
        parameter=table.operand.tensor,
        structure="Lookup",
        structure_of=of_rows(entry.structure_of, way),
        scratch=Scratch(math.prod(table.operand.shape)),
        squares=None if entry.squares is None else of_rows(entry.squares, squared),
        constant=False,
    )


def _scale(node: Any, call: NodeCall) -> Callable[[Tensor], Tensor] | None:
    """Return the map of gradients through a product with a constant, which ``call`` takes; else ``None``."""
    given = [place for place, (above, _) in enumerate(node.next_functions) if above is not None]
    name = name_of_node(node)
    if not (name == "Mul" and len(given) == 1) and not (name == "Div" and given == [0]):
        return None
    if is_rounded(node):
        return None
    (place,), shape = given, torch.Size(made_by(node)[0].shape)
    above, number = node.next_functions[place]
    if torch.Size(made_by(above)[number].shape) != shape:
        return None
    slot = call.slot.beside(node)
    product = NodeCall(slot, place, operand_at(slot, place), [shape], call.holds)
    constant = product.saved("self" if place else "other")

    def back(rows: Tensor) -> Tensor:
        rows, factor = rows.reshape(*rows.shape[:2], *shape), constant().to(rows)
        return rows / factor if name == "Div" else rows * factor

    return back


@rule_of("EmbeddingBag", form="shape")
def _embedding_bag(call: NodeCall) -> Entry | None:
    return None if call.place else _called(call)


def _called(call: NodeCall) -> Entry:
    refusal = SCALED_BY_COUNTS if call.option("scale_grad_by_freq") else None
    return samplewise(call, linear=True, refusal=refusal, sparse=call.is_sparse)
