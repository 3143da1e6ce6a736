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

packprop remembers its decisions on undecided nodes for all graphs of the same model with the same nodes,
options and edges, whatever their shapes.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

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
    saved_option,
)
from packprop.engine.functions.operands import (
    ALIKE,
    BY_DATA,
    ENTRY_BY_ENTRY,
    EXPANDING,
    HIDING,
    INDEXED,
    SUMS,
    VECTORS,
    WHOLE,
    WITH_SUMMAND,
    is_mask,
    saves_constants,
)
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.functions.verdicts import Verdicts
from packprop.engine.graph.completeness import shape_at, shapes_of
from packprop.engine.graph.constants import Constants
from packprop.engine.graph.graph import EAGER, Graph, ReachedUse
from packprop.engine.graph.search import Trail, is_beside, nodes_above
from packprop.engine.recording.marks import EXTENDED
from packprop.engine.recording.unrecorded import is_compiled_region
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import possible_layouts

MADE_OF_PARAMETERS = WHOLE - EXPANDING - HIDING
"""Functions without operands that the graph hides, if they have an edge for each operand."""


PASSING = RESHAPES | ENTRYWISE | names_of_nodes("T Transpose Permute ToCopy Neg Expand Repeat")
"""Functions in whose output samples are separate if and only if they are separate in the input."""


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


