"""One backward pass of the user, and what packprop computes along with it.

# NOTE [Three ways of a pass]
``backward()`` runs along with packprop's last sweep, which takes the cotangents from it: this is the usual way.
``backward(inputs=...)`` does not go through every node that a sweep needs: packprop sweeps first, on its own,
and the pass follows. A pass that has nothing to compute runs by itself; if there are several processes, it
still takes part in their exchange. Probes, clipping, budgets and merging between processes are settled before,
and do not change the way.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.curvature.columns import Columns
from packprop.engine.distributed.joint import JointPass
from packprop.engine.distributed.residence import require_sharded, swept
from packprop.engine.distributed.statement import AllRanks
from packprop.engine.graph.completeness import MARK_THE_LOSS, UNKNOWN_LOSS, require_complete
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.kept_walk import Outline, outline
from packprop.engine.graph.terms import is_made_of_parameters, meets_samples_unseen
from packprop.engine.graph.walk import walk
from packprop.engine.memory.plan import Plan
from packprop.engine.passes.accumulator import Log
from packprop.engine.passes.backward_pass import BackwardPass
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.clipping import Clipping, settled
from packprop.engine.passes.direct import DirectPass
from packprop.engine.passes.gradient import changed_gradient
from packprop.engine.passes.nothing import samples_of_nothing, saved_nothing
from packprop.engine.passes.probes import ASKED, by_groups
from packprop.engine.passes.request import Request, settle_for_seeds, settle_loss_inputs
from packprop.engine.passes.saving import Hook, ResultSaver
from packprop.engine.samples.locating import check_graph, keep_walk, kept_walk
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.hooks import NOTHING
from packprop.engine.tensors.traced import is_traced
from packprop.errors import PackpropError, PackpropWarning
from packprop.types import Extension, Seed

_NO_USE = "A backward pass inside `with backpack(...)` met no use of a parameter: only gradients were computed"

NOT_RECORDED = f"{_NO_USE}, because {UNKNOWN_LOSS}. Instead: {MARK_THE_LOSS}."

WITHOUT_SAMPLES = (
    f"{_NO_USE}, because the output of the extended model depends on parameters and constants alone, as far "
    "as the graph shows. Instead: give the model a tensor of all samples; single numbers taken from data count "
    "as constants."
)


NAME, OF_BATCH = attrgetter("name"), attrgetter("of_batch")


@dataclass(frozen=True)
class PassOptions:
    """The options of a context, the same for each backward pass in it.

    Args:
        context: The name of the function that made the context, for messages.
        extensions: The quantities to compute.
        hook: The user's extension hook.
        memory: The bytes that a step may take, or a plan; ``None`` for no limit.
        debug: Whether to print what the pass goes through.
        loss_scale: The factor on the loss that you mean; ``None`` for 1.
        ranks: The processes whose samples enter the values; ``None`` for this process.
        probes: Indices or a mask of the samples that do not count; ``None`` for no probes.
        clipping: The way to clip gradients of samples; ``None`` for no clipping.
    """

    context: str
    extensions: Sequence[Extension]
    hook: Hook | None = None
    memory: int | Plan | None = None
    debug: bool = False
    loss_scale: float | Tensor | None = None
    ranks: AllRanks | None = None
    probes: Sequence[int] | Tensor | None = None
    clipping: Clipping | None = None

    @property
    def are_any(self) -> bool:
        """Tell whether a pass is more than a plain one."""
        return bool(self.extensions) or self.clips_or_probes

    @property
    def asked(self) -> str:
        """The request, for errors about samples."""
        names = ", ".join(map(NAME, self.extensions)) or self.context
        return f"{names}: quantities that are computed from single samples were asked for."

    def saver(self, graph: Graph) -> ResultSaver:
        """Return the object that saves the values of one pass."""
        return ResultSaver(graph, self.hook, self.loss_scale)

    @property
    def clips_or_probes(self) -> bool:
        """Tell whether ``.grad`` is made of gradients of samples."""
        return self.clipping is not None or self.probes is not None

    @property
    def are_of_samples(self) -> bool:
        """Tell whether values are computed from single samples."""
        return not all(map(OF_BATCH, self.extensions)) or self.clips_or_probes

    @property
    def is_limited(self) -> bool:
        """Tell whether a step has a budget."""
        return self.memory is not None and not (isinstance(self.memory, Plan) and self.memory.memory is None)


def run_pass(
    options: PassOptions,
    call: BackwardCall,
    backward: Callable[[], None],
    joint: JointPass | None,
    drawn: dict[Seed, list[Columns]],
    chunk_sizes: Callable[[Graph], ChunkSizes],
) -> None:
    """Run one backward pass, and save the values of the extensions; see NOTE [Three ways of a pass].

    Args:
        options: What to compute.
        call: The arguments of ``backward``.
        backward: Runs the user's own pass.
        joint: This process's part in a pass of all processes; ``None`` for values of this one.
        drawn: Columns that were drawn for this pass already, by seed.
        chunk_sizes: Returns the sizes of chunks for a graph, or refuses a budget.
    """
    outlined = outline(call.roots) if _may_repeat(options, call, joint) else None
    if outlined is not None and _ran_again(options, call, backward, outlined, drawn, chunk_sizes):
        return
    graph = walk(call.roots, call.gradients, call.leaves, unshards=True)
    planned = options.memory is not None
    require_sharded(graph, options.extensions, options.ranks, create_graph=call.create_graph, planned=planned)
    if not graph.uses:
        require_complete(graph)
        if options.clips_or_probes:
            asked = ASKED if options.clipping is None else options.clipping.asked
            raise PackpropError(asked, "the loss", "no use of a parameter is known", MARK_THE_LOSS)
        if meets_samples_unseen(graph):
            warnings.warn(NOT_RECORDED, PackpropWarning, stacklevel=7)
        elif is_made_of_parameters(graph):
            warnings.warn(WITHOUT_SAMPLES, PackpropWarning, stacklevel=7)
    one = _Pass(options, call, backward, joint, graph, options.saver(graph))
    is_of_others = call.leaves is not None and not graph.leaves()
    if not graph.uses or is_of_others or (joint is not None and samples_of_nothing(graph) == 0):
        return one.run_alone()
    if is_traced():
        graph.hooks.require_none()
    graph.asked = options.asked
    settle_loss_inputs(graph, options.extensions, kept=call.keeps_graph or call.create_graph)
    if one.saves_nothing():
        return backward()
    request = one.settled(drawn, chunk_sizes)
    if outlined is not None:
        keep_walk(graph, outlined)
    one.run(request)


def _ran_again(
    options: PassOptions,
    call: BackwardCall,
    backward: Callable[[], None],
    outlined: Outline,
    drawn: dict[Seed, list[Columns]],
    chunk_sizes: Callable[[Graph], ChunkSizes],
) -> bool:
    """Run the pass with a kept walk; return whether there is one that serves it. See NOTE [Kept walks]."""
    kept = kept_walk(outlined)
    if kept is None:
        return False
    try:
        graph = kept.bind(outlined, call.roots, call.gradients)
        if graph is None:
            return False
        graph.asked = options.asked
        one = _Pass(options, call, backward, None, graph, options.saver(graph))
        request = one.request(drawn, chunk_sizes)
        direct = DirectPass(request, one.saver, reuses=not options.is_limited)
        clips = options.clipping is not None
        is_direct = direct.is_possible and not (options.debug or clips)
        sweeps = not (is_direct and direct.is_of_gradients)
        if kept.meets_hooks(everywhere=sweeps):
            return False
        if sweeps:
            settle_for_seeds(graph, direct.tasks, kept=call.keeps_graph)
        else:
            graph.drop_loss_inputs(but=outlined.losses)  # marks drop theirs as autograd frees the nodes
        if is_direct and direct.run(one.users_pass):
            one.saver.warn_of_large()
        else:
            notes = None if clips and options.extensions else direct.notes()
            is_whole = clips and not options.extensions and direct.is_possible
            one.run(replace(request, is_whole=is_whole), None if notes is None else notes.log)
            if notes is not None:
                graph.notes.append(notes)
    finally:
        kept.release(outlined)
    return True


REPEATED = ("gradient", "ggn", "empirical", "none", "hessian", "graph")
"""Kinds of seeds for which a kept walk serves, unless their values hold the graph."""


def _may_repeat(options: PassOptions, call: BackwardCall, joint: JointPass | None) -> bool:
    """Tell whether a pass may use the kept walk of an earlier pass, and keep its own walk for later passes."""
    if joint is not None or options.probes is not None or call.create_graph or call.leaves is not None:
        return False
    if is_traced() or is_dry_run() or not options.are_of_samples:
        return False
    for extension in options.extensions:
        for row in extension.rows:
            if extension.keeps_graph or row.seed.kind not in REPEATED or row.seed.by_token:
                return False
    return True


@dataclass(frozen=True)
class _Pass:
    """One backward pass: its options, the user's call, and the graph that it goes through."""

    options: PassOptions
    call: BackwardCall
    backward: Callable[[], None]
    joint: JointPass | None
    graph: Graph
    saver: ResultSaver

    @property
    def _is_plain(self) -> bool:
        """Tell whether ``backward()`` has neither ``create_graph`` nor ``inputs``, and is not traced."""
        return not (self.call.create_graph or self.call.leaves is not None or is_traced())

    def saves_nothing(self) -> bool:
        """Save the values if no sample of the pass has an entry; return whether this is so."""
        options, graph = self.options, self.graph
        # products of whole batches keep the curvature of penalties
        alone = options.probes is None and self.joint is None and (options.are_of_samples or not graph.terms)
        how = options.clipping, self.call.create_graph, self._is_plain
        return alone and saved_nothing(graph, options.extensions, self.saver, *how)

    def settled(self, drawn: dict[Seed, list[Columns]], chunk_sizes: Callable[[Graph], ChunkSizes]) -> Request:
        """Locate the samples, refuse a pass that cannot be right, and return the request of the pass."""
        joint = self.joint
        with self._swept():
            check_graph(self.graph, self.options.are_of_samples or (joint is not None and joint.finds_samples))
        return self.request(drawn, chunk_sizes)

    def request(self, drawn: dict[Seed, list[Columns]], chunk_sizes: Callable[[Graph], ChunkSizes]) -> Request:
        """Return the request of a pass through a graph whose samples have been located."""
        options, graph, joint = self.options, self.graph, self.joint
        extensions, groups, clip, graph.kept = options.extensions, None, None, self.call.keeps_graph
        if options.probes is not None:
            extensions, groups = by_groups(graph, options.probes, extensions, self._is_plain)
        if options.clipping is not None:
            clip = settled(options.clipping, graph, self._is_plain, groups)
        sizes = chunk_sizes(graph)
        request = Request(graph, extensions, sizes, self.call.create_graph, drawn, groups=groups, clip=clip)
        if joint is not None:
            joint.agree(graph, request)
        return request

    def users_pass(self, leaves: Sequence[Tensor] | None) -> None:
        """Run the user's own pass, for some leaves only if they are given."""
        self.backward() if leaves is None else self.call.run(leaves)

    def run(self, request: Request, log: Log | None = None) -> None:
        """Run the pass, and save its values."""
        graph, saver, joint = self.graph, self.saver, self.joint
        reuse = not (self.options.is_limited or is_traced())
        backward_pass = BackwardPass(
            request,
            saver.save if joint is None else joint.keep,
            log,
            lambda: saver.take_off(request.extensions, reuse=reuse),
        )
        if self.options.debug:
            print(f"packprop: {graph.samples} samples, {len(graph.uses)} uses")
            for use in graph.uses:
                print(f"  {graph.label(use)}: {use.layouts[0]}")
        graph.hold(self.call.keeps_graph)
        keep = True
        try:
            if self.call.leaves is None:
                self._run_along(backward_pass)
            else:
                self._run_after(backward_pass)
            if joint is not None:
                joint.hand_over(saver)
            saver.warn_of_large()
            keep = self.call.keeps_graph
        finally:
            graph.release(keep)

    def run_alone(self) -> None:
        """Run the user's pass, with nothing to compute here; other processes may have something to compute."""
        if self.joint is None:
            return self.backward()
        with self._swept():
            pass  # the others may sweep
        self.joint.agree(self.graph, None, self.saver)
        with self._swept():
            pass
        self.joint.before_backward()
        self.backward()
        return self.joint.hand_over(self.saver)

    def _run_along(self, backward_pass: BackwardPass) -> None:
        """Run the user's pass along with the last sweep."""
        with contextlib.ExitStack() as own_sweeps:
            own_sweeps.enter_context(self._swept())

            def users_pass(leaves: Sequence[Tensor] | None) -> None:
                own_sweeps.close()
                if self.joint is not None:
                    self.joint.before_backward()
                self.users_pass(leaves)

            backward_pass.run(users_pass)

    def _run_after(self, backward_pass: BackwardPass) -> None:
        """Run the user's pass, which goes to some leaves alone, after all sweeps."""
        with self._swept():
            backward_pass.run(None)
        kinds = {row.seed.kind for each in self.options.extensions for row in each.rows}
        if self.joint is not None:
            self.joint.before_backward()
        hooks = self.graph.hooks
        with hooks.refusing_changes(changed_gradient) if "gradient" in kinds else NOTHING:
            self.backward()

    def _swept(self) -> contextlib.AbstractContextManager[object]:
        """Let sweeps go through sharded parameters inside the context."""
        return swept(self.graph, self.options.extensions, self.options.ranks)


