"""What one backward pass will go through: uses and losses found again from the root, completeness, names.

# NOTE [Stepping over a use]
A function such as ``F.linear`` makes several nodes. The walk steps from a use's node to where its inputs came
from, over whatever lies between; so an edge into a parameter that the walk still meets belongs to no use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.errors import PackpropError
from packprop.reentrant import Rerun, is_reentrant, refused, run_again
from packprop.regions import differs, without_inputs
from packprop.structures import Dense, Outer, Structure, rows, with_squares
from packprop.tape import EXTENDED, LOSS, MIXES, OUTPUT, USE, Forward, LossCall, Use, marks_of
from packprop.types import Layout, accumulation_dtype
from packprop.uses import Entry, Meet, Samples, Signals, pulled, pulled_samplewise

WHOLE = Layout(None, 1)
"""A tensor that holds one sample."""
EAGER = "EagerBackward"
"""Name of the node that ``eager_backward`` leaves on the graph."""


@dataclass(frozen=True)
class Site:
    """Where one trainable leaf enters one use, directly or through tensors made of parameters alone."""

    entry: Entry
    leaf: Tensor

    def of(self, entries: Sequence[Entry], found: Sequence[Entry]) -> Site:
        """The same site among entries that were made again."""
        place = next(number for number, entry in enumerate(entries) if entry is self.entry)
        again = found[place].parameter if place < len(found) else None
        same = again is self.leaf if self.direct else again is not None and not again.is_leaf
        if not same:
            raise differs("a function", "it consumed other parameters")
        return Site(found[place], self.leaf)

    @property
    def direct(self) -> bool:
        """Whether the leaf itself is the argument of the function."""
        return self.entry.parameter is self.leaf

    @property
    def has_squares(self) -> bool:
        """Whether ``squares`` are known."""
        entry = self.entry
        told = entry.squares is not None or entry.structure in ("Outer", "Lookup")
        return self.direct and entry.linear and told

    def squares(
        self, signals: Sequence[Tensor | None], where: Sequence[Layout], samples: Samples
    ) -> Structure | None:
        """As ``meet`` for squares of what multiplies the leaf; ``None`` where they are not known."""
        if not self.has_squares:
            return None
        if self.entry.squares is not None:
            return self.entry.squares(signals, where, samples)
        return with_squares(self.entry.meet(signals, where, samples))

    def meet(
        self,
        signals: Sequence[Tensor | None],
        where: Sequence[Layout],
        samples: Samples,
        held: int | None = None,
    ) -> Structure:
        """The structure of the leaf: that of its entry, pulled back to the leaf where it is not direct.

        ``held``: bytes of one sample that an algorithm may hold if another holds less.
        """
        structure = self.entry.meet(signals, where, samples)
        if held is not None and isinstance(structure, Outer):
            structure = replace(structure, held=held)
        if self.direct:
            return structure
        if structure.rows is None:
            return Dense(None)
        return Dense(_pull_back(self.entry.parameter, self.leaf, rows(structure)))


def _pull_back(parameter: Tensor, leaf: Tensor, gradients: Tensor) -> Tensor:
    """From gradients of a tensor made of parameters ``[v, n, *d]`` to those of a leaf ``[v, n, *p]``."""
    flat = gradients.flatten(0, 1).to(parameter.dtype)
    found: Tensor = pulled([parameter], leaf, [flat]).unflatten(0, gradients.shape[:2])
    return found.to(accumulation_dtype(found.dtype))


@dataclass(eq=False)
class Found:
    """A use that the backward pass will reach.

    Args:
        nodes: For each of its outputs that is reached: the index, node and the node's output number.
        sites: Leaves that enter it.
        first: Whether no other use lies upstream.
        layouts: Where its outputs hold the samples; set when samples are settled.
        host: The reentrant checkpoint that it is in; it has no nodes then.
    """

    use: Use
    nodes: dict[int, tuple[Node, int]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    first: bool = False
    layouts: list[Layout] = field(default_factory=list)
    host: Host | None = None

    @property
    def anchors(self) -> list[Node]:
        """Nodes of the graph that it stands at: its own, or that of the checkpoint that it is in."""
        own = [node for node, _ in self.nodes.values()]
        return own if self.host is None else [self.host.node]

    def is_ready(self) -> bool:
        """Whether the inputs are at hand."""
        return self.use.source is None or self.use.source.ready() is not None

    def entries(self) -> list[Entry]:
        """Entries with their inputs."""
        source = self.use.source
        return list(self.use.entries or ()) if source is None else source.fetch()

    def take(self) -> list[Site]:
        """The sites with their inputs, which nobody else holds from now on if the use does not."""
        source, entries = self.use.source, self.use.entries
        if source is None or entries is None:
            return self.sites
        found = source.fetch()
        source.taken()
        return [site.of(entries, found) for site in self.sites]

    def release(self) -> None:
        """Let go of what the inputs are computed from, as the graph does in its last pass."""
        if self.use.source is not None:
            self.use.source.release()
            self.use.drop()


@dataclass(eq=False)
class Host:
    """A reentrant checkpoint on the way, and the uses in it; see NOTE [Reentrant checkpoints].

    Args:
        node: The checkpoint's node.
        wanted: As for ``walk``.
        found: The uses in it that lead to the roots.
        reached: The numbers of its outputs that lead to the roots.
    """

    node: Any
    wanted: Sequence[Tensor] | None
    found: list[Found] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)

    def look(self, reached: set[int]) -> list[Found]:
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
        if any(id(site.leaf) in given for found in graph.found for site in found.sites):
            raise refused("a parameter is one of its arguments, where reentrant checkpointing cuts the graph")
        for found in graph.found:
            use = found.use
            source = Hosted(self, len(self.found))
            bare = Use(use.name, without_inputs(use.entries or (), source), [], use.shapes, use.forward, source)
            self.found.append(Found(bare, host=self))
        graph.forget()
        return self.found

    def again(self) -> tuple[Rerun, Graph]:
        """Run the checkpoint's function again, and walk the graph that this makes."""
        rerun = run_again(self.node)
        roots = [
            value
            for number, value in enumerate(rerun.outputs)
            if value is not None and value.requires_grad and number in self.reached
        ]
        graph = walk(roots, [None] * len(roots), self.wanted)
        if self.found and [(f.use.name, f.use.shapes) for f in self.found] != [
            (f.use.name, f.use.shapes) for f in graph.found
        ]:
            raise differs("a layer", "it called other functions")
        return rerun, graph


