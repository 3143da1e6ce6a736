"""The user's hooks on the nodes and tensors of a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import _global_backward_hooks

from packprop.engine.functions.nodes import DOERS, IDENTITIES, is_identity
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.marks import HOOKS, RETAINS, marks_of
from packprop.engine.tensors.hooks import Hooks, dictionary_of_node, is_hooked


def is_of_interest(name: str, marks: dict[str, Any]) -> bool:
    """Tell from the name and marks of a node whether it, or a tensor that it made, may have hooks."""
    return name in IDENTITIES or HOOKS in marks or RETAINS in marks


def has_older_hooks(modules: Iterable[nn.Module]) -> bool:
    """Tell whether a node that made a module's output may have hooks of the older kind.

    ``Module._backward_hooks`` and ``_global_backward_hooks`` are private, and only this function uses them: no
    public attribute shows that ``register_backward_hook`` was called. Full backward hooks have their own nodes.
    """
    return bool(_global_backward_hooks) or any(
        child._backward_hooks for module in modules for child in module.modules()
    )


def hooks_on(nodes: Iterable[Node], tensors: Iterable[Tensor]) -> Hooks:
    """Return the user's hooks on some nodes and tensors.

    Args:
        nodes: Nodes that may have hooks.
        tensors: Tensors that may have hooks.
    """
    chosen = [tensor for tensor in tensors if is_hooked(tensor)]
    dictionaries, doers = [], []
    for node in nodes:
        marks = marks_of(node)
        dictionaries += marks.get(HOOKS, ())
        chosen += [tensor for ref in marks.get(RETAINS, ()) if (tensor := ref()) is not None]
        if is_identity(node) and node.name() in DOERS:
            doers.append((node, DOERS[node.name()]))
        else:
            dictionaries.append(dictionary_of_node(node))
    return Hooks(chosen, dictionaries, doers)


def hooks_below(roots: Sequence[Tensor], tensors: Iterable[Tensor] = ()) -> Hooks:
    """Return the user's hooks on everything that some tensors were computed from, and on further tensors."""
    every = [node for node in nodes_above(root.grad_fn for root in roots) if not hasattr(node, "variable")]
    return hooks_on(every, [*roots, *tensors])
