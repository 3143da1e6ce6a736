"""Derivatives of the terms of a loss that no sample enters; see NOTE [Terms without samples]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.curvature.dependence import upstream_first
from packprop.engine.curvature.double_backward import diagonals
from packprop.engine.curvature.second_order import (
    differentiating_twice,
    gradients_at,
    named,
    require_second_derivatives,
)
from packprop.engine.functions.nodes import ENTRYWISE, made_by, name_of_node
from packprop.engine.functions.operands import ENTRY_BY_ENTRY, REARRANGING, SUMS, is_linear
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.pull import derivatives
from packprop.engine.graph.search import leaves_above
from packprop.engine.tensors.precision import accumulation_dtype

Entries = tuple[Node, int] | None
"""The output that arranged a tensor of single entries; ``None`` for sums of functions of single entries."""


def term_gradients(graph: Graph, leaves: Sequence[Tensor], create_graph: bool = False) -> list[Tensor | None]:
    """Return gradients of these terms in some leaves; ``None`` for a leaf in no term."""
    if not any(id(leaf) in graph.in_terms for leaf in leaves):
        return [None] * len(leaves)
    with torch.set_grad_enabled(create_graph):
        factors = gradients_at(graph, graph.terms)
        pairs = [(edge, at) for edge, at in zip(graph.terms, factors, strict=True) if at is not None]
        gradients = derivatives(
            [edge for edge, _ in pairs], leaves, [at for _, at in pairs], create_graph=create_graph
        )
    return [each.to_dense() if each is not None and each.is_sparse else each for each in gradients]


def term_diagonals(
    graph: Graph, leaves: Sequence[Tensor], create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each leaf in such a term with the diagonal ``[*p]`` of the Hessian of these terms.

    If each entry of a leaf enters functions of its own, as in most penalties, one product with ones gives the
    whole diagonal. Otherwise the gradient is differentiated entry by entry.
    """
    chosen = [leaf for leaf in leaves if id(leaf) in graph.in_terms]
    if not chosen:
        return
    require_second_derivatives(graph.roots, chosen, named(graph))
    with differentiating_twice(f"parameter {graph.name(chosen[0])!r}"):
        gradients = term_gradients(graph, chosen, create_graph=True)
    coupled = _coupled_leaves(graph)
    for leaf, gradient in zip(chosen, gradients, strict=True):
        if gradient is None or not gradient.requires_grad:
            continue
        where = f"parameter {graph.name(leaf)!r}"
        if id(leaf) in coupled:
            with torch.enable_grad():
                gradient = gradient.unsqueeze(0)
            yield leaf, diagonals(where, leaf, gradient, create_graph)[0]
            continue
        with differentiating_twice(where):
            ones = torch.ones_like(gradient)
            (diagonal,) = derivatives([gradient], [leaf], [ones], create_graph=create_graph)
        if diagonal is not None:
            yield leaf, diagonal.to(accumulation_dtype(diagonal.dtype))


def _coupled_leaves(graph: Graph) -> set[int]:
    """Return leaves with several entries in one nonlinear function: their Hessian may not be diagonal."""
    arranged: dict[tuple[Node, int], Entries] = {}
    coupled: set[Node] = set()
    for node in upstream_first([edge.node for edge in graph.terms]):
        given = [
            (place, (above, output))
            for place, (above, output) in enumerate(node.next_functions)
            if above is not None and ((above, output) in arranged)
        ]
        if getattr(node, "variable", None) is not None:
            arranged[node, 0] = (node, 0)
        if not given:
            continue
        entries = [arranged[key] for _, key in given]
        name, places = name_of_node(node), [place for place, _ in given]
        alike = None not in entries and len(set(entries)) == 1
        for output, made in enumerate(made_by(node)):
            arranged[node, output] = None
            if name in REARRANGING and None not in entries:
                arranged[node, output] = (node, output)
            elif alike and (name in ENTRYWISE or name in ENTRY_BY_ENTRY - SUMS or name in ("Add", "Sub")):
                above, number = given[0][1]
                same_shape = getattr(above, "variable", None) is not None or (
                    made_by(above)[number].shape == made.shape
                )
                arranged[node, output] = entries[0] if same_shape else None
            elif not is_linear(node, places):
                coupled.add(node)
    return set(map(id, leaves_above(coupled)))
