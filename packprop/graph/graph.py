"""What one backward pass goes through, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.functions.entry import Entry
from packprop.graph.site import Site
from packprop.graph.traversal import depth_first, upstream_of
from packprop.recording.inputs import without_inputs
from packprop.recording.marks import EXTENDED, ForwardCall, RecordedLoss, RecordedUse
from packprop.recording.reentrant import Rerun, refused, run_again
from packprop.recording.regions import differs
from packprop.tensors.layout import Layout

WHOLE = Layout(None, 1)
"""A tensor that holds one sample."""


EAGER = "EagerBackward"
"""Name of the node that ``eager_backward`` leaves on the graph."""


@dataclass(eq=False)
class ReachedUse:
    """A use that the backward pass will reach.

    Args:
        nodes: For each of its outputs that is reached: the index, node and the node's output number.
        sites: Leaves that enter it.
        first: Whether no other use lies upstream.
        layouts: Where its outputs hold the samples; set when samples are located.
        host: The reentrant checkpoint that it is in; it has no nodes then.
    """

    recorded: RecordedUse
    nodes: dict[int, tuple[Node, int]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    first: bool = False
    layouts: list[Layout] = field(default_factory=list)
    checkpoint: ReentrantCheckpoint | None = None

    @property
    def anchors(self) -> list[Node]:
        """Nodes of the graph that it stands at: its own, or that of the checkpoint that it is in."""
        own = [node for node, _ in self.nodes.values()]
        return own if self.checkpoint is None else [self.checkpoint.node]

    def is_ready(self) -> bool:
        """Whether the inputs are at hand."""
        return self.recorded.source is None or self.recorded.source.ready() is not None

    def entries(self) -> list[Entry]:
        """Entries with their inputs."""
        source = self.recorded.source
        return list(self.recorded.entries or ()) if source is None else source.fetch()

    def take(self) -> list[Site]:
        """The sites with their inputs, which nobody else holds from now on if the use does not."""
        source, entries = self.recorded.source, self.recorded.entries
        if source is None or entries is None:
            return self.sites
        found = source.fetch()
        source.taken()
        return [site.of(entries, found) for site in self.sites]

    def release(self) -> None:
        """Let go of what the inputs are computed from, as the graph does in its last pass."""
        if self.recorded.source is not None:
            self.recorded.source.release()
            self.recorded.drop()


@dataclass(eq=False)
class ReentrantCheckpoint:
    """A reentrant checkpoint on the way, and the uses in it; see NOTE [Reentrant checkpoints].

    Args:
        node: The checkpoint's node.
        walk: From tensors in it to the graph that leads there.
        found: The uses in it that lead to the roots.
        reached: The numbers of its outputs that lead to the roots.
    """

    node: Any
    walk: Callable[[Sequence[Tensor]], Graph]
    uses: list[ReachedUse] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)

    def look(self, reached: set[int]) -> list[ReachedUse]:
        """The uses in it, without their inputs."""
        self.reached = reached
        rerun, graph = self.again()
        if graph.losses:
            raise refused("a loss in it is hidden from this pass")
        if graph.missing:
            leaf, consumer = graph.missing[0]
            raise refused(
                f"{consumer.name()} in it consumes a parameter of shape {list(leaf.shape)} out of sight"
            )
        given = {id(value) for value in rerun.inputs}
        if any(id(site.leaf) in given for found in graph.uses for site in found.sites):
            raise refused("a parameter is one of its arguments, where reentrant checkpointing cuts the graph")
        for found in graph.uses:
            use = found.recorded
            source = ReentrantInputs(self, len(self.uses))
            bare = RecordedUse(
                use.name, without_inputs(use.entries or (), source), [], use.shapes, use.forward, source
            )
            self.uses.append(ReachedUse(bare, checkpoint=self))
        graph.forget()
        return self.uses

    def again(self) -> tuple[Rerun, Graph]:
        """Run the checkpoint's function again, and walk the graph that this makes."""
        rerun = run_again(self.node)
        roots = [
            value
            for number, value in enumerate(rerun.outputs)
            if value is not None and value.requires_grad and number in self.reached
        ]
        graph = self.walk(roots)
        if self.uses and [(f.recorded.name, f.recorded.shapes) for f in self.uses] != [
            (f.recorded.name, f.recorded.shapes) for f in graph.uses
        ]:
            raise differs("a layer", "it called other functions")
        return rerun, graph


@dataclass(eq=False)
class ReentrantInputs:
    """Where a use in a reentrant checkpoint finds its inputs.

    Args:
        host: The checkpoint.
        number: Of the use in it.
    """

    checkpoint: ReentrantCheckpoint
    number: int
    live: list[Entry] | None = None

    def ready(self) -> list[Entry] | None:
        """Entries, while the checkpoint's own graph is there."""
        return self.live

    def fetch(self) -> list[Entry]:
        """Entries, for which the checkpoint's function is run again if need be."""
        if self.live is None:
            _, graph = self.checkpoint.again()
            for own, found in zip(self.checkpoint.uses, graph.uses, strict=True):
                assert isinstance(own.recorded.source, ReentrantInputs)
                own.recorded.source.live = found.entries()
            graph.forget()
        assert self.live is not None
        return self.live

    def taken(self) -> None:
        """The entries are in other hands."""
        self.live = None

    def release(self) -> None:
        """Nothing is kept from one pass to the next."""


@dataclass(eq=False)
class ReachedLoss:
    """A recorded loss that the backward pass will reach."""

    call: RecordedLoss
    node: Node
    output: int
    layout: Layout = WHOLE


