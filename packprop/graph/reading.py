"""Read off the autograd graph where parameters meet the samples.

# NOTE [Uses in the graph]
Autograd has recorded which node made each tensor of what. A *use* is a node that takes parameters and something that
depends on the samples; everything on the way from the parameters to it is made of parameters alone. The graph does not
show constants: ``mask * weight`` and ``x * weight`` look alike. So a node that takes parameters and perhaps a constant
is *undecided*: it counts as a use first. The sweeps that locate the samples tell (NOTE [Separation]): if samples are
apart in what arrives at it, it is one. If they meet there, it is made of parameters alone, and the node that takes its
output is looked at in its place. What was found so is kept for graphs of the same structure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from packprop.functions.entry import Entry
from packprop.functions.node_rules import entries_of_node
from packprop.functions.nodes import name_of_node
from packprop.functions.operands import EXPANDING, HIDING, WHOLE
from packprop.graph.graph import EAGER, Graph, ReachedUse
from packprop.graph.traversal import made_by
from packprop.recording.compiled import is_compiled_region
from packprop.recording.marks import Use
from packprop.recording.reentrant import is_reentrant

MADE_OF_PARAMETERS = WHOLE - EXPANDING - HIDING
"""Functions that take nothing that the graph does not show, if they have an edge for each operand."""


MANY = 1024
"""How many structures are remembered."""


_PARAMETRIC: dict[int, frozenset[int]] = {}
"""By structure of the graph, the places of nodes that sweeps have shown to be made of parameters alone."""


class Reading:
    """Sorts the nodes of a graph, and makes uses of those where parameters meet samples.

    Args:
        graph: What the pass goes through; gets the uses.
        order: Its nodes, each after all that lie upstream of it.
        places: The number of each node.
        wanted: Leaves that count as parameters, by identity.
        structure: Equal for graphs of the same nodes and edges.
    """

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Node],
        places: dict[Node, int],
        wanted: dict[int, Tensor],
        structure: int,
    ) -> None:
        self._graph, self._order, self._places, self._wanted = graph, order, places, wanted
        self._structure = structure
        self._below: set[Node] = set()
        self._parametric = _PARAMETRIC.get(structure, frozenset())
        self.made_of_parameters: dict[Node, None] = {}
        self.uses: dict[Node, ReachedUse] = {}
        self.undecided: dict[ReachedUse, Node] = {}

    @property
    def settled(self) -> set[Node]:
        """Nodes that parameters enter, and that nothing is missing for."""
        return {*self.uses, *(node for node in self.made_of_parameters if node in self._below)}

    def sort(self, below_losses: set[Node], after_losses: set[Node]) -> None:
        """Go through the nodes once.

        Args:
            below_losses: Nodes that some loss depends on.
            after_losses: Losses, and nodes that depend on one.
        """
        self._below = below_losses
        reached = self._outputs_reached()
        parameters, data = self.made_of_parameters, set[Node]()
        for node in self._order:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                if id(leaf) in self._wanted:
                    parameters[node] = None
                else:
                    data.add(node)
                continue
            above = [each for each, _ in node.next_functions]
            given = [place for place, each in enumerate(above) if each is not None and each in parameters]
            has_data = any(each in data for each in above if each is not None)
            if not given or is_reentrant(node):
                data.add(node)
                continue
            if node in after_losses or not self._can_be_called(node):
                data.add(node)
                continue
            if not has_data:
                whole = len(given) == len(above) and name_of_node(node) in MADE_OF_PARAMETERS
                whole = whole and not isinstance(node, BackwardCFunction)
                if whole or self._places[node] in self._parametric or node not in below_losses:
                    parameters[node] = None
                    continue
            use = self._use(node, given, reached[node])
            self.uses[node] = use
            if not has_data:
                self.undecided[use] = node
            data.add(node)

    def _can_be_called(self, node: Node) -> bool:
        return node.name() != EAGER and not is_compiled_region(node) and not node.name().endswith("CopySlices")

    def _outputs_reached(self) -> dict[Node, dict[int, None]]:
        reached: dict[Node, dict[int, None]] = {node: {} for node in self._order}
        for root in self._graph.roots:
            if root.grad_fn is not None:
                reached[root.grad_fn][root.output_nr] = None
        for node in self._order:
            for above, number in node.next_functions:
                if above is not None and above in reached:
                    reached[above][number] = None
        return reached

    def _use(self, node: Node, places: Sequence[int], outputs: dict[int, None]) -> ReachedUse:
        shapes = [torch.Size(each.shape) for each in made_by(node)]
        entries = entries_of_node(node, places, shapes, False)
        edges = [
            GradientEdge(above, number)
            for place, (above, number) in enumerate(node.next_functions)
            if above is not None and place not in places
        ]
        name = FUNCTIONS.get(name_of_node(node), node.name())
        recorded = Use(name, entries, edges, shapes)
        return ReachedUse(
            recorded,
            {number: (node, number) for number in sorted(outputs)},
            read=functools.partial(entries_of_node, node, places, shapes, True),
        )

    def reclassify(self, uses: Sequence[ReachedUse]) -> bool:
        """Note that the samples meet behind some undecided uses; whether there were any."""
        found = frozenset(self._places[self.undecided[use]] for use in uses if use in self.undecided)
        if not found:
            return False
        if len(_PARAMETRIC) >= MANY:
            _PARAMETRIC.clear()
        _PARAMETRIC[self._structure] = self._parametric | found
        return True


FUNCTIONS = {
    "Addmm": "linear",
    "Mm": "matmul",
    "Bmm": "bmm",
    "Convolution": "convolution",
    "NativeLayerNorm": "layer_norm",
    "NativeGroupNorm": "group_norm",
    "NativeBatchNorm": "batch_norm",
    "Embedding": "embedding",
    "Mul": "mul",
    "Add": "add",
    "Sub": "sub",
    "Div": "div",
    "Expand": "expand",
    "PreluKernel": "prelu",
}
"""Names of functions that users know, of nodes of their own."""
