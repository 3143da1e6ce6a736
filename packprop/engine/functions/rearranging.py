"""Leaves whose entries were rearranged before a node takes them; the way back from gradients at the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.structures import Dense, Structure, rows
from packprop.engine.functions.entry import Cotangents, Entry, Samples
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.nodes import (
    RESHAPES,
    is_identity,
    made_by,
    name_of_node,
    names_of_nodes,
    saved_option,
)
from packprop.engine.tensors.layout import Layout

REARRANGING = RESHAPES | names_of_nodes("Permute Transpose T ToCopy Repeat")
"""Functions that rearrange all entries of a tensor; packprop needs only shapes to undo them."""


def of_leaf(call: NodeCall, entry: Entry) -> Entry:
    """Return the entry of the leaf, if the entry's parameter is a rearranged leaf; else ``entry``."""
    above, way = before_rearranging(call.node.next_functions[call.place][0])
    leaf = getattr(above, "variable", None)
    if leaf is None or leaf.dtype.is_complex != entry.parameter.dtype.is_complex:
        return entry

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        structure = entry.structure_of(cotangents, layouts, samples)
        if structure.rows is None:
            return Dense(None)
        gradients = rows(structure)
        for back in way:
            gradients = back(gradients)
        return Dense(gradients.reshape(*gradients.shape[:2], *leaf.shape))

    return entry.but(
        parameter=leaf, structure="Dense", structure_of=structure_of, squares=None, fans=None, constant=False
    )


def before_rearranging(node: Any) -> tuple[Any, list[Callable[[Tensor], Tensor]]]:
    """Return the node whose output was rearranged up to ``node``, and the maps of gradients back to it."""
    way = list[Callable[[Tensor], Tensor]]()
    while node is not None and not hasattr(node, "variable"):
        name = name_of_node(node)
        below, number = node.next_functions[0] if node.next_functions else (None, 0)
        if below is None or name not in REARRANGING or is_identity(node):
            break
        way.append(_way_back(node, name, torch.Size(made_by(below)[number].shape)))
        node = below
    return node, way


def _way_back(node: Any, name: str, shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """Return the map from gradients at the output of a ``REARRANGING`` node to its input ``[v, n, *shape]``."""
    if name == "Permute":
        dims = [axis % len(shape) + 2 for axis in saved_option(node, "dims")]
        order = sorted(range(len(dims)), key=dims.__getitem__)
        return lambda rows: rows.permute(0, 1, *(axis + 2 for axis in order))
    if name in ("T", "Transpose") and len(shape) > 1:
        first, second = (0, 1) if name == "T" else (saved_option(node, "dim0"), saved_option(node, "dim1"))
        return lambda rows: rows.transpose(first % len(shape) + 2, second % len(shape) + 2)
    if name == "Repeat":
        times = list(saved_option(node, "repeats"))
        sizes = (1,) * (len(times) - len(shape)) + tuple(shape)
        pairs = [extent for pair in zip(times, sizes, strict=True) for extent in pair]
        axes = list(range(2, 2 + len(pairs), 2))
        return lambda rows: rows.reshape(*rows.shape[:2], *pairs).sum(axes).reshape(*rows.shape[:2], *shape)
    return lambda rows: rows.reshape(*rows.shape[:2], *shape)
