"""The outline of a graph: its nodes in a fixed order, and a key that is equal for graphs of equal structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from packprop.engine.functions.entry import plain_options
from packprop.engine.functions.losses import LOSSES
from packprop.engine.functions.nodes import is_from_outside, made_by
from packprop.engine.functions.operands import EXPONENTS, numbers_of_type
from packprop.engine.recording.marks import HOOKS, LOSS, OUTPUT, RETAINS, ForwardCall, RecordedLoss, marks_of


class Outline(NamedTuple):
    """The nodes of a graph, and what tells its structure.

    Args:
        nodes: Its nodes, in an order that is the same for graphs of equal structure.
        places: The number of each node in this order.
        leaves: Its leaves.
        losses: Marked losses, each with its node and the number of its value among the outputs of the node.
        outputs: Marked outputs of models, each with its node and its number among the outputs of the node.
        key: A value that is equal for graphs of the same nodes, edges, options and leaves, with tensors of the
            same shapes and precisions, and with losses and models marked at the same places.
    """

    nodes: list[Node]
    places: dict[Node, int]
    leaves: list[Tensor]
    losses: list[tuple[Node, RecordedLoss, int]]
    outputs: list[tuple[Node, ForwardCall, int, Any]]
    key: tuple[Any, ...]

    @property
    def module(self) -> nn.Module | None:
        """The module that made its first marked output."""
        return self.outputs[0][1].module() if self.outputs else None

    def place(self, node: Node) -> int:
        """Return the number of a node; a new one if it was not met before."""
        number = self.places.get(node)
        if number is None:
            number = self.places[node] = len(self.nodes)
            self.nodes.append(node)
        return number


def outline(roots: Sequence[Tensor]) -> Outline | None:
    """Return the outline of a graph; ``None`` if the key would not tell what a pass through it computes.

    These are graphs with hooks of the user on tensors that are no leaves, with functions that PyTorch does not
    define, with losses of the user's own, with declared documents, with nested tensors, and with leaves that
    are no parameters.
    """
    key: list[Any] = []
    nodes: list[Node] = []
    found = Outline(nodes, {}, [], [], [], ())
    for root in roots:
        if root.grad_fn is None:
            return None
        key += (found.place(root.grad_fn), root.output_nr)
    for node in nodes:  # grows on the way
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if type(leaf) is not nn.Parameter:
                return None
            found.leaves.append(leaf)
            key += (id(leaf), *leaf.shape, leaf.dtype, leaf.device)
            continue
        marks = marks_of(node)
        if is_from_outside(node) or (marks and not _add_marks(found, node, marks, key)):
            return None
        edges = node.next_functions
        key += (node.name(), len(edges))
        for above, number in edges:
            key += (None,) if above is None else (found.place(above), number)
        try:
            for made in made_by(node):
                key += (*made.shape, made.dtype)
        except RuntimeError:  # of nested tensors
            return None
        for name in numbers_of_type(type(node)):
            value = getattr(node, name)
            key.append(value if type(value) is int else plain_options(value, name in EXPONENTS))
    return found._replace(key=tuple(key))


def _add_marks(found: Outline, node: Node, marks: dict[str, Any], key: list[Any]) -> bool:
    """Note the marks of a node; tell whether the key can tell them."""
    if HOOKS in marks or RETAINS in marks:
        return False
    if LOSS in marks:
        loss, output = marks[LOSS]
        if loss.documents is not None or loss.function not in LOSSES:
            return False
        found.losses.append((node, loss, output))
        key += (loss.function, *loss.shape, loss.declared, output)
    if OUTPUT in marks:
        forward, output, shape = marks[OUTPUT]
        found.outputs.append((node, forward, output, shape))
        key += (id(forward.module()), forward.declared, output, *shape)
    return True
