"""The graph of one backward pass: its uses and losses."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.entry import Entry
from packprop.engine.functions.node_rules import entries_of_node
from packprop.engine.graph.links import Entrance, entrance_of
from packprop.engine.graph.search import upstream_of
from packprop.engine.graph.site import Site
from packprop.engine.recording.marks import EXTENDED, ForwardCall, RecordedLoss, called_modules
from packprop.engine.tensors.hooks import NO_HOOKS, Hooks
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.names import named_parameters
from packprop.engine.tensors.sharding import ShardedUnit, named_wholes, sharded_units
from packprop.errors import PackpropError

WHOLE = Layout(None, 1)
"""The layout of a tensor that holds one sample."""


EAGER = "EagerBackward"
"""The name of the node that ``eager_backward`` leaves on the graph."""


@dataclass(eq=False)
class ReachedUse:
    """A node in which parameters meet samples, which the backward pass will reach.

    Args:
        name: Name of the function.
        entries: The entry of each parameter.
        shapes: Shapes of its outputs.
        nodes: The outputs that the pass reaches: index -> node, and number among the outputs of that node.
        sites: The sites of its parameters.
        is_end: Whether a sweep may end here, because no other use lies upstream.
        layouts: The layouts of its outputs; set when packprop locates the samples.
        prepare: Puts its parameters together, if they are sharded between processes.
        reordered: Whether its inputs come from a function that takes rows in an order that data decide on.
        undecided: Whether it may be made of parameters alone, because it is not certain that data enter.
        suspect: Whether it takes tensors in which samples meet. If they are separate here, it has mixed them.
        recomputed: Whether a checkpoint recomputes the tensors that its node saved.
        waits: Whether a visit must read the tensors that its node saved immediately: a checkpoint recomputes
            them, or a leaf waits for other uses, and the node may be freed by then.
        places: The places of its parameters among the inputs of the node, if the use was read off the graph.
    """

    name: str
    entries: list[Entry]
    shapes: list[torch.Size]
    nodes: dict[int, tuple[Node, int]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    is_end: bool = False
    layouts: list[Layout] = field(default_factory=list)
    prepare: Callable[[], None] | None = None
    reordered: bool = False
    undecided: bool = False
    suspect: bool = False
    recomputed: bool = False
    waits: bool = True
    places: Sequence[int] = ()

    @property
    def anchors(self) -> list[Node]:
        """The nodes of the use in the graph."""
        return [node for node, _ in self.nodes.values()]

    @property
    def edges(self) -> list[GradientEdge]:
        """The edges of the other inputs of the use, if it was read off the graph."""
        if not self.places:
            return []
        taken = enumerate(self.anchors[0].next_functions)
        return [
            GradientEdge(above, number)
            for place, (above, number) in taken
            if above is not None and place not in self.places
        ]

    def with_inputs(self) -> list[Entry]:
        """Return the entries with their inputs."""
        if not self.places:
            return self.entries
        return entries_of_node(self.anchors[0], self.places, self.shapes, True)

    def take(self) -> list[Site]:
        """Return the sites with their inputs; keep no reference to inputs that were recomputed."""
        if not self.places or not self.waits:
            return self.sites
        held = {id(entry): own for entry, own in zip(self.entries, self.with_inputs(), strict=True)}
        return [Site(held[id(site.entry)], site.leaf) for site in self.sites]


@dataclass(eq=False)
class ReachedLoss:
    """A recorded loss that the backward pass will reach.

    Args:
        node: The node of its value, which is output number ``output``.
        layout: The layout of its input; set when packprop locates the samples.
        is_open: Whether a path from the roots leads to its input without passing a recorded loss.
        others: The edges of its other arguments, such as a target, if uses lie above these.
    """

    call: RecordedLoss
    node: Node
    output: int
    layout: Layout = WHOLE
    is_open: bool = False
    others: list[GradientEdge] = field(default_factory=list)

    @functools.cached_property
    def given(self) -> list[GradientEdge]:
        """The edges of its arguments, first that of its input."""
        return [self.call.edge, *self.call.others]

    @property
    def value(self) -> GradientEdge:
        """The edge of its value."""
        return GradientEdge(self.node, self.output)

    @functools.cached_property
    def entrance(self) -> Entrance:
        """Its rule, and the edge where columns of its curvature are fed in."""
        return entrance_of(self.call)


@dataclass
class Graph:
    """Uses and losses between the roots of a backward pass and its leaves.

    Args:
        gradients: The gradient of each root; ``None`` for ones.
        uses: The uses, nearest to the roots first.
        outputs: Outputs of the outermost calls of extended models that the pass reaches: edge, call and shape.
        open: Edges where paths from the roots that pass no recorded loss meet the model, if there is a loss
            elsewhere; see NOTE [Open paths].
        without_loss: Labels of uses that some path from the roots reaches without passing a recorded loss.
        reorderings: Edges of tensors whose rows may be in another order, with the axes of these rows.
        hides_order: Whether somewhere data that packprop does not read decide which rows meet.
        mixers: Names of layers that mix samples.
        orders_by_values: Whether some function takes rows by indices or masks.
        consumed: Whether the pass reaches leaves outside of all uses.
        missing: Parameters that the pass reaches outside of all uses, each with the node that takes it.
        terms: Edges of terms that no sample enters, where they are added to the rest of the loss.
        in_terms: The leaves that enter such a term, by identity.
        hooks: The user's hooks on nodes and tensors of the pass, known after the walk.
        is_opaque: Whether a later pass of equal signature may compute something else.
        kept: Whether another pass through the same graph may follow.
        structure: A number that is equal for passes of equal structure.
        signature: A number that is equal for passes of equal structure and shapes.
        order: Its nodes, each after all nodes upstream of it.
        samples: The number of samples; set when packprop locates them.
        source_layouts: The layouts of the inputs of the losses, or of the model's outputs without losses; set
            when packprop locates the samples.
        asked: The request, for errors about samples.
        reading: Its sorted nodes, if parameters enter it.
        again: Walks once more, when packprop knows more about undecided uses.
        notes: The notes that passes of this structure leave for later ones, if the walk is kept.
        is_settled: Whether losses are known to be sums over samples, from this pass or an earlier one like it.
        known_leaves: The result of ``leaves``, if a kept walk knows it.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    uses: list[ReachedUse] = field(default_factory=list)
    losses: list[ReachedLoss] = field(default_factory=list)
    outputs: list[tuple[GradientEdge, ForwardCall, torch.Size]] = field(default_factory=list)
    reorderings: list[tuple[GradientEdge, frozenset[int]]] = field(default_factory=list)
    hides_order: bool = False
    open: list[GradientEdge] = field(default_factory=list)
    without_loss: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    orders_by_values: bool = False
    consumed: bool = False
    missing: list[tuple[Tensor, Node]] = field(default_factory=list)
    terms: list[GradientEdge] = field(default_factory=list)
    in_terms: dict[int, Tensor] = field(default_factory=dict)
    hooks: Hooks = NO_HOOKS
    is_opaque: bool = False
    kept: bool = True
    structure: int = 0
    signature: int = 0
    order: list[Node] = field(default_factory=list)
    samples: int = 0
    source_layouts: list[Layout] = field(default_factory=list)
    asked: str = "Quantities of single samples were asked for."
    reading: Any = None
    again: Callable[[], Graph] | None = None
    notes: deque[Any] = field(default_factory=deque)
    is_settled: bool = False
    known_leaves: list[Tensor] | None = field(default=None, init=False)  # a copy may have other uses

    @property
    def documents(self) -> Tensor | None:
        """The document of each position of the losses, in the order of their calls; ``None`` if undeclared."""
        calls = sorted((loss.call for loss in self.losses), key=lambda call: call.number)
        declared = [call.documents.flatten().cpu() for call in calls if call.documents is not None]
        return torch.cat(declared) if declared else None

    @property
    def forwards(self) -> list[ForwardCall]:
        """The calls of extended models that the pass goes through."""
        return list({id(forward): forward for _, forward, _ in self.outputs}.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The extended modules that were called."""
        return called_modules(self.forwards)

    @property
    def known_modules(self) -> list[nn.Module]:
        """All extended modules; those that were called come first."""
        return list({id(module): module for module in [*self.modules, *EXTENDED]}.values())

    def leaves(self) -> list[Tensor]:
        """Return every trainable leaf that enters a use, once."""
        if self.known_leaves is not None:
            return [*self.known_leaves]
        return list({id(site.leaf): site.leaf for use in self.uses for site in use.sites}.values())

    def _sites_on_nodes(self) -> Iterator[Site]:
        """Yield sites whose structures call nodes or pull back through them, and so need the graph."""
        for use in self.uses:
            for site in use.sites:
                if not site.direct or site.entry.calls_node(use.layouts) is not None:
                    yield site

    def owners(self) -> list[tuple[nn.Module, set[int]]]:
        """Return the modules that own leaves directly, each with the identities of these leaves."""
        leaves = {id(leaf) for leaf in self.leaves()}
        whole = {id(shard): key for key, shard in self.shards.items()}
        modules = {id(child): child for module in self.modules for child in module.modules()}.values()
        pairs = [
            (module, leaves & {whole.get(id(p), id(p)) for p in module.parameters(recurse=False)})
            for module in modules
        ]
        return [(module, owned) for module, owned in pairs if owned]

    @functools.cached_property
    def units(self) -> list[ShardedUnit]:
        """Parameters of the modules that are sharded between processes."""
        return sharded_units(self.modules)

    @functools.cached_property
    def shards(self) -> dict[int, nn.Parameter]:
        """The shard that the module holds of each leaf that was put together, by the identity of the leaf."""
        return {id(whole): shard for unit in self.units for whole, shard in unit.pairs}

    def home(self, leaf: Tensor) -> Tensor:
        """Return the tensor that gets the values of a leaf: the leaf, or the shard that the module holds."""
        return self.shards.get(id(leaf), leaf)

    def root_gradients(self) -> list[Tensor]:
        """Return the gradient of each root: the given one, or ones."""
        pairs = zip(self.roots, self.gradients, strict=True)
        return [torch.ones_like(root) if given is None else given for root, given in pairs]

    @property
    def holds_inputs(self) -> bool:
        """Tell whether every use holds its inputs, so that packprop recomputes none."""
        return not any(use.recomputed for use in self.uses)

    @property
    def calls_nodes(self) -> bool:
        """Tell whether building structures calls nodes or pulls back through them, and so needs the graph."""
        return next(self._sites_on_nodes(), None) is not None

    @property
    def ties_computed_parameters(self) -> bool:
        """Tell whether a leaf enters several uses, one of them through a tensor computed from parameters.

        packprop handles such a leaf when the pass reaches the last of its uses. By then the user's own pass has
        freed part of the graph between leaf and tensor.
        """
        times = Counter(id(site.leaf) for use in self.uses for site in use.sites)
        return any(times[id(site.leaf)] > 1 for site in self._sites_on_nodes())

    @property
    def shards_computed_parameters(self) -> bool:
        """Tell whether a leaf that is sharded between processes enters a use through a tensor computed from it.

        The nodes in between may be gone when the user's own pass reaches the use.
        """
        return any(not site.direct and id(site.leaf) in self.shards for use in self.uses for site in use.sites)

    def split_leaves(self, candidates: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the candidates that a pass can leave out, and all other leaves that it reaches.

        A pass that is restricted to the other leaves must still reach every use.
        """
        left_out, leaves = {id(leaf): leaf for leaf in candidates}, {}
        use_at = {node: use for use in self.uses for node, _ in use.nodes.values()}
        reached: set[Node] = set()
        for node in self.order:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
                if id(leaf) not in left_out:
                    reached.add(node)
            elif not reached.isdisjoint(upstream_of(node)):
                reached.add(node)
            elif node in use_at:
                for site in use_at[node].sites:
                    left_out.pop(id(site.leaf), None)
                reached.add(node)
        return list(left_out.values()), [leaf for key, leaf in leaves.items() if key not in left_out]

    def name(self, leaf: Tensor) -> str:
        """Return the parameter's name in an extended module, or words with its shape if it is in none."""
        for module in self.known_modules:
            for name, parameter in (*named_parameters(module), *named_wholes(module)):
                if parameter is leaf:
                    return name
        return f"a tensor of shape {list(leaf.shape)}"

    def distinct_names(self, asked: str) -> dict[int, str]:
        """Return the names of all leaves, by identity.

        Raises:
            PackpropError: With the request ``asked``, if two leaves have the same name.
        """
        known = {
            id(parameter): name
            for module in reversed(self.modules)
            for name, parameter in named_parameters(module)
        }
        names = {id(leaf): known.get(id(leaf)) or self.name(leaf) for leaf in self.leaves()}
        for name, count in Counter(names.values()).items():
            if count > 1:
                raise PackpropError(
                    f"{asked}() was asked for.",
                    f"parameters {name!r}, of which there are several",
                    "packprop tells parameters apart by their names here",
                    "extend the model that holds them all, and call it instead of its parts",
                )
        return names

    def label(self, use: ReachedUse) -> str:
        """Return the words for a use in messages: its function and its parameters."""
        names = ", ".join(repr(self.name(site.leaf)) for site in use.sites)
        return f"{use.name} of {names}"

    def hold(self, keep: bool) -> None:
        """Hold the inputs of losses while this pass runs; ``keep`` tells whether the graph stays after it."""
        self.kept = keep
        for loss in self.losses:
            loss.call.held = True

    def release_losses(self) -> None:
        """Let the last pass free the inputs of losses along with its nodes: they may be the largest tensors."""
        if not self.kept:
            for loss in self.losses:
                loss.call.held = False

    def drop_loss_inputs(self, but: Container[Node] = ()) -> None:
        """Drop the inputs of the losses, which may be the largest tensors: curvature alone needs them."""
        for loss in self.losses:
            if loss.node not in but:
                loss.call.drop_input()

    def release(self, keep: bool) -> None:
        """End the pass: drop the inputs of losses unless the graph is retained."""
        for loss in self.losses:
            loss.call.held = False
            if not keep:
                loss.call.args, loss.call.kwargs, loss.call.released = (), {}, True