@dataclass
class Graph:
    """Uses and losses between the roots of a backward pass and its leaves.

    Args:
        roots: Tensors that the backward pass starts from.
        gradients: What is fed in at each root.
        found: Uses, those nearest to the roots first.
        losses: Recorded losses.
        outputs: Outputs of outermost calls, with their shapes.
        unlosed: Names of uses that a path from the roots reaches without passing a recorded loss.
        mixers: Names of layers that mix samples.
        missing: Parameters that are reached outside of all uses, and the nodes that consume them.
        hosts: Reentrant checkpoints on the way.
        kept: Whether there may be another pass through the same graph.
        signature: Equal for passes of equal structure and shapes.
        samples: Number of samples; set when samples are located.
        fed: Where the inputs of the losses (or the outputs, without losses) hold them; set along.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    uses: list[ReachedUse] = field(default_factory=list)
    losses: list[ReachedLoss] = field(default_factory=list)
    outputs: list[tuple[GradientEdge, ForwardCall, torch.Size]] = field(default_factory=list)
    without_loss: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    missing: list[tuple[Tensor, Node]] = field(default_factory=list)
    checkpoints: list[ReentrantCheckpoint] = field(default_factory=list)
    kept: bool = True
    signature: int = 0
    samples: int = 0
    fed: list[Layout] = field(default_factory=list)

    @property
    def forwards(self) -> list[ForwardCall]:
        """The outermost calls that uses were recorded in."""
        found = [f.recorded.forward for f in self.uses] + [forward for _, forward, _ in self.outputs]
        return list({id(forward): forward for forward in found}.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The extended modules that were called."""
        modules = (forward.module() for forward in self.forwards)
        return list({id(module): module for module in modules if module is not None}.values())

    def leaves(self) -> list[Tensor]:
        """Every trainable leaf of a use, once."""
        return list({id(s.leaf): s.leaf for f in self.uses for s in f.sites}.values())

    def owners(self) -> list[tuple[nn.Module, set[int]]]:
        """Modules that own leaves themselves, each with the identities of those."""
        leaves = {id(leaf) for leaf in self.leaves()}
        modules = {id(m): m for module in self.modules for m in module.modules()}.values()
        own = [(module, leaves & {id(p) for p in module.parameters(recurse=False)}) for module in modules]
        return [(module, some) for module, some in own if some]

    def root_gradients(self) -> list[Tensor]:
        """What is fed in at each root: what was given, or ones."""
        pairs = zip(self.roots, self.gradients, strict=True)
        return [torch.ones_like(root) if given is None else given for root, given in pairs]

    def without(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves that a pass can do without, out of ``given``, and all others that it goes to.

        Every use must still be reached by a pass that is restricted to the others.
        """
        spared, leaves = {id(leaf): leaf for leaf in given}, {}
        own = {node: found for found in self.uses for node, _ in found.nodes.values()}
        roots = [root.grad_fn for root in self.roots if root.grad_fn is not None]
        reached: set[Node] = set()
        upstream: dict[Node, list[Node]] = {}
        for node, done in depth_first(roots, upstream_of, upstream):
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
            if not done:
                continue
            if leaf is not None and id(leaf) in spared:
                continue
            if node in own and not any(up in reached for up in upstream[node]):
                for site in own[node].sites:
                    spared.pop(id(site.leaf), None)
                reached.add(node)
            elif leaf is not None or any(up in reached for up in upstream[node]):
                reached.add(node)
        return list(spared.values()), [leaf for key, leaf in leaves.items() if key not in spared]

    @property
    def holds_inputs(self) -> bool:
        """Whether every use holds its inputs: nothing is computed again to get at them."""
        return all(found.recorded.source is None for found in self.uses)

    @property
    def entangled(self) -> bool:
        """Whether graphs of parameters alone must outlive the user's own pass, which frees them in part.

        A leaf that enters several uses is dealt with when the last of them is reached.
        """
        sites: dict[int, list[Site]] = {}
        for found in self.uses:
            for site in found.sites:
                sites.setdefault(id(site.leaf), []).append(site)
        return any(len(own) > 1 and not all(site.direct for site in own) for own in sites.values())

    def name(self, leaf: Tensor) -> str:
        """The parameter's name in the module that was called."""
        for module in [*self.modules, *EXTENDED]:
            for name, parameter in module.named_parameters():
                if parameter is leaf:
                    return name
        return f"a tensor of shape {list(leaf.shape)}"

    def label(self, found: ReachedUse) -> str:
        """How messages call a use: by its function and its parameters."""
        names = ", ".join(repr(self.name(site.leaf)) for site in found.sites)
        return f"{found.recorded.name} of {names}"

    def hold(self, keep: bool) -> None:
        """Keep what uses saved while this pass runs, whatever happens to the graph.

        Args:
            keep: Whether the graph is retained after it.
        """
        self.kept = keep
        for record in self._records():
            record.held = True

    def release_losses(self) -> None:
        """Before the last pass: its nodes let go of the inputs of losses, which are as large as any tensor."""
        if not self.kept:
            for loss in self.losses:
                loss.call.held = False

    def forget(self) -> None:
        """Nothing more will be asked of reentrant checkpoints: what refers to itself is taken apart."""
        for checkpoint in self.checkpoints:
            checkpoint.uses = []

    def release(self, keep: bool) -> None:
        """End of the pass: drop what uses saved unless the graph is retained."""
        self.forget()
        for record in self._records():
            record.held = False
            if not keep:
                if isinstance(record, RecordedUse):
                    record.drop()
                else:
                    record.args, record.kwargs, record.released = (), {}, True

    def _records(self) -> Iterator[RecordedUse | RecordedLoss]:
        yield from (found.recorded for found in self.uses)
        yield from (loss.call for loss in self.losses)
