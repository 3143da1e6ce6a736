"""Places where paths from the roots that pass no recorded loss meet the model.

# NOTE [Open paths]
packprop locates samples, and checks that they are separate, from the places where a loss begins: the inputs of
recorded losses. A term whose function packprop has not seen begins somewhere else: a loss called as a plain
function, a penalty on a second output or on activations. The check would miss uses that only such a term
reaches. So packprop feeds samples in there as well: at the input of a loss if its node tells which loss it is;
else at the output of the model that the path meets first; or at the outputs of the first use, if that output is
a scalar or there is none. In all but the first of these cases, only the rest of the graph shows where the
samples are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Size
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.losses import of_node
from packprop.engine.functions.nodes import made_by
from packprop.engine.graph.graph import Graph, OpenPlace


def find_open_places(graph: Graph, starts: list[Node], neighbours: dict[Node, list[Node]]) -> None:
    """Find the places where paths that pass no recorded loss meet the model; see NOTE [Open paths].

    Args:
        graph: The graph, with its uses, losses and outputs. It gets the places; those of losses that
            their nodes tell come first.
        starts: Nodes of the roots.
        neighbours: The upstream neighbours of each node.
    """
    told: dict[tuple[Node, int], OpenPlace] = {}
    met: dict[tuple[Node, int], OpenPlace] = {}
    outputs = {
        edge.node: (edge, shape) for edge, forward, shape in graph.outputs if forward.has_parameters and shape
    }
    uses = {node: use for use in graph.uses for node, _ in use.nodes.values()}
    losses = {loss.node for loss in graph.losses}
    stack, seen = list(starts), set(starts)
    while stack:
        node = stack.pop()
        if node in losses:
            continue
        if (place := _of_loss(node)) is not None:
            told[place.edge.node, place.edge.output_nr] = place
        elif node in outputs:
            edge, shape = outputs[node]
            met[node, edge.output_nr] = OpenPlace(edge, shape)
        elif node in uses:
            shapes = uses[node].recorded.shapes
            for index, (own, output) in uses[node].nodes.items():
                met[own, output] = OpenPlace(GradientEdge(own, output), shapes[index])
        else:
            above = [each for each in neighbours[node] if each not in seen]
            seen.update(above)
            stack += above
    places = {**met, **{key: replace(place, is_open=key in met) for key, place in told.items()}}
    for loss in graph.losses:
        loss.is_open = places.pop((loss.call.edge.node, loss.call.edge.output_nr), None) is not None
    if graph.losses or told:
        graph.open = sorted(places.values(), key=lambda place: place.loss is None)


def _of_loss(node: Node) -> OpenPlace | None:
    """Return the input of a loss that was not recorded, if the node tells which loss it is."""
    rule = of_node(node.name())
    above, output = node.next_functions[0] if rule is not None else (None, 0)
    if rule is None or above is None:
        return None
    made = made_by(above)[output]
    shape = Size(made.shape)
    return OpenPlace(GradientEdge(above, output), shape, rule(shape), GradientEdge(node, 0))
