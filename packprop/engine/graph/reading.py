"""Find the nodes of the autograd graph where parameters meet the samples.

# NOTE [Uses in the graph]
Autograd has recorded the node that made each tensor, and the inputs of that node. A *use* is a node that takes
parameters and something that depends on the samples; everything on the way from the parameters to it is made of
parameters alone. The graph does not show where constants come from: ``mask * weight`` and ``x * weight`` look
alike. A constant is no data if it is a buffer or a frozen parameter of an extended module. It is data if it
shares memory with an input of the model. Every other node that takes parameters and constants is *undecided*:
it counts as a use until the sweeps that locate the samples decide (NOTE [Separation]). If the samples are
separate in the cotangents that arrive at the node, it is a use. If they meet there, it is made of parameters
alone, and packprop considers the node that takes its output instead. Two kinds of nodes stay uses, because the
alternative would hide layers that mix samples:

* A product of a weight and an unknown constant, if its output has room for the samples. It is a layer, and the
  samples meet behind it.
* A function of parameters alone that turns a tensor in which samples meet into one in which they are separate,
  and does not only repeat it. It has mixed them.

packprop remembers its decisions for graphs of the same structure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.functions.node_rules import entries_of_node
from packprop.engine.functions.nodes import (
    ENTRYWISE,
    NORMALISATIONS,
    PRODUCTS,
    RESHAPES,
    is_change_of_view,
    is_from_outside,
    made_by,
    name_of_node,
    names_of_nodes,
    readable_name,
)
from packprop.engine.functions.operands import (
    ENTRY_BY_ENTRY,
    EXPANDING,
    HIDING,
    VECTORS,
    WHOLE,
    WITH_SUMMAND,
)
from packprop.engine.graph.completeness import nested
from packprop.engine.graph.constants import Constants
from packprop.engine.graph.graph import EAGER, Graph, ReachedUse
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.unrecorded import is_compiled_region
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import possible_layouts

MADE_OF_PARAMETERS = WHOLE - EXPANDING - HIDING
"""Functions without operands that the graph hides, if they have an edge for each operand."""


PASSING = RESHAPES | ENTRYWISE | names_of_nodes("T Transpose Permute ToCopy Neg Expand Repeat")
"""Functions whose rows are separate if and only if those of their input are."""


WEIGHTS = {
    "Addmm": (0, 2),
    "Linear": (1, 2),
    "Mm": (1,),
    "Mv": (0,),
    "Convolution": (1, 2),
    "NativeLayerNorm": (1, 2),
    "NativeGroupNorm": (1, 2),
    **dict.fromkeys(NORMALISATIONS, (1, 2)),
    "FusedRmsNorm": (1,),
    "PreluKernel": (1,),
    "Embedding": (0,),
    "EmbeddingBag": (0,),
}
"""Nodes of layers -> the places of the operands in which the samples meet."""


MANY = 1024
"""The number of structures that packprop remembers."""


_PARAMETRIC: dict[int, frozenset[int]] = {}
"""Structures of graphs -> the places of nodes that sweeps have shown to be made of parameters alone."""


class Reading:
    """Sorts the nodes of a graph, and makes uses of those where parameters meet samples.

    Args:
        graph: The graph of the pass.
        leaves: The nodes of leaves, with these.
        inputs: What each node takes, like ``next_functions``.
        places: The number of each node.
        wanted: Leaves that count as parameters, by identity.
        structure: Returns a number that is equal for graphs of the same nodes and edges.
    """

    def __init__(
        self,
        graph: Graph,
        leaves: dict[Node, Tensor],
        inputs: dict[Node, Any],
        places: dict[Node, int],
        wanted: dict[int, Tensor],
        structure: Callable[[], int],
    ) -> None:
        self._order, self._inputs, self._places = graph.order, inputs, places
        self._leaves, self._wanted = leaves, wanted
        self._roots = [(root.grad_fn, root.output_nr) for root in graph.roots if root.grad_fn is not None]
        self._structure, self._constants = structure, Constants(graph.forwards)
        taken = [(loss.call.shape, loss.call.declared) for loss in graph.losses]
        taken = taken or [(shape, forward.declared) for _, forward, shape in graph.outputs if shape]
        self._is_one_sample = any(all(map(_is_one, shape[axis or 0 :][:1])) for shape, axis in taken)
        self._below: set[Node] = set()
        self._derived: set[Node] = set()
        self.made_of_parameters: dict[Node, None] = {}
        self.uses: dict[Node, ReachedUse] = {}
        self.answers: dict[Node, bool | None] = {}
        """Nodes, each with whether its constants are known; the structure decides on everything else."""

    @property
    def settled(self) -> set[Node]:
        """Nodes that take parameters, and leave no use of these missing."""
        operands = [above for node in self.uses for above, _ in node.next_functions]
        led = {node for node in nodes_above(operands) if node in self.made_of_parameters}
        return {*self.uses, *led, *(node for node in self.made_of_parameters if node in self._below)}

    def sort(self, below_losses: set[Node], after_losses: set[Node]) -> None:
        """Sort all nodes in their order.

        Args:
            below_losses: Nodes that some loss depends on.
            after_losses: Losses, and nodes that depend on one.
        """
        self._below = below_losses
        reached = self._outputs_reached()
        parameters, data = self.made_of_parameters, set[Node]()
        for node in self._order:
            if node in self._leaves:
                if id(self._leaves[node]) in self._wanted:
                    parameters[node] = None
                else:
                    data.add(node)
                continue
            above = [each for each, _ in self._inputs[node]]
            given = [place for place, each in enumerate(above) if each in parameters]
            if not given or node in after_losses or not _can_be_called(node):
                data.add(node)
                continue
            kind = "use" if not data.isdisjoint(above) else self._kind(node, given)
            if kind == "parameters":
                parameters[node] = None
                continue
            use = self._use(node, given, reached[node])
            self.uses[node] = use
            if kind != "use":
                use.undecided = self._question(node, given)
            use.suspect = kind == "suspect"
            data.add(node)

    def _kind(self, node: Node, given: Sequence[int]) -> str:
        """Return the kind of a node that takes parameters, and perhaps constants."""
        remembered = self._places[node] in self._parametric
        kind = "parameters" if remembered else self._kind_by_operands(node, given)
        if kind != "parameters":
            return kind
        derived = any(node.next_functions[place][0] in self._derived for place in given)
        if derived and not remembered and node in self._below and not self._passes_on(node):
            return "suspect"
        if derived or (remembered and not is_dry_run()):  # without data nothing is mixed
            self._derived.add(node)
        return "parameters"

    def _passes_on(self, node: Node) -> bool:
        """Tell whether samples that meet in what a node takes meet in its result."""
        return name_of_node(node) in PASSING or self._has_no_room(node)

    def _has_no_room(self, node: Node) -> bool:
        """Tell whether what a node made is too small to hold the samples."""
        try:
            return not self._is_one_sample and all(_is_one(n) for each in made_by(node) for n in each.shape)
        except RuntimeError:  # nested tensors have no shape
            return False

    def _kind_by_operands(self, node: Node, given: Sequence[int]) -> str:
        """Return the kind of a node, given that what it takes was made of parameters alone."""
        name, is_own = name_of_node(node), is_from_outside(node)
        whole = len(given) == len(node.next_functions) and name in MADE_OF_PARAMETERS and not is_own
        if node not in self._below or whole or self._has_no_room(node) or name == "Repeat":
            return "parameters"
        if is_own:
            return "undecided"
        if name == "Expand":
            return "parameters" if is_dry_run() and self._becomes_a_weight(node) else "undecided"
        known = self.answers[node] = self._constants.are_known(node)
        if known is False:
            return "use"
        if known is None and is_dry_run() and self._is_likely_parametric(node, given):
            return "parameters"
        return "parameters" if known and name not in HIDING else "undecided"

    @functools.cached_property
    def _parametric(self) -> frozenset[int]:
        """The places of the nodes that an earlier pass has shown to be made of parameters alone."""
        return _PARAMETRIC.get(self._structure(), frozenset()) if _PARAMETRIC else frozenset()

    @functools.cached_property
    def _takers(self) -> dict[Node, list[tuple[Node, int]]]:
        """The nodes that take the outputs of each node, with the places of these operands."""
        takers: dict[Node, list[tuple[Node, int]]] = {}
        for node in self._order:
            for place, (above, _) in enumerate(self._inputs[node]):
                if above is not None:
                    takers.setdefault(above, []).append((node, place))
        return takers

    def _becomes_a_weight(self, node: Node) -> bool:
        """Tell from names and shapes of the nodes downstream whether the samples meet in an expansion."""
        shape = torch.Size(made_by(node)[0].shape)
        for below, place in self._takers.get(node, []):
            name, new = name_of_node(below), torch.Size(made_by(below)[0].shape)
            if place in WEIGHTS.get(name, ()):
                return True
            entrywise = name in (ENTRY_BY_ENTRY | ENTRYWISE) - {"Stack"}
            if entrywise and (len(new), new[:1]) != (len(shape), shape[:1]):
                return True
            if (entrywise or name in PASSING) and self._becomes_a_weight(below):
                return True
        return False

    def _is_likely_parametric(self, node: Node, given: Sequence[int]) -> bool:
        """Tell whether samples most likely meet at a node; in a batch of one, none do."""
        return not self._is_one_sample and (self._keeps_shape(node, given) or _is_contracted(node, given))

    def _keeps_shape(self, node: Node, given: Sequence[int]) -> bool:
        """Tell whether a node works on a parameter entry by entry, and keeps its shape."""
        if not (is_change_of_view(node) or name_of_node(node) in ENTRY_BY_ENTRY):
            return False
        shape = torch.Size(made_by(node)[0].shape)
        edges = [node.next_functions[place] for place in given]
        leaves = [getattr(above, "variable", None) for above, _ in edges]
        return any(
            shape == torch.Size((made_by(above)[number] if leaf is None else leaf).shape)
            for (above, number), leaf in zip(edges, leaves, strict=True)
            if above is not None
        )

    def _outputs_reached(self) -> dict[Node, dict[int, None]]:
        reached: dict[Node, dict[int, None]] = {node: {} for node in self._order}
        for root, number in self._roots:
            reached[root][number] = None
        for node in self._order:
            for above, number in self._inputs[node]:
                if above in reached:
                    reached[above][number] = None
        return reached

    def _use(self, node: Node, places: Sequence[int], outputs: dict[int, None]) -> ReachedUse:
        try:
            shapes = [torch.Size(each.shape) for each in made_by(node)]
        except RuntimeError as error:  # PyTorch's message is about its internals
            raise nested(f"{node.name()}, which the backward pass goes through") from error
        if name_of_node(node) in WITH_SUMMAND:  # a bias comes after its weight
            places = list(reversed(places))
        entries = entries_of_node(node, places, shapes, False)
        return ReachedUse(
            readable_name(node),
            entries,
            shapes,
            {number: (node, number) for number in sorted(outputs)},
            places=places,
        )

    def _question(self, node: Node, given: Sequence[int]) -> Callable[[ReachedUse, int], bool]:
        """Return what decides on an undecided use, without this object: a circle would keep the graph alive."""
        kept, structure, place = self._parametric, self._structure, self._places[node]
        return functools.partial(_reclassify, node, given, self._constants, kept, structure, place)


def _reclassify(
    node: Node,
    given: Sequence[int],
    constants: Constants,
    parametric: frozenset[int],
    structure: Callable[[], int],
    place: int,
    use: ReachedUse,
    samples: int,
) -> bool:
    """Tell whether an undecided use is made of parameters alone, given that samples meet behind it.

    The finding is kept for graphs of the same structure.

    Args:
        node: The node of the use.
        given: The places of its parameters.
        constants: Tells whether constants are data.
        parametric: The places of nodes that were known before to be made of parameters alone.
        structure: Returns the structure of the graph.
        place: The number of the node.
        use: The use.
        samples: The number of samples.
    """
    is_layer = _is_layer(node, use.shapes[0], samples) and not _is_contracted(node, given)
    is_weight = set(given).issubset(WEIGHTS.get(name_of_node(node), ()))  # of a layer whose input is known
    if is_layer and not (is_weight and constants.are_known(node)):
        return False
    if len(_PARAMETRIC) >= MANY:
        _PARAMETRIC.clear()
    _PARAMETRIC[structure()] = _PARAMETRIC.get(structure(), parametric) | {place}
    return True


def _is_one(extent: Any) -> bool:
    """Tell whether an extent is one; that of rows of different lengths is no number."""
    return isinstance(extent, int) and extent == 1


def _is_contracted(node: Node, given: Sequence[int]) -> bool:
    """Tell whether a node contracts a parameter with a vector, which then holds no samples."""
    return name_of_node(node) in VECTORS and 0 in given


def _is_layer(node: Node, shape: torch.Size, samples: int) -> bool:
    """Tell whether a node is a product whose output has room for the samples."""
    return name_of_node(node) in PRODUCTS - ENTRY_BY_ENTRY and bool(possible_layouts(shape, samples))


def _can_be_called(node: Node) -> bool:
    return node.name() != EAGER and not is_compiled_region(node)
