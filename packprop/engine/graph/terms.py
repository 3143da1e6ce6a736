"""Terms beside the recorded losses: those that no sample enters (penalties, priors, entropies), and all others.

# NOTE [Terms without samples]
A term that depends on no sample belongs to no sample: per-sample quantities and the GGN are those of the rest
of the loss. So a parameter that the pass reaches outside of all uses is missing only if it may meet samples
there. It meets none if all of this holds; otherwise it stays missing:

* No data chose a part of it.
* The functions between it and the rest of the loss have no operands that the graph hides. The graph does not
  tell constants from samples. packprop accepts constants that are numbers, or buffers and parameters of
  extended modules, or that bring no axis of their own: samples come on an axis that no parameter has. A
  constant that shares memory with an input of a model is data.
* It is added to the rest of the loss, both are scalars or lie behind a recorded loss, and all later functions
  are linear in the sum. A product with the loss, or a root of the sum, is no sum of two terms.

# NOTE [Open paths]
packprop locates samples, and checks that they are separate, from the places where a loss begins: the inputs of
recorded losses. A term whose function packprop has not seen begins somewhere else: a loss called as a plain
function, a penalty on a second output, on activations or on derivatives of the model. The check would miss uses
that only such a term reaches. So packprop feeds samples in there as well, even if no loss was recorded: at the
output of the model that the path meets first; or at the outputs of the first use, if that output is a scalar or
there is none. Only the rest of the graph shows where the samples are there. A loss of the user's own may also
read tensors of the model that are none of its arguments: they are found in the same way, from the loss on, and
count as arguments.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.engine.functions.losses import LOSSES
from packprop.engine.functions.nodes import PRODUCTS, made_by, name_of_node
from packprop.engine.functions.operands import (
    ALIKE,
    ENTRY_BY_ENTRY,
    EXPANDING,
    HIDING,
    INDEXED,
    SUMS,
    VECTORS,
    WHOLE,
    WITH_SUMMAND,
    is_linear,
    saved_constants,
)
from packprop.engine.graph.completeness import shapes_of
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.search import depth_first, leaves_above, nodes_above, upstream_of
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.sharding import named_wholes
from packprop.engine.tensors.state import storage_of


def settle_terms(graph: Graph, starts: Sequence[Node]) -> None:
    """Find terms that no sample enters; see NOTE [Terms without samples].

    Their parameters and losses leave the graph's ``missing`` and ``losses``; the terms enter its ``terms``.
    """
    found = _Terms(graph)
    found.look(starts)
    graph.missing = [pair for pair in graph.missing if not found.is_free_of_samples(pair[1])]
    graph.losses = [loss for loss in graph.losses if loss.node not in found.free]
    graph.terms = found.edges(graph)
    graph.in_terms = {id(leaf): leaf for leaf in leaves_above(edge.node for edge in graph.terms)}


def meets_samples_unseen(graph: Graph) -> bool:
    """Tell whether parameters may meet samples in a graph that holds no use of them."""
    found = _Terms(graph)
    found.look([root.grad_fn for root in graph.roots if root.grad_fn is not None])
    return found.has_suspects


class _Terms:
    """The nodes of a graph, sorted by what they depend on: samples, or parameters alone."""

    def __init__(self, graph: Graph) -> None:
        self._use_at = {node: use for use in graph.uses for node in use.anchors}
        self._losses = {loss.node for loss in graph.losses}
        self._data_leaves = {id(ref()) for forward in graph.forwards for ref in forward.leaves}
        modules = graph.known_modules
        own = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        own += [*graph.leaves(), *(whole for module in modules for _, whole in named_wholes(module))]
        self._owned = {id(tensor) for tensor in own}
        if is_dry_run():  # tensors have no addresses, and packprop reads no constants
            own = []
        inputs = {place for forward in graph.forwards for place in forward.storages}
        self._data_storages = inputs - {storage_of(tensor) for tensor in own}
        self._known = {_place_of(tensor) for tensor in own}
        self._data: set[Node] = set()
        self._after_loss: set[Node] = set()
        self._parametric: set[Node] = set()
        self._bad: set[Node] = set()
        self._wide: set[Node] = set()
        self._joins: dict[Node, list[Node]] = {}
        self._spoilers: list[Node] = []
        """Nodes that some function is not linear in: no sum above them adds a term to the loss."""
        self._suspects: list[Node] = []
        self._strange = False
        """``True`` if some leaf is neither an input of a recorded call nor known to be a parameter."""
        self.free: set[Node] = set()
        """Nodes that are computed from parameters alone, and enter the rest of the loss by sums alone."""

    def look(self, starts: Sequence[Node]) -> None:
        """Sort the nodes of the graph, each after all nodes that it was computed from."""
        for node, done in depth_first(starts, self._upstream, {}):
            if done:
                self._sort(node)
        spoilt = {node for node, _ in depth_first(self._spoilers, self._upstream, {})}
        for join in spoilt.intersection(self._joins):
            self._suspects += self._joins.pop(join)
        self.free = self._parametric - set(nodes_above([*self._suspects, *self._bad]))

    def is_free_of_samples(self, node: Node) -> bool:
        """Tell whether a node takes a leaf as part of a term that no sample enters."""
        return node in self.free or (node in self._joins and self.free.issuperset(self._joins[node]))

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

    def _upstream(self, node: Node) -> list[Node]:
        use = self._use_at.get(node)
        return upstream_of(node) if use is None else [edge.node for edge in use.edges]

    def _sort(self, node: Node) -> None:
        """Sort one node, after everything upstream of it."""
        use = self._use_at.get(node)
        leaf = getattr(node, "variable", None)
        if use is not None:
            self._data.add(node)
            self._spoilers += self._upstream(node)
        elif leaf is not None:
            if id(leaf) in self._data_leaves:
                self._data.add(node)
            elif isinstance(leaf, nn.Parameter) or id(leaf) in self._owned:
                self._parametric.add(node)
            else:
                self._strange = True
        else:
            self._sort_function(node)

    def _sort_function(self, node: Node) -> None:
        above = {place: each for place, (each, _) in enumerate(node.next_functions) if each is not None}
        data = {place: each for place, each in above.items() if each in self._data}
        terms = {place: each for place, each in above.items() if each in self._parametric}
        if not data:
            if terms:
                self._sort_term(node, list(terms))
            return
        self._data.add(node)
        if any(each in self._after_loss or each in self._losses for each in data.values()):
            self._after_loss.add(node)
        if self._joins and not is_linear(node, [*data, *terms]):
            self._spoilers += data.values()
        if terms:
            # no sample has a share in a term that is added behind a loss, or to single numbers
            is_sum = name_of_node(node) in SUMS
            if is_sum and (node in self._after_loss or not any(_shape_at(node, place) for place in data)):
                self._joins[node] = list(terms.values())
            else:
                self._suspects += terms.values()

    def _sort_term(self, node: Node, terms: Sequence[int]) -> None:
        """Sort a function of parameters, and perhaps of constants."""
        self._parametric.add(node)
        name, shape = name_of_node(node), shapes_of(node)[0]
        above = [upstream for upstream, _ in node.next_functions]
        if any(above[place] in self._bad for place in terms) or not self._meets_no_samples(node, name, terms):
            self._bad.add(node)
        of_this_shape = [place for place in terms if _shape_at(node, place) == shape] or terms
        wide = name in EXPANDING or all(above[place] in self._wide for place in of_this_shape)
        if wide and shape.numel() > 1:
            self._wide.add(node)

    def _meets_no_samples(self, node: Node, name: str, terms: Sequence[int]) -> bool:
        above = [upstream for upstream, _ in node.next_functions]
        all_seen = len(terms) == len(above)
        if all_seen and name in WHOLE and name not in HIDING:
            return True
        constants = _constants_of(node)
        if constants is None or any(storage_of(tensor) in self._data_storages for tensor in constants):
            return False
        if name in ENTRY_BY_ENTRY:
            operands = [place for place in terms if above[place] not in self._wide]
            return any(name in ALIKE or _shape_at(node, place) == shapes_of(node)[0] for place in operands)
        unknown = [tensor for tensor in constants if _place_of(tensor) not in self._known]
        if name in VECTORS:
            return all(tensor.dim() < 2 for tensor in unknown)
        if name in INDEXED:
            taken = _shape_at(node, terms[0])  # a mask of it brings no axis of its own
            return all(each.dtype == torch.bool and each.shape == taken[: each.dim()] for each in unknown)
        if name in PRODUCTS:
            return not unknown and (name not in WITH_SUMMAND or 0 in terms)
        return False


def _shape_at(node: Node, place: int) -> torch.Size:
    """Return the shape of a node's operand at one place."""
    above, output = node.next_functions[place]
    assert above is not None
    leaf = getattr(above, "variable", None)
    return torch.Size(made_by(above)[output].shape) if leaf is None else leaf.shape


def _constants_of(node: Node) -> list[Tensor] | None:
    """Return the constants that a node saved, none in a dry run; ``None`` if they are gone."""
    if is_dry_run():
        return []
    try:
        return list(saved_constants(node))
    except RuntimeError:  # an earlier pass has freed them
        return None


def _place_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and number of a tensor's entries; ``None`` for tensors without an address."""
    try:
        return tensor.data_ptr(), tensor.numel()
    except (RuntimeError, NotImplementedError):
        return None


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
    """Find the places where paths meet the model first, but for paths through ``ends``.

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
