"""The user's hooks on what a backward pass goes through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from packprop.functions.nodes import DOERS, IDENTITIES, is_identity
from packprop.graph.search import nodes_above
from packprop.recording.marks import HOOKED, HOOKS, OUTPUT, USE, ForwardCall, RecordedUse, marks_of
from packprop.tensors.hooks import Hooks, dictionary_of_node, is_hooked


def is_of_interest(name: str, marks: dict[str, Any]) -> bool:
    """Whether hooks may be on a node, from its name and its marks, or on tensors that it made."""
    return name in IDENTITIES or HOOKS in marks or HOOKED in marks


def hooks_on(
    nodes: Iterable[Node],
    uses: Iterable[RecordedUse],
    forwards: Iterable[ForwardCall],
    tensors: Iterable[Tensor],
) -> Hooks:
    """The user's hooks.

    Args:
        nodes: Those of interest.
        uses: Uses on the way.
        forwards: Calls that were recorded: hooks may be on any tensor that came up in them.
        tensors: Further tensors that may have hooks.
    """
    chosen = [tensor for tensor in tensors if is_hooked(tensor)]
    for made in {forward.made for forward in forwards}:
        chosen += [tensor for tensor in made() if is_hooked(tensor)]
    dictionaries, doers = [hooks for use in uses for hooks in use.hooks], []
    for node in nodes:
        marks = marks_of(node)
        dictionaries += marks.get(HOOKS, ())
        if is_identity(node) and node.name() in DOERS:
            doers.append((node, DOERS[node.name()]))
        elif is_identity(node) or HOOKED in marks:
            dictionaries.append(dictionary_of_node(node))
    return Hooks(chosen, dictionaries, doers)


def hooks_below(roots: Sequence[Tensor], tensors: Iterable[Tensor] = ()) -> Hooks:
    """The user's hooks on everything that some tensors were computed from, and on further tensors."""
    nodes: list[Node] = []
    uses: list[RecordedUse] = []
    forwards: list[ForwardCall] = []
    for node in nodes_above(root.grad_fn for root in roots):
        marks = marks_of(node)
        uses += [use for use, _, _ in marks.get(USE, ())]
        if OUTPUT in marks:
            forwards.append(marks[OUTPUT][0])
        if is_of_interest(node.name(), marks):
            nodes.append(node)
    forwards += [use.forward for use in uses]
    return hooks_on(nodes, uses, forwards, [*roots, *tensors])