_PARAMETRIC: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The module that was called first, or the first parameter -> nodes that sweeps have shown to be made of
parameters alone, each by the wiring of its graph and its place."""


class Reading:
    """The nodes of a graph, sorted, with uses made of the nodes where parameters meet samples.

    Args:
        graph: The graph of the pass.
        trail: The notes of the walk through it.
        wanted: Leaves that count as parameters, by identity.
        below_losses: Nodes that some loss depends on.
        with_sums: Whether terms may be added to numbers; else such sums are uses.
    """

    def __init__(
        self, graph: Graph, trail: Trail, wanted: dict[int, Tensor], below_losses: set[Node], with_sums: bool
    ) -> None:
        self._trail, self._wanted, self._below = trail, wanted, below_losses
        self._with_sums = with_sums
        self._roots = [(root.grad_fn, root.output_nr) for root in graph.roots if root.grad_fn is not None]
        self._forwards = graph.forwards
        self._constants = Constants(self._forwards)
        self._modules = graph.modules
        self._owner = self._modules[0] if self._modules else next(iter(wanted.values()))
        taken = [(loss.call.shape, loss.call.declared) for loss in graph.losses]
        taken = taken or [(shape, forward.declared) for _, forward, shape in graph.outputs if shape]
        self._is_one_sample = any(all(map(_is_one, shape[axis or 0 :][:1])) for shape, axis in taken)
        self._axes = {axis or 0 for _, axis in taken}
        self._derived, self._wide, self._first = set[Node](), set[Node](), dict[tuple[str, Node], Node]()
        self._numbers = set[Node]()
        self.made_of_parameters: dict[Node, None] = {}
        self.bad: set[Node] = set()
        """Nodes made of parameters that no loss depends on, and of constants that samples may be in."""
        self.uses: dict[Node, ReachedUse] = {}
        self.sums: list[Node] = []
        """Nodes that add something made of parameters to a number, behind the outputs of the models."""
        self.mixing: list[Node] = []
        """Uses that take nothing else of the samples than numbers computed from the outputs of the models."""
        self.answers: dict[Node, bool | None] = {}
        """Nodes, each with whether its constants are known; the structure decides on everything else."""

    @property
    def settled(self) -> set[Node]:
        """Uses, and nodes made of parameters on the way to one or to a loss: none of their uses is missing."""
        operands = [above for node in self.uses for above, _ in node.next_functions]
        led = {node for node in nodes_above(operands) if node in self.made_of_parameters}
        return {*self.uses, *led, *(node for node in self.made_of_parameters if node in self._below)}

    def sort(self, after_losses: set[Node]) -> None:
        """Sort all nodes in their order; ``after_losses`` are losses, and nodes that depend on one."""
        reached = self._outputs_reached()
        leaves, parameters, data = self._trail.leaves, self.made_of_parameters, set[Node]()
        for node in self._trail.order:
            if node in leaves:
                if id(leaves[node]) in self._wanted:
                    parameters[node] = None
                else:
                    data.add(node)
                continue
            above = [each for each, _ in self._trail.inputs[node]]
            given = [place for place, each in enumerate(above) if each in parameters]
            is_behind = bool(self._below) and node not in self._below and node not in after_losses
            met = [place for place, each in enumerate(above) if each in data] if is_behind else []
            takes_numbers = bool(met) and self._takes_numbers(node, met)
            if not given or node in after_losses or node.name() == EAGER or is_compiled_region(node):
                data.add(node)
                continue
            if takes_numbers and self._with_sums and name_of_node(node) in SUMS and self.are_numbers(node, met):
                self.sums.append(node)
                data.add(node)
                continue
            if takes_numbers or (met and self._lengthens_samples(node)):
                self.mixing.append(node)
            kind = "use" if not data.isdisjoint(above) else self._kind(node, given)
            if kind == "parameters":
                parameters[node] = None
                self._note_width(node, given)
                continue
            self.uses[node] = use = self._use(node, given, reached[node])
            use.undecided, use.suspect = kind != "use", kind == "suspect"
            data.add(node)

    def _takes_numbers(self, node: Node, met: Sequence[int]) -> bool:
        """Tell whether a node behind the outputs of the models takes numbers, or what was made of numbers."""
        takes = all(node.next_functions[at][0] in self._numbers or self.are_numbers(node, [at]) for at in met)
        if takes:
            self._numbers.add(node)
        return takes

    def _lengthens_samples(self, node: Node) -> bool:
        """Tell whether a node behind the outputs of the models puts parameters beside the samples."""
        return name_of_node(node) == "Cat" and saved_option(node, "dim") % len(shapes_of(node)[0]) in self._axes

    def are_numbers(self, node: Node, places: Sequence[int]) -> bool:
        """Tell whether operands of a node hold one number each, which is no row of a single sample."""
        shapes = [shape_at(node, place) for place in places]
        return not any(shapes) or (not self._is_one_sample and all(map(_is_one, itertools.chain(*shapes))))

    def _kind(self, node: Node, given: Sequence[int]) -> str:
        """Return the kind of a node that takes parameters, and perhaps constants."""
        kind, known = self._kind_by_operands(node, given), _PARAMETRIC.get(self._owner)
        remembered = bool(known) and (self._trail.wiring, self._trail.places[node]) in known
        if kind == "use" or (kind == "undecided" and not remembered):
            return kind
        derived = any(node.next_functions[place][0] in self._derived for place in given)
        is_new = derived and not remembered and node in self._below
        if is_new and not (name_of_node(node) in PASSING or self._has_no_room(node)):
            return "suspect"
        if derived or (remembered and not is_dry_run()):  # without data nothing is mixed
            self._derived.add(node)
        return "parameters"

    def _has_no_room(self, node: Node) -> bool:
        """Tell whether the outputs of a node are too small to hold the samples."""
        return not self._is_one_sample and all(_is_one(extent) for shape in shapes_of(node) for extent in shape)

    def _kind_by_operands(self, node: Node, given: Sequence[int]) -> str:
        """Return the kind of a node whose operands on the graph are made of parameters alone."""
        name, is_own = name_of_node(node), is_from_outside(node)
        whole = len(given) == len(node.next_functions) and name in MADE_OF_PARAMETERS and not is_own
        if node not in self._below:
            if not self._meets_no_samples(node, given):
                self.bad.add(node)
            return "parameters"
        if whole or name == "Repeat":
            return "parameters"
        has_no_room = self._has_no_room(node)
        is_number = has_no_room and not shapes_of(node)[0]
        if is_own:
            return "parameters" if is_number else "undecided"
        guesses = is_dry_run() and not self._is_one_sample  # a single sample meets no other
        if name == "Expand":
            is_clear = has_no_room or (guesses and self._becomes_a_weight(node))
            return "parameters" if is_clear else "undecided"
        known = self.answers[node] = self._constants.are_known(node)
        if known is False:  # also if it has no room for all samples: a loop may take one after the other
            return "use"
        if has_no_room and (known or is_number):
            return "parameters"
        if known is None and guesses:
            is_likely = _keeps_shape(node, given) or _is_contracted(node, given) or self._counts(node)
            return "parameters" if is_likely else "undecided"
        return "parameters" if known and name not in HIDING else "undecided"

    @functools.cached_property
    def _takers(self) -> dict[Node, list[tuple[Node, int]]]:
        """The nodes that take the outputs of each node, with the places of these operands."""
        takers: dict[Node, list[tuple[Node, int]]] = {}
        for node in self._trail.order:
            for place, (above, _) in enumerate(self._trail.inputs[node]):
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

    def _counts(self, node: Node) -> bool:
        """Tell whether the indices of a node count positions: they have no axis that could hold samples."""
        constants = [] if keeps_elsewhere(node) else self._constants.of(node) or []
        unknown = [index for index, is_own in constants if not is_own]
        are_numbers = all(not index.is_floating_point() and not is_mask(index) for index in unknown)
        are_shared = bool(unknown) and all(index.dim() < 2 or index.shape[0] == 1 for index in unknown)
        return name_of_node(node) in BY_DATA and are_numbers and are_shared

    def _note_width(self, node: Node, given: Sequence[int]) -> None:
        """Note whether the shape of a node comes from an expansion, and not from a parameter."""
        wide = [place for place in given if node.next_functions[place][0] in self._wide]
        operands = [node.next_functions[place][0] for place in given]
        expands = name_of_node(node) in EXPANDING or len({*operands}) < len(operands)  # or stacks one again
        if not wide and not expands:
            return
        shape = shapes_of(node)[0]
        of_this_shape = [place for place in given if shape_at(node, place) == shape] or given
        if shape.numel() > 1 and (expands or set(wide).issuperset(of_this_shape)):
            self._wide.add(node)

    def _meets_no_samples(self, node: Node, given: Sequence[int]) -> bool:
        """Tell whether no sample enters a function of parameters that no loss depends on.

        See NOTE [Terms without samples] in ``terms.py``.
        """
        name, shape = name_of_node(node), shapes_of(node)[0]
        above = [node.next_functions[place][0] for place in given]
        if not self.bad.isdisjoint(above):
            return False
        if len(given) == len(node.next_functions) and name in WHOLE - HIDING:
            return True
        constants = self._of_all.of(node)
        if constants is None or any(is_own is False for _, is_own in constants):
            return False
        # views of buffers look like other constants in a dry run: the pass decides
        unknown = [] if is_dry_run() else [tensor for tensor, is_own in constants if not is_own]
        if unknown and is_beside(node, self._first):
            return False
        if name in ENTRY_BY_ENTRY:
            own = [place for place, each in zip(given, above, strict=True) if each not in self._wide]
            return any(name in ALIKE or shape_at(node, place) == shape for place in own)
        if name in VECTORS:
            are_clear = all(tensor.dim() < 2 for tensor in unknown)
        elif name in INDEXED:  # a mask brings no axis of its own
            masked = shape_at(node, given[0])
            are_clear = all(is_mask(each) and each.shape == masked[: each.dim()] for each in unknown)
        else:
            are_clear = name in PRODUCTS and not unknown
        return are_clear and saves_constants(node)

    @functools.cached_property
    def _of_all(self) -> Constants:
        """A test of constants by the tensors of all extended models, also of those that were not called."""
        modules = [*self._modules, *EXTENDED]
        own = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return Constants(self._forwards, [weakref.ref(tensor) for tensor in own])

    def _outputs_reached(self) -> dict[Node, dict[int, None]]:
        reached: dict[Node, dict[int, None]] = {node: {} for node in self._trail.order}
        for root, number in self._roots:
            reached[root][number] = None
        for node in self._trail.order:
            for above, number in self._trail.inputs[node]:
                if above in reached:
                    reached[above][number] = None
        return reached

    def _use(self, node: Node, places: Sequence[int], outputs: dict[int, None]) -> ReachedUse:
        shapes = shapes_of(node)
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

    def reclassify(self, use: ReachedUse, samples: int) -> bool:
        """Tell whether an undecided use, behind which samples meet, is made of parameters alone; note this."""
        node = use.anchors[0]
        name = name_of_node(node)
        is_product = name in PRODUCTS - ENTRY_BY_ENTRY and not _is_contracted(node, use.places)
        is_layer = is_product and possible_layouts(use.shapes[0], samples)  # it has room for the samples
        is_weight = set(use.places).issubset(WEIGHTS.get(name, ()))  # of a layer whose input is known
        if is_layer and not (is_weight and self._constants.are_known(node)):
            return False
        verdicts = _PARAMETRIC.setdefault(self._owner, Verdicts())
        verdicts.note((self._trail.wiring, self._trail.places[node]))
        return True


def _is_one(extent: Any) -> bool:
    """Tell whether an extent is one; that of a nested tensor's rows is no number."""
    return isinstance(extent, int) and extent == 1


def _is_contracted(node: Node, given: Sequence[int]) -> bool:
    """Tell whether a node contracts a parameter with a vector, which then holds no samples."""
    return name_of_node(node) in VECTORS and 0 in given


def _keeps_shape(node: Node, given: Sequence[int]) -> bool:
    """Tell whether a node works on a parameter entry by entry, and keeps its shape."""
    if not (is_change_of_view(node) or name_of_node(node) in ENTRY_BY_ENTRY):
        return False
    shape = torch.Size(made_by(node)[0].shape)
    return any(shape_at(node, place) == shape for place in given)
