"""What one backward pass goes through, as values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.errors import PackpropError
from packprop.functions.entry import Entry
from packprop.functions.losses import Loss
from packprop.graph.links import Entrance, entrance_of
from packprop.graph.site import Site
from packprop.recording.marks import EXTENDED, ForwardCall, RecordedLoss, Use
from packprop.tensors.hooks import Hooks
from packprop.tensors.layout import Layout
from packprop.tensors.names import named_parameters
from packprop.tensors.sharding import ShardedUnit, named_wholes, sharded_units

WHOLE = Layout(None, 1)
"""The layout of a tensor that holds one sample."""


EAGER = "EagerBackward"
"""Name of the node that ``eager_backward`` leaves on the graph."""


@dataclass(eq=False)
class ReachedUse:
    """A use that the backward pass will reach.

    Args:
        recorded: What was read of it off the graph.
        nodes: For each of its outputs that the pass reaches: index of the output -> node, and which of the
            node's outputs it is.
        sites: Leaves that enter it.
        is_end: Whether a sweep may end here, because no other use lies upstream.
        layouts: Where its outputs hold the samples; set when samples are located.
        checkpoint: The reentrant checkpoint that it is in; it has no nodes then.
        through: Reentrant checkpoints without any use, which a sweep to it may come through.
        prepare: Has its parameters put together, if they are sharded between processes.
        reordered: Whether its inputs come from a function that takes rows as data say.
        undecided: Notes that samples meet behind a use that takes no data for certain, with their number; says
            whether it is made of parameters alone then. ``None`` where data enter for certain.
        suspect: Whether it takes tensors in which samples meet, and has mixed them if they are apart here.
        recomputed: Whether a checkpoint computes again what its node saved.
        waits: Whether what its node saved is read when it is visited: it is recomputed, or a leaf of it waits
            for other uses, by which time the node may be freed.
        read: Makes the entries again, with what the node saved, if the use was read off the graph.
    """

    recorded: Use
    nodes: dict[int, tuple[Node, int]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    is_end: bool = False
    layouts: list[Layout] = field(default_factory=list)
    checkpoint: ReentrantCheckpoint | None = None
    through: Sequence[ReentrantCheckpoint] = ()
    prepare: Callable[[], None] | None = None
    reordered: bool = False
    undecided: Callable[[ReachedUse, int], bool] | None = None
    suspect: bool = False
    recomputed: bool = False
    waits: bool = True
    read: Callable[[], list[Entry]] | None = None

    @property
    def anchors(self) -> list[Node]:
        """The nodes where it stands in the graph: its own, or the node of the checkpoint that it is in."""
        own = [node for node, _ in self.nodes.values()]
        return own if self.checkpoint is None else [self.checkpoint.node]

    def is_ready(self) -> bool:
        """Whether the inputs are at hand."""
        return self.recorded.source is None or self.recorded.source.ready() is not None

    def entries(self) -> list[Entry]:
        """Entries with their inputs."""
        source = self.recorded.source
        if source is not None:
            return source.fetch()
        return self.recorded.entries if self.read is None else self.read()

    def take(self) -> list[Site]:
        """The sites with their inputs. Inputs that were computed again are handed over: no copy stays here."""
        source, entries = self.recorded.source, self.recorded.entries
        if source is not None:
            with_inputs = source.fetch()
            source.taken()
            return [site.renewed(entries, with_inputs) for site in self.sites]
        if self.read is None or not self.waits:
            return self.sites
        held = {id(entry): own for entry, own in zip(entries, self.read(), strict=True)}
        return [Site(held[id(site.entry)], site.leaf) for site in self.sites]


@dataclass(eq=False)
class ReentrantCheckpoint:
    """A reentrant checkpoint that the pass goes through; see NOTE [Reentrant checkpoints].

    Args:
        node: The checkpoint's node.
        walk: From tensors inside the checkpoint to the graph that leads to them.
        uses: The uses in it that lead to the roots.
        reached: Which of its outputs lead to the roots, by number.
    """

    node: Any
    walk: Callable[[Sequence[Tensor]], Graph]
    uses: list[ReachedUse] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)


@dataclass(eq=False)
class ReachedLoss:
    """A recorded loss that the backward pass will reach.

    Args:
        call: What was recorded of it.
        node: Where it stands in the graph.
        output: Which of the node's outputs it is.
        layout: Where its input holds the samples; set when samples are located.
        is_open: Whether a path from the roots leads to its input that passes no recorded loss.
    """

    call: RecordedLoss
    node: Node
    output: int
    layout: Layout = WHOLE
    is_open: bool = False

    @property
    def value(self) -> GradientEdge:
        """Where its value came from."""
        return GradientEdge(self.node, self.output)

    @functools.cached_property
    def entrance(self) -> Entrance:
        """What is known of it, and where columns of its curvature are fed in."""
        return entrance_of(self.call)


@dataclass(frozen=True)
class OpenPlace:
    """Where a path from the roots that passes no recorded loss meets the model; see NOTE [Open paths].

    Args:
        edge: Where the tensor came from.
        shape: Its shape.
        loss: What is known of the loss that took it; ``None`` if nothing is.
        value: Where the value of that loss came from.
        is_open: Whether a path leads there that passes no loss at all.
    """

    edge: GradientEdge
    shape: torch.Size
    loss: Loss | None = None
    value: GradientEdge | None = None
    is_open: bool = True


@dataclass
class Graph:
    """Uses and losses between the roots of a backward pass and its leaves.

    Args:
        roots: Tensors that the backward pass starts from.
        gradients: What is fed in at each root; ``None`` for ones.
        uses: The uses, those nearest to the roots first.
        losses: Recorded losses.
        outputs: Outputs of outermost calls, with their shapes.
        open: Where paths from the roots that pass no recorded loss meet the model, if there is a loss
            elsewhere, or one that its node tells.
        without_loss: Labels of uses that some path from the roots reaches without passing a recorded loss.
        reorderings: Where rows may stand in another order along some axes, with the shape there and the axes.
        hides_order: Whether data that are not looked at say which rows meet somewhere.
        mixers: Names of layers that mix samples.
        missing: Parameters that are reached outside of all uses, each with the node that consumes it.
        terms: Where terms that no sample enters are added to the rest of what is differentiated.
        in_terms: The leaves that enter such a term, by identity.
        checkpoints: Reentrant checkpoints that the pass goes through.
        hooks: The user's hooks on what the pass goes through, known after the walk.
        kept: Whether there may be another pass through the same graph.
        structure: Equal for passes of equal structure.
        signature: Equal for passes of equal structure and shapes.
        samples: Number of samples; set when samples are located.
        source_layouts: Where the inputs of the losses (without losses: the outputs of the model) hold the
            samples; set when samples are located.
        asked: What errors about samples say was asked for.
        reading: What was read off the graph, if something was.
        again: Walks once more, after more was found out about what was read.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    uses: list[ReachedUse] = field(default_factory=list)
    losses: list[ReachedLoss] = field(default_factory=list)
    outputs: list[tuple[GradientEdge, ForwardCall, torch.Size]] = field(default_factory=list)
    reorderings: list[tuple[GradientEdge, torch.Size, frozenset[int]]] = field(default_factory=list)
    hides_order: bool = False
    open: list[OpenPlace] = field(default_factory=list)
    without_loss: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    missing: list[tuple[Tensor, Node]] = field(default_factory=list)
    terms: list[GradientEdge] = field(default_factory=list)
    in_terms: dict[int, Tensor] = field(default_factory=dict)
    checkpoints: list[ReentrantCheckpoint] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    kept: bool = True
    structure: int = 0
    signature: int = 0
    samples: int = 0
    source_layouts: list[Layout] = field(default_factory=list)
    asked: str = "Quantities of single samples were asked for."
    reading: Any = None
    again: Callable[[], Graph] | None = None

    @property
    def documents(self) -> Tensor | None:
        """The document of each position of the losses, in the order of their calls; ``None`` if undeclared."""
        calls = sorted((loss.call for loss in self.losses), key=lambda call: call.number)
        declared = [call.documents.flatten().cpu() for call in calls if call.documents is not None]
        return torch.cat(declared) if declared else None

    @property
    def forwards(self) -> list[ForwardCall]:
        """The calls of extended models that the pass goes through."""
        forwards = [forward for _, forward, _ in self.outputs]
        return list({id(forward): forward for forward in forwards}.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The extended modules that were called."""
        modules = (forward.module() for forward in self.forwards)
        return list({id(module): module for module in modules if module is not None}.values())

    def leaves(self) -> list[Tensor]:
        """Every trainable leaf that enters a use, once."""
        return list({id(site.leaf): site.leaf for use in self.uses for site in use.sites}.values())

    def owners(self) -> list[tuple[nn.Module, set[int]]]:
        """Modules that own leaves directly, each with the identities of these leaves."""
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
        """By the identity of each leaf that was put together from shards, the shard that the module holds."""
        return {id(whole): shard for unit in self.units for whole, shard in unit.pairs}

    def home(self, leaf: Tensor) -> Tensor:
        """Where the values of a leaf are saved: on it, or on the shard that the module holds in its place."""
        return self.shards.get(id(leaf), leaf)

    def root_gradients(self) -> list[Tensor]:
        """The gradient that is fed in at each root: the given one, or ones."""
        pairs = zip(self.roots, self.gradients, strict=True)
        return [torch.ones_like(root) if given is None else given for root, given in pairs]

    @property
    def holds_inputs(self) -> bool:
        """Whether every use holds its inputs, so that none has to be computed again."""
        return not any(use.recomputed or use.recorded.source is not None for use in self.uses)

    @property
    def calls_nodes(self) -> bool:
        """Whether nodes are called, or pulled back through, to build structures: the graph must be there."""
        return any(
            not site.direct or site.entry.calls_node(use.layouts) is not None
            for use in self.uses
            for site in use.sites
        )

    @property
    def ties_computed_parameters(self) -> bool:
        """Whether a leaf enters several uses, one of them through a tensor computed from parameters.

        Such a leaf is dealt with when the last of its uses is reached. By then the user's own pass has freed
        part of the graph between leaf and tensor.
        """
        sites: dict[int, list[bool]] = {}
        for use in self.uses:
            for site in use.sites:
                needs_graph = not site.direct or site.entry.calls_node(use.layouts) is not None
                sites.setdefault(id(site.leaf), []).append(needs_graph)
        return any(len(own) > 1 and any(own) for own in sites.values())

    @property
    def shards_computed_parameters(self) -> bool:
        """Whether a leaf that is sharded between processes enters a use through a tensor computed from it.

        What lies between may be gone, in the user's own pass, when the use is reached.
        """
        return any(not site.direct and id(site.leaf) in self.shards for use in self.uses for site in use.sites)

    def name(self, leaf: Tensor) -> str:
        """The parameter's name in the module that was called."""
        for module in [*self.modules, *EXTENDED]:
            for name, parameter in (*named_parameters(module), *named_wholes(module)):
                if parameter is leaf:
                    return name
        return f"a tensor of shape {list(leaf.shape)}"

    def distinct_names(self, asked: str) -> dict[int, str]:
        """Names of all leaves, by identity.

        Raises:
            PackpropError: With what was ``asked`` for, if two leaves have the same name.
        """
        known = {
            id(parameter): name
            for module in reversed(self.modules)
            for name, parameter in named_parameters(module)
        }
        names = {id(leaf): known.get(id(leaf)) or self.name(leaf) for leaf in self.leaves()}
        for name in names.values():
            if [*names.values()].count(name) > 1:
                raise PackpropError(
                    f"{asked}() was asked for.",
                    f"parameters {name!r}, of which there are several",
                    "what belongs to a parameter is chosen by its name",
                    "extend the model that holds them all, and call it instead of its parts",
                )
        return names

    def label(self, use: ReachedUse) -> str:
        """What messages call a use: its function and its parameters."""
        names = ", ".join(repr(self.name(site.leaf)) for site in use.sites)
        return f"{use.recorded.name} of {names}"

    def hold(self, keep: bool) -> None:
        """Keep what uses and losses saved while this pass runs, even if autograd frees the graph.

        Args:
            keep: Whether the graph is retained after the pass.
        """
        self.kept = keep
        for loss in self.losses:
            loss.call.held = True

    def release_losses(self) -> None:
        """Let the last pass free the inputs of losses along with its nodes: they are as large as any tensor."""
        if not self.kept:
            for loss in self.losses:
                loss.call.held = False

    def drop_loss_inputs(self) -> None:
        """Let go of what the losses were given, which is as large as any tensor: no curvature is asked for."""
        for loss in self.losses:
            loss.call.drop_input()

    def drop_checkpoint_uses(self) -> None:
        """Drop the uses of reentrant checkpoints, which refer back to their checkpoint: no pass comes again."""
        for checkpoint in self.checkpoints:
            checkpoint.uses = []

    def release(self, keep: bool) -> None:
        """End the pass: drop what uses and losses saved, unless the graph is retained."""
        self.drop_checkpoint_uses()
        for loss in self.losses:
            loss.call.held = False
            if not keep:
                loss.call.args, loss.call.kwargs, loss.call.released = (), {}, True