@dataclass(eq=False)
class Hosted:
    """Where a use in a reentrant checkpoint finds its inputs.

    Args:
        host: The checkpoint.
        number: Of the use in it.
    """

    host: Host
    number: int
    live: list[Entry] | None = None

    def ready(self) -> list[Entry] | None:
        """Entries, while the checkpoint's own graph is there."""
        return self.live

    def fetch(self) -> list[Entry]:
        """Entries, for which the checkpoint's function is run again if need be."""
        if self.live is None:
            _, graph = self.host.again()
            for own, found in zip(self.host.found, graph.found, strict=True):
                assert isinstance(own.use.source, Hosted)
                own.use.source.live = found.entries()
            graph.forget()
        assert self.live is not None
        return self.live

    def taken(self) -> None:
        """The entries are in other hands."""
        self.live = None

    def release(self) -> None:
        """Nothing is kept from one pass to the next."""


@dataclass(eq=False)
class FoundLoss:
    """A recorded loss that the backward pass will reach."""

    call: LossCall
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
        samples: Number of samples; set when samples are settled.
        fed: Where the inputs of the losses (or the outputs, without losses) hold them; set along.
    """

    roots: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    found: list[Found] = field(default_factory=list)
    losses: list[FoundLoss] = field(default_factory=list)
    outputs: list[tuple[GradientEdge, Forward, torch.Size]] = field(default_factory=list)
    unlosed: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    missing: list[tuple[Tensor, Node]] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    kept: bool = True
    signature: int = 0
    samples: int = 0
    fed: list[Layout] = field(default_factory=list)

    @property
    def forwards(self) -> list[Forward]:
        """The outermost calls that uses were recorded in."""
        found = [f.use.forward for f in self.found] + [forward for _, forward, _ in self.outputs]
        return list({id(forward): forward for forward in found}.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The extended modules that were called."""
        modules = (forward.module() for forward in self.forwards)
        return list({id(module): module for module in modules if module is not None}.values())

    def leaves(self) -> list[Tensor]:
        """Every trainable leaf of a use, once."""
        return list({id(s.leaf): s.leaf for f in self.found for s in f.sites}.values())

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
        own = {node: found for found in self.found for node, _ in found.nodes.values()}
        roots = [root.grad_fn for root in self.roots if root.grad_fn is not None]
        reached: set[Node] = set()
        upstream: dict[Node, list[Node]] = {}
        for node, done in _depth_first(roots, _next, upstream):
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
        return all(found.use.source is None for found in self.found)

    @property
    def entangled(self) -> bool:
        """Whether graphs of parameters alone must outlive the user's own pass, which frees them in part.

        A leaf that enters several uses is dealt with when the last of them is reached.
        """
        sites: dict[int, list[Site]] = {}
        for found in self.found:
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

    def label(self, found: Found) -> str:
        """How messages call a use: by its function and its parameters."""
        names = ", ".join(repr(self.name(site.leaf)) for site in found.sites)
        return f"{found.use.name} of {names}"

    def hold(self, keep: bool) -> None:
        """Keep what uses saved while this pass runs, whatever happens to the graph.

        Args:
            keep: Whether the graph is retained after it.
        """
        self.kept = keep
        for record in self._records():
            record.held = True

    def part_with_losses(self) -> None:
        """Before the last pass: its nodes let go of the inputs of losses, which are as large as any tensor."""
        if not self.kept:
            for loss in self.losses:
                loss.call.held = False

    def forget(self) -> None:
        """Nothing more will be asked of reentrant checkpoints: what refers to itself is taken apart."""
        for host in self.hosts:
            host.found = []

    def let_go(self, keep: bool) -> None:
        """End of the pass: drop what uses saved unless the graph is retained."""
        self.forget()
        for record in self._records():
            record.held = False
            if not keep:
                if isinstance(record, Use):
                    record.drop()
                else:
                    record.args, record.kwargs, record.released = (), {}, True

    def _records(self) -> Iterator[Use | LossCall]:
        yield from (found.use for found in self.found)
        yield from (loss.call for loss in self.losses)


