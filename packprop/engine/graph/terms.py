"""Terms beside the recorded losses: those that no sample enters (penalties, priors, entropies), and all others.

# NOTE [Terms without samples]
A term that depends on no sample belongs to no sample: per-sample quantities and the GGN are those of the rest
of the loss. So a parameter that the pass reaches outside of all uses is missing only if it may meet samples
there. It meets none if all of this holds; otherwise it stays missing:

* Data do not select a part of it.
* The functions between it and the rest of the loss have no operands that the graph hides. The graph does not
  tell constants from samples. packprop accepts constants that are numbers, or buffers and parameters of
  extended modules, or that bring no axis of their own: samples come on an axis that no parameter has, or in a
  loop, where one function takes a parameter several times. A constant that shares memory with an input of a
  model is data.
* It is added to the rest of the loss, both are numbers or lie behind a recorded loss, and all later functions
  are linear in the sum. A product with the loss, or a root of the sum, is no sum of two terms.

Behind the outputs of extended models, packprop reads a sum of numbers in this way first, also for losses in
arithmetic of the user's own. If one of them adds no such term, or a parameter joins several numbers, each of
which may be that of a sample, it reads the graph again, with all of them uses. A use there that takes numbers
alone has no samples: ``require_separable`` refuses it.

# NOTE [Open paths]
packprop locates samples, and checks that they are separate, from the places where a loss begins: the inputs of
recorded losses. A term whose function packprop has not seen begins somewhere else: a loss called as a plain
function, a penalty on a second output, on activations or on derivatives of the model. The check would miss uses
that only such a term reaches. So packprop feeds samples in there as well, even if no loss was recorded: at the
output of the model that the path meets first; or at the outputs of the first use, if that output is a scalar or
there is none. Only the rest of the graph shows where the samples are there. A loss of the user's own may also
read tensors of the model that are none of its arguments: packprop finds them in the same way, starting at the
loss, and they count as arguments.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.engine.functions.losses import LOSSES
from packprop.engine.functions.nodes import RESHAPES, name_of_node, names_of_nodes
from packprop.engine.functions.operands import SUMS, is_linear
from packprop.engine.graph.completeness import shapes_of
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.search import leaves_above, nodes_above

OF_NUMBERS = SUMS | RESHAPES | names_of_nodes("Neg Sum Mean ToCopy Select Unbind")
"""Functions that a sum of numbers may go through, if something in it is to count as a term."""


def settle_terms(graph: Graph) -> bool:
    """Find terms that no sample enters; see NOTE [Terms without samples].

    Their parameters and losses leave the graph's ``missing`` and ``losses``; the terms enter its ``terms``.
    Return ``False`` if something else is added to a number behind the outputs of the models.
    """
    found = _Terms(graph)
    graph.missing = [pair for pair in graph.missing if not found.is_free_of_samples(pair[1])]
    graph.losses = [loss for loss in graph.losses if loss.node not in found.free]
    graph.terms = found.edges(graph)
    graph.in_terms = {id(leaf): leaf for leaf in leaves_above(edge.node for edge in graph.terms)}
    return found.adds_terms_alone


def meets_samples_unseen(graph: Graph) -> bool:
    """Tell whether parameters may meet samples in a graph that holds no use of them."""
    return graph.reading is not None and _Terms(graph).has_suspects


def is_made_of_parameters(graph: Graph) -> bool:
    """Tell whether the output of an extended model seems to be made of parameters and of constants alone."""
    made = {} if graph.reading is None else graph.reading.made_of_parameters
    takes_parameters = any(isinstance(getattr(node, "variable", None), nn.Parameter) for node in made)
    return takes_parameters and any(edge.node in made for edge, _, _ in graph.outputs)


class _Terms:
    """The nodes of a graph that depend on samples, and the places where terms made of parameters join these."""

    def __init__(self, graph: Graph) -> None:
        self._reading = graph.reading
        self._sums = set(graph.reading.sums)
        self._numbers: dict[Node, int] = {}
        """Sums of numbers, and what is computed from them, each with the number of its chain of sums."""
        self._parametric = graph.reading.made_of_parameters.keys()
        self._losses = {loss.node for loss in graph.losses}
        self._data: set[Node] = set()
        self._after_loss: set[Node] = set()
        self._joins: dict[Node, list[Node]] = {}
        self._spoilers: list[Node] = []
        """Nodes that some function is not linear in: no sum above them adds a term to the loss."""
        self._suspects: list[Node] = []
        self._strange = False
        """``True`` if some leaf is neither an input of a recorded call nor known to be a parameter."""
        self._look(graph)
        spoilt = set(nodes_above(self._spoilers))
        for join in spoilt.intersection(self._joins):
            self._suspects += self._joins.pop(join)
        self.free: set[Node] = self._parametric - set(nodes_above([*self._suspects, *graph.reading.bad]))
        """Nodes that are computed from parameters alone, and enter the rest of the loss by sums alone."""

    def is_free_of_samples(self, node: Node) -> bool:
        """Tell whether a node takes a leaf as part of a term that no sample enters."""
        return node in self.free or (node in self._joins and self.free.issuperset(self._joins[node]))

    @property
    def adds_terms_alone(self) -> bool:
        """Tell whether each sum of numbers adds a term, and each leaf to one number: loops may take samples."""
        chains: dict[int, int] = {}
        for node in self._sums:
            for leaf in leaves_above(above for above, _ in node.next_functions if above in self._parametric):
                if chains.setdefault(id(leaf), self._numbers[node]) != self._numbers[node]:
                    return False
        return all(map(self.is_free_of_samples, self._sums))

    @property
    def has_suspects(self) -> bool:
        """Tell whether parameters enter more than sample-free terms, or an unknown leaf may enter a loss."""
        return not self._parametric <= self.free or bool(self._strange and self._losses)

    def edges(self, graph: Graph) -> list[GradientEdge]:
        """Return the edges where terms join the rest of the loss, and the roots that are such terms."""
        roots = [get_gradient_edge(root) for root in graph.roots if root.requires_grad]
        found = {(edge.node, edge.output_nr): edge for edge in roots if edge.node in self.free}
        for join in self._joins:
            for above, output in join.next_functions:
                if above is not None and above in self.free:
                    found[above, output] = GradientEdge(above, output)
        return list(found.values())

    def _look(self, graph: Graph) -> None:
        """Look at the nodes that are not made of parameters alone, each after all nodes upstream of it."""
        inputs = {id(ref()) for forward in graph.forwards for ref in forward.leaves}
        uses = {node: use for use in graph.uses for node in use.anchors}
        for node in graph.order:
            leaf = getattr(node, "variable", None)
            if node in uses:
                self._data.add(node)
                self._spoilers += [edge.node for edge in uses[node].edges]
            elif leaf is not None and id(leaf) in inputs:
                self._data.add(node)
            elif node not in self._parametric:
                self._strange |= leaf is not None
                self._look_at_function(node)

    def _look_at_function(self, node: Node) -> None:
        above = {place: each for place, (each, _) in enumerate(node.next_functions) if each is not None}
        data = {place: each for place, each in above.items() if each in self._data}
        terms = {place: each for place, each in above.items() if each in self._parametric}
        if not (data or terms):
            return
        self._data.add(node)
        if any(each in self._after_loss or each in self._losses for each in data.values()):
            self._after_loss.add(node)
        if self._joins and not is_linear(node, [*data, *terms]):
            self._spoilers += data.values()
        chains = [self._numbers[each] for each in data.values() if each in self._numbers]
        if node in self._sums or chains:
            self._numbers[node] = (chains or [len(self._numbers)])[0]
            if not _handles_numbers(node):
                self._spoilers += data.values()
        if terms:
            # no sample has a share in a term that is added behind a loss, or to single numbers
            is_sum = name_of_node(node) in SUMS
            if is_sum and (node in self._after_loss or self._reading.are_numbers(node, [*data])):
                self._joins[node] = list(terms.values())
            else:
                self._suspects += terms.values()


def _handles_numbers(node: Node) -> bool:
    """Tell whether a function brings no constants with an axis to numbers, which may be those of samples."""
    name = name_of_node(node)
    return name in OF_NUMBERS or (name in ("Mul", "Div") and shapes_of(node)[0].numel() == 1)


def find_open_places(graph: Graph, inputs: Mapping[Node, Sequence[Any]]) -> None:
    """Note on the graph where paths that pass no recorded loss meet the model; see NOTE [Open paths].

    ``inputs`` has the ``next_functions`` of each node.
    """
    roots = [(root.grad_fn, root.output_nr) for root in graph.roots if root.grad_fn is not None]
    met = _met(graph, roots, inputs, {(loss.node, loss.output) for loss in graph.losses})
    for loss in graph.losses:
        given = (loss.call.edge.node, loss.call.edge.output_nr)
        loss.is_open = met.pop(given, None) is not None
        if loss.call.function not in LOSSES:
            arguments = {given, *((edge.node, edge.output_nr) for edge in loss.others)}
            loss.others += _met(graph, inputs[loss.node], inputs, arguments).values()
    # without losses, the outputs of the model are such places
    own = {(edge.node, edge.output_nr) for edge, *_ in graph.outputs}
    if graph.losses or not own.isdisjoint(met):
        graph.open = [edge for place, edge in met.items() if graph.losses or place not in own]


def _met(
    graph: Graph, starts: Iterable[Any], inputs: Mapping[Node, Sequence[Any]], ends: Container[Any]
) -> dict[tuple[Node, int], GradientEdge]:
    """Find the places where paths first meet the model; ignore paths through ``ends``.

    Starts, ends and places are outputs of nodes: a node, and a number among its outputs.
    """
    met: dict[tuple[Node, int], GradientEdge] = {}
    marked = [edge for edge, forward, shape in graph.outputs if forward.has_parameters and shape]
    outputs = {(edge.node, edge.output_nr) for edge in marked}
    uses = {node for use in graph.uses for node in use.anchors}
    stack = list(starts)
    seen = set(stack)
    while stack:
        node, number = place = stack.pop()
        if node is None or place in ends:
            continue
        if place in outputs or node in uses:
            met[place] = GradientEdge(node, number)
        else:
            above = [each for each in inputs[node] if each not in seen]
            seen.update(above)
            stack += above
    return met
