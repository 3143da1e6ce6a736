"""Shared memory of the nodes of a graph, and the nodes that write to it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.operator_schemas import get_signature_for_torch_op


class Aliases:
    """The nodes of a graph that may share memory, and the writes to that memory."""

    def __init__(self, graph: Graph) -> None:
        self._above: dict[Node, Node] = {}
        self._writes: list[tuple[Node, Node]] = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem or "unsafe" in str(node.target):  # views that do not declare it
                self._join(node, node.args[0])
            elif is_operation(node.target):
                for argument, given in _arguments_of(node.target, node.args, node.kwargs):
                    if argument.alias_info is not None:
                        for each in given:
                            if isinstance(each, Node):
                                self._join(node, each)
                written = written_by(node.target, node.args, node.kwargs)
                self._writes += [(node, each) for each in written if isinstance(each, Node)]

    def writes_to(self, node: Node) -> list[tuple[Node, Node]]:
        """Return the writes to memory that a node may share, each with the node that it writes through."""
        return [(write, target) for write, target in self._writes if self.share(target, node)]

    def share(self, first: Node, second: Node) -> bool:
        """Tell whether two nodes may share memory."""
        return self._root(first) is self._root(second)

    def _root(self, node: Node) -> Node:
        while node in self._above:
            node = self._above[node]
        return node

    def _join(self, node: Node, other: Node) -> None:
        first, second = self._root(node), self._root(other)
        if first is not second:
            self._above[first] = second


def written_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to, each tensor of a list by itself.

    Batch normalisation in training mode does not declare that it writes to running statistics.
    """
    found = [*_arguments_of(operation, args, kwargs)]
    trains = any(argument.name == "training" and given == [True] for argument, given in found)
    for argument, given in found:
        declares = argument.alias_info is not None and argument.alias_info.is_write
        if declares or (trains and argument.name.startswith("running_")):
            yield from (each for each in given if each is not None)


def _arguments_of(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield each argument that an operation declares, with the list of values passed for it."""
    for place, argument in enumerate(_schema_of(operation).arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        yield argument, given if isinstance(given, (list, tuple)) else [given]


def is_operation(target: Any) -> bool:
    """Tell whether a node calls an operation of PyTorch, which declares what it does with its arguments."""
    return isinstance(target, type(torch.ops.aten.alias.default))  # the class has no public name


@functools.cache
def _schema_of(operation: Any) -> Any:
    """Return the declaration of an operation: its arguments, and which it writes to or returns views of."""
    _, schemas = get_signature_for_torch_op(operation, return_schemas=True)
    assert schemas is not None
    (schema,) = schemas
    return schema