def walk(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: Sequence[Tensor] | None) -> Graph:
    """Find what a backward pass from ``roots`` will go through.

    Args:
        roots: Where it starts.
        gradients: What is fed in at each root; ``None`` for one.
        wanted: Leaves to restrict to; ``None`` for all.

    Raises:
        PackpropError: If a parameter's uses were not all recorded, samples are mixed by a known layer, or a
            recorded graph was freed.
    """
    graph = Graph(roots, gradients)
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    names: list[str] = []
    places: list[int] = []
    found: dict[Use, Found] = {}
    stepped: dict[Node, list[Node]] = {}
    order: list[Node] = []
    consumed: list[tuple[Tensor, Node]] = []

    for node, done in _depth_first(starts, lambda node: _over_uses(node, found), stepped):
        if done:
            order.append(node)
            continue
        name = node.name()
        names.append(name)
        marks = marks_of(node)
        if LOSS in marks:
            call, output = marks[LOSS]
            graph.losses.append(FoundLoss(call, node, output))
        if OUTPUT in marks:
            forward, output, shape = marks[OUTPUT]
            graph.outputs.append((GradientEdge(node, output), forward, shape))
        if is_reentrant(node):
            graph.hosts.append(Host(node, wanted))
            places.append(len(found))
        if MIXES in marks:
            graph.mixers.append(marks[MIXES])
        if USE not in marks:
            for upstream in stepped[node]:
                leaf = getattr(upstream, "variable", None)
                if leaf is not None:
                    consumed.append((leaf, node))
    found = _look_inside(graph, found, places, stepped)
    names += [f.use.name for host in graph.hosts for f in host.found]
    graph.found = list(found.values())
    _require_alive(graph)
    _find_sites(graph, wanted)
    _find_missing(graph, consumed, wanted)
    above = _above_losses(graph, starts, stepped)
    _adopt_missing(graph, above, found)
    graph.unlosed = [graph.label(f) for f in graph.found if any(node in above for node in f.anchors)]
    _find_first(order, stepped, found)
    _find_after_loss(graph, order, stepped)
    shapes = tuple((f.use.name, tuple(f.use.shapes)) for f in graph.found)
    kinds = tuple((loss.call.function, loss.call.shape) for loss in graph.losses)
    sizes = tuple(size for forward in graph.forwards for size in forward.sizes)
    graph.signature = hash((tuple(names), shapes, kinds, sizes, bool(graph.unlosed)))
    return graph


