"""Places where paths from the roots that pass no recorded loss meet the model.

# NOTE [Open paths]
packprop locates samples, and checks that they are separate, from the places where a loss begins: the inputs of
recorded losses. A term whose function packprop has not seen begins somewhere else: a loss called as a plain
function, a penalty on a second output, on activations or on derivatives of the model. The check would miss uses
that only such a term reaches. So packprop feeds samples in there as well, also if no loss was recorded: at the
output of the model that the path meets first; or at the outputs of the first use, if that output is a scalar or
there is none. Where the samples are there, only the rest of the graph shows. A loss of the user's own may also
read tensors of the model that are none of its arguments: they are found in the same way, from the loss on, and
count as arguments.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.losses import LOSSES
from packprop.engine.graph.graph import Graph


def find_open_places(graph: Graph, starts: list[Node], neighbours: dict[Node, list[Node]]) -> None:
    """Find the places where paths that pass no recorded loss meet the model; see NOTE [Open paths].

    Args:
        graph: The graph, with its uses, losses and outputs. It gets the places.
        starts: Nodes of the roots.
        neighbours: The upstream neighbours of each node.
    """
    losses = {loss.node for loss in graph.losses}
    met = _met(graph, starts, neighbours, losses)
    for loss in graph.losses:
        loss.is_open = met.pop((loss.call.edge.node, loss.call.edge.output_nr), None) is not None
        if loss.call.function not in LOSSES:
            arguments = {edge.node for edge in (loss.call.edge, *loss.others)}
            loss.others += _met(graph, neighbours[loss.node], neighbours, arguments).values()
    own = {edge.node for edge, *_ in graph.outputs}  # without losses, the outputs of the model are such places
    if graph.losses or any(node in own for node, _ in met):
        graph.open = [edge for (node, _), edge in met.items() if graph.losses or node not in own]


def _met(
    graph: Graph, starts: Iterable[Node], neighbours: dict[Node, list[Node]], ends: Container[Node]
) -> dict[tuple[Node, int], GradientEdge]:
    """Find the places where paths meet the model first, but for paths through ``ends``."""
    met: dict[tuple[Node, int], GradientEdge] = {}
    outputs = {edge.node: edge for edge, forward, shape in graph.outputs if forward.has_parameters and shape}
    uses = {node: use for use in graph.uses for node, _ in use.nodes.values()}
    stack = list(starts)
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node in ends:
            continue
        if node in outputs:
            met[node, outputs[node].output_nr] = outputs[node]
        elif node in uses:
            met.update({place: GradientEdge(*place) for place in uses[node].nodes.values()})
        else:
            above = [each for each in neighbours[node] if each not in seen]
            seen.update(above)
            stack += above
    return met
