"""Traced graphs: what can be left out of them, what they hold beside their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import GraphModule

IDENTITIES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operations that change nothing where nothing is differentiated."""


def tidy(graph: GraphModule) -> GraphModule:
    """Leave out what has no effect; the graph is run without gradients."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in IDENTITIES:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def constants_of(graph: GraphModule) -> Iterator[Tensor]:
    """The tensors that a graph holds beside its inputs."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = attrgetter(node.target)(graph)
            if isinstance(value, Tensor):
                yield value


def operations_of(graph: GraphModule) -> int:
    """How many operations a graph has."""
    return sum(node.op == "call_function" for node in graph.graph.nodes)