def _look_inside(
    graph: Graph, found: dict[Use, Found], places: list[int], stepped: dict[Node, list[Node]]
) -> dict[Use, Found]:
    """The same uses, with those of reentrant checkpoints in their places among them."""
    if not graph.hosts:
        return found
    reached: dict[Node, set[int]] = {host.node: set() for host in graph.hosts}
    edges = [get_gradient_edge(root) for root in graph.roots if root.grad_fn is not None]
    for node in stepped:
        marks = marks_of(node).get(USE)
        if marks is None:
            edges += [GradientEdge(up, output) for up, output in node.next_functions if up is not None]
        else:
            edges += [edge for use, _, _ in marks for edge in use.edges]
    for node, output, *_ in edges:
        if node in reached:
            reached[node].add(output)
    items = list(found.items())
    for host, place in reversed(list(zip(graph.hosts, places, strict=True))):
        items[place:place] = [(inside.use, inside) for inside in host.look(reached[host.node])]
    return dict(items)


def _depth_first(
    starts: Iterable[Node], upstream: Callable[[Node], list[Node]], stepped: dict[Node, list[Node]]
) -> Iterator[tuple[Node, bool]]:
    """Each node on the way down (``False``) and again when all upstream of it is done (``True``).

    Args:
        starts: Where to begin.
        upstream: The neighbours that a node leads to.
        stepped: Is filled with them.
    """

    def enter(node: Node) -> tuple[Node, Iterator[Node]]:
        stepped[node] = upstream(node)
        return node, iter(stepped[node])

    for start in starts:
        if start in stepped:
            continue
        stack = [enter(start)]
        yield start, False
        while stack:
            node, remaining = stack[-1]
            child = next(remaining, None)
            if child is None:
                stack.pop()
                yield node, True
            elif child not in stepped:
                stack.append(enter(child))
                yield child, False


def _next(node: Node) -> list[Node]:
    """A node's upstream neighbours."""
    return [upstream for upstream, _ in node.next_functions if upstream is not None]


def _over_uses(node: Node, found: dict[Use, Found]) -> list[Node]:
    """A node's upstream neighbours, stepping over uses, which are noted."""
    marks = marks_of(node).get(USE)
    if marks is None:
        return _next(node)
    neighbours = []
    for use, index, output in marks:
        found.setdefault(use, Found(use)).nodes[index] = (node, output)
        neighbours += [edge.node for edge in use.edges]
    return neighbours