class BackwardCall:
    """One call of ``torch.autograd.backward``, with its arguments."""

    def __init__(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        self.roots = _listed(tensors)
        gradients = None if grad_tensors is None else _listed(grad_tensors)
        older = None if grad_variables is None else _listed(grad_variables)
        chosen = None if inputs is None else _listed(inputs)
        self._given = gradients, older, chosen
        self.gradients = gradients or older or [None] * len(self.roots)
        self.create_graph = create_graph
        self.keeps_graph = create_graph if retain_graph is None else retain_graph
        self.leaves = None if chosen is None else [leaf for leaf in map(_leaf, chosen) if leaf is not None]

    @property
    def is_plain(self) -> bool:
        """Tell whether to leave the call to torch: torch refuses it, or a root is an edge, not a tensor."""
        if not self.roots or len(self.gradients) != len(self.roots):
            return True
        for root, given in zip(self.roots, self.gradients, strict=True):
            if not (isinstance(root, Tensor) and root.requires_grad) or (root.numel() != 1 and given is None):
                return True
        return False

    def run(self, leaves: Sequence[Tensor] | None = None) -> None:
        """Run the pass as the user called it, or for some leaves only."""
        gradients, older, chosen = self._given
        chosen = chosen if leaves is None else leaves
        torch.autograd.backward(self.roots, gradients, self.keeps_graph, self.create_graph, older, chosen)


def _listed(value: Any) -> Any:
    """Return the tensors of an argument as a list; ``None`` if it was left out."""
    if value is None:
        return None
    if isinstance(value, (Tensor, GradientEdge)) or torch.overrides.is_tensor_like(value):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def _leaf(chosen: Any) -> Tensor | None:
    """Return the leaf that ``inputs=`` names, by itself or by its edge; ``None`` for any other tensor."""
    leaf = getattr(chosen.node, "variable", None) if isinstance(chosen, GradientEdge) else chosen
    return leaf if isinstance(leaf, Tensor) and leaf.is_leaf else None
