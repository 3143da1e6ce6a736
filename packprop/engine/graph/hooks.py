"""The user's hooks on the nodes and tensors of a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.engine.functions.nodes import DOERS, is_identity
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.marks import HOOKS, RETAINS, marks_of
from packprop.engine.tensors.hooks import NOTHING, Hooks, dictionaries_of_node, has_users_hooks, hooked
from packprop.errors import PackpropError


def hooks_on(nodes: Iterable[Node], tensors: Iterable[Tensor]) -> Hooks:
    """Return the user's hooks on nodes, on the tensors that these made, and on further tensors.

    Hooks on nodes of leaves are left out: they run in the user's pass alone.
    """
    chosen = hooked(tensors)
    dictionaries, doers, own = [], [], list[Node]()
    for node in nodes:
        if hasattr(node, "variable"):
            continue
        marks = marks_of(node)
        dictionaries += [*marks.get(HOOKS, ()), *filter(has_users_hooks, dictionaries_of_node(node))]
        chosen += [tensor for ref in marks.get(RETAINS, ()) if (tensor := ref()) is not None]
        if is_identity(node) and node.name() in DOERS:
            doers.append((node, DOERS[node.name()]))
        elif isinstance(node, BackwardCFunction):
            own.append(node)
    return Hooks(chosen, dictionaries, doers, own)


def hooks_below(roots: Sequence[Tensor], tensors: Iterable[Tensor] = ()) -> Hooks:
    """Return the user's hooks on everything that the roots were computed from, and on further tensors."""
    return hooks_on(nodes_above(root.grad_fn for root in roots), [*roots, *tensors])


def refusing_changed_sums(graph: Graph) -> AbstractContextManager[None]:
    """Refuse hooks inside the context that change a gradient of parameters, which is summed over samples.

    Hooks on leaves may change it: packprop documents that they act on ``.grad`` alone.
    """
    if graph.reading is None or not graph.hooks.are_inside:
        return NOTHING
    after = [dictionaries_of_node(use)[1] for use in graph.reading.uses]
    behind = hooks_on(graph.reading.made_of_parameters, ()).dictionaries
    return Hooks((), [*filter(has_users_hooks, after), *behind]).refusing_changes(_changed_sum)


def _changed_sum() -> PackpropError:
    return PackpropError(
        "Quantities of single samples were asked for.",
        "a hook that changed a gradient: it is on the node of a layer, or on a value that you compute from "
        "parameters alone",
        "the hook gets a gradient that is already summed over samples. packprop cannot apply it to single "
        "samples, so per-sample gradients would not add up to .grad",
        "put the hook on the parameter or on the output of the layer, or change .grad after the pass",
    )