def _require_alive(graph: Graph) -> None:
    if any(found.use.entries is None for found in graph.found) or any(
        loss.call.released for loss in graph.losses
    ):
        raise PackpropError(
            "A second backward pass through one graph was asked for.",
            "the loss that backward() was called on",
            "the first pass freed the graph, and the inputs that were recorded on it",
            "pass retain_graph=True to the first backward()",
        )
    if graph.mixers:
        raise PackpropError(
            "A quantity of single samples was asked for.",
            f"layer {graph.mixers[0]}",
            "batch normalisation in training mode mixes the samples: no sample has a gradient of its own",
            "call .eval() on the layer, or use GroupNorm, LayerNorm or InstanceNorm",
        )


def _find_first(order: list[Node], stepped: dict[Node, list[Node]], found: dict[Use, Found]) -> None:
    """A use is first if no other one lies upstream; upstream nodes come earlier in ``order``."""
    below: dict[Node, bool] = {}
    uses: dict[Node, bool] = {node: True for f in found.values() for node in f.anchors}
    for node in order:
        below[node] = any(below.get(up, False) or up in uses for up in stepped[node])
    for f in found.values():
        f.first = f.host is None and not any(below[node] for node in f.anchors)


def _find_after_loss(graph: Graph, order: list[Node], stepped: dict[Node, list[Node]]) -> None:
    """Parameters that are used between a loss and the root: in terms that no sample enters."""
    after: set[Node] = set()
    losses = {loss.node for loss in graph.losses}
    for node in order:
        if any(up in losses or up in after for up in stepped[node]):
            after.add(node)
    for found in list(graph.found):
        nodes = [node for node in found.anchors if node in after]
        if nodes:
            graph.found.remove(found)
            graph.missing += [(site.leaf, nodes[0]) for site in found.sites]


def _find_sites(graph: Graph, wanted: Sequence[Tensor] | None) -> None:
    """Trace the parameters of every use to the leaves that they are made of."""
    chosen = None if wanted is None else {id(leaf) for leaf in wanted}
    leaves: dict[int, list[Tensor]] = {}
    for found in graph.found:
        for entry in found.use.entries or ():
            parameter = entry.parameter
            if id(parameter) not in leaves:
                leaves[id(parameter)] = _leaves_of(graph, parameter)
            for leaf in leaves[id(parameter)]:
                if chosen is None or id(leaf) in chosen:
                    found.sites.append(Site(entry, leaf))
    for found in graph.found:
        for site in found.sites:
            if site.entry.refusal is not None:
                raise PackpropError(
                    "A quantity beyond the gradient was asked for.",
                    f"parameter {graph.name(site.leaf)!r} in {found.use.name}",
                    *site.entry.refusal,
                )


def _leaves_of(graph: Graph, parameter: Tensor) -> list[Tensor]:
    if parameter.grad_fn is None:
        return [parameter]
    found: dict[int, Tensor] = {}
    stack, seen = [parameter.grad_fn], {parameter.grad_fn}
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        if USE in marks_of(node):
            raise PackpropError(
                "A quantity beyond the gradient was asked for.",
                f"a tensor of shape {list(parameter.shape)} that is used like a parameter",
                "it depends on the samples through a function that was not seen",
                "register the function with packprop.register_use, or call it through torch functions",
            )
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen:
                seen.add(upstream)
                stack.append(upstream)
    return list(found.values())


def _find_missing(graph: Graph, consumed: list[tuple[Tensor, Node]], wanted: Sequence[Tensor] | None) -> None:
    """Parameters of extended modules, or of uses, that are also reached outside of all uses."""
    if not consumed:  # the rule, and then it need not be known what modules own
        return
    modules = {id(module): module for module in [*graph.modules, *EXTENDED]}
    owned = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    owned |= {id(leaf) for leaf in graph.leaves()}
    data = {id(ref()) for forward in graph.forwards for ref in forward.leaves}
    chosen = owned if wanted is None else {id(leaf) for leaf in wanted}
    graph.missing = [
        (leaf, node)
        for leaf, node in consumed
        if id(leaf) in owned and id(leaf) in chosen and id(leaf) not in data
    ]


def _above_losses(graph: Graph, starts: list[Node], stepped: dict[Node, list[Node]]) -> set[Node]:
    """Nodes that a path from the roots reaches without passing a recorded loss."""
    losses = {loss.node for loss in graph.losses}
    stack = [node for node in starts if node not in losses]
    seen = set(stack)
    while stack:
        for upstream in stepped.get(stack.pop(), ()):
            if upstream not in seen and upstream not in losses:
                seen.add(upstream)
                stack.append(upstream)
    return seen


def _adopt_missing(graph: Graph, above: set[Node], found: dict[Use, Found]) -> None:
    """Take a node that no torch function made for a use: the fallback, by pulling back through it alone.

    Custom autograd functions and assignments make such nodes. It is exact where no other path leads from the
    node to the parameter, so that is what is asked for.
    """
    if not graph.missing:
        return
    times: dict[int, int] = {}
    for leaf, _ in graph.missing:
        times[id(leaf)] = times.get(id(leaf), 0) + 1
    used = {id(leaf) for leaf in graph.leaves()}
    kept = []
    for leaf, node in graph.missing:
        alone = times[id(leaf)] == 1 and id(leaf) not in used
        foreign = isinstance(node, BackwardCFunction) and node.name() != EAGER
        foreign |= node.name().endswith("CopySlices")
        if not (alone and foreign and graph.losses) or node in above:
            kept.append((leaf, node))
            continue
        shapes = _output_shapes(node)
        entry = Entry(leaf, "Dense", _through(node, len(shapes), leaf), scratch=leaf.numel())
        edges = [GradientEdge(up, output) for up, output in node.next_functions if up is not None]
        use = Use(node.name(), [entry], edges, shapes, Forward(lambda: None))
        adopted = Found(use, {index: (node, index) for index in range(len(shapes))})
        adopted.sites.append(Site(entry, leaf))
        found[use] = adopted
        graph.found.append(adopted)
    graph.missing = kept


def made_by(node: Node) -> list[Any]:
    """Shape, dtype and device of each of the tensors that a node made.

    A private attribute of autograd nodes: no public one says how many outputs there are.
    """
    return list(node._input_metadata)


def _output_shapes(node: Node) -> list[torch.Size]:
    return [torch.Size(made.shape) for made in made_by(node)]


def _through(node: Node, outputs: int, leaf: Tensor) -> Meet:
    edges = [GradientEdge(node, index) for index in range(outputs)]

    def meet(signals: Signals, where: Sequence[Layout], samples: Samples) -> Structure:
        return pulled_samplewise(edges, leaf, signals, where, samples)

    return meet


def require_differentiable(graph: Graph) -> None:
    """Raise if what the pass goes through cannot be differentiated twice."""
    if graph.hosts:
        raise refused(
            "PyTorch does not differentiate reentrant checkpoints twice, as create_graph=True asks for"
        )


def require_complete(graph: Graph) -> None:
    """Raise unless every use of every wanted parameter was recorded."""
    if not graph.missing:
        return
    order = {id(p): place for module in EXTENDED for place, p in enumerate(module.parameters())}
    leaf, consumer = min(graph.missing, key=lambda pair: order.get(id(pair[0]), len(order)))
    name, node = graph.name(leaf), consumer.name()
    if node == EAGER:
        why = "eager_backward() has already summed this parameter's gradient over the samples"
        instead = "leave the branch outside eager_backward(), or set requires_grad=False on the parameter"
    elif node == "AccumulateGrad":
        why, instead = "the loss is the parameter itself", "leave it out of this loss"
    else:
        why = (
            f"{node} consumes it outside of every recorded function (outside an extended module's forward "
            "pass, under disable(), in an assignment, or in a term of the loss that no sample enters)"
        )
        instead = (
            "run that function inside the extended module or inside `with packprop.record():`, keep such "
            "terms out of this backward pass, or set requires_grad=False on the parameter"
        )
    raise PackpropError("A quantity beyond the gradient was asked for.", f"parameter {name!r}", why, instead)
