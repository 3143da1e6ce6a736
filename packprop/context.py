"""The context ``with backpack(...):``: ``backward()`` inside it also computes quantities for the parameters."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from packprop.curvature.columns import Columns
from packprop.distributed.joint import JointPass
from packprop.distributed.ranks import AllRanks, ranks_of
from packprop.distributed.sharded import require_sharded, swept
from packprop.engine.backward_pass import BackwardPass
from packprop.engine.chunks import ChunkSizes, default_chunk_sizes
from packprop.engine.clipping import Clipping, settled
from packprop.engine.gradient import changed_gradient
from packprop.engine.nothing import samples_of_nothing, saved_nothing
from packprop.engine.probes import ASKED, by_groups, nothing_recorded, require_alone
from packprop.engine.request import Request, settle_loss_inputs
from packprop.engine.saving import Hook, ResultSaver, factor_of
from packprop.errors import BadInput, PackpropWarning
from packprop.graph.completeness import (
    MARK_THE_LOSS,
    UNKNOWN_LOSS,
    require_complete,
    require_differentiable,
)
from packprop.graph.graph import Graph
from packprop.graph.terms import meets_samples_unseen
from packprop.graph.walk import walk
from packprop.memory.bytes import keep_freed_pages
from packprop.memory.plan import Plan
from packprop.memory.planning import chunk_sizes_of_pass
from packprop.memory.search import budget_of
from packprop.recording.aside import OwnMode
from packprop.recording.compiled import warn_of_compiled
from packprop.recording.switch import drop_stale_recording
from packprop.samples.documents import without_plan
from packprop.samples.locating import check_graph
from packprop.tensors.dry import is_dry_run
from packprop.tensors.hooks import NOTHING
from packprop.tensors.traced import decided, is_traced
from packprop.types import Extensions, Seed, check_extensions

NOT_RECORDED = (
    "A backward pass inside `with backpack(...)` met no use of a parameter: nothing but gradients was "
    f"computed, because {UNKNOWN_LOSS}. Instead: {MARK_THE_LOSS}."
)

SIZES_OF_CHUNKS = "sizes of chunks"
"""Name of the decision that passes under a budget make, and that a traced pass takes over."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.active: list[Backpack] = []


_local = _Local()


def innermost() -> Backpack | None:
    """Return the innermost active context of this thread."""
    return _local.active[-1] if _local.active else None


def backpack(
    *extensions: Extensions,
    extension_hook: Hook | None = None,
    memory: int | str | Plan | None = None,
    retain_graph: bool = False,
    debug: bool = False,
    loss_scale: float | Tensor = 1.0,
    ranks: str | AllRanks = "own",
    probes: Sequence[int] | Tensor | None = None,
) -> Backpack:
    """Compute more than the gradient in every backward pass inside the context.

    Args:
        extensions: Instances from ``packprop.extensions``, one by one or in a list. Each saves its value on
            every trainable parameter under its ``savefield``, and overwrites the value of an earlier pass.
        extension_hook: Called with each module that owns parameters as soon as all their values are saved.
        memory: The most bytes of tensor storage that may be alive at once in a step, including parameters,
            activations and results (``"600MiB"``, a number), or a ``Plan``. With a budget, packprop runs the
            model once more for each new shape, without data, to find chunks that fit.
        retain_graph: Accepted for existing code, without effect. To keep the graph, call
            ``backward(retain_graph=True)``.
        debug: Print the uses of parameters that the pass goes through.
        loss_scale: The factor on the loss that you pass to ``backward()``. Values are those of the loss without
            this factor; ``.grad`` is as PyTorch makes it. A number, or a tensor of one entry, which packprop
            reads without waiting for the device: ``1 / steps`` under gradient accumulation,
            ``scaler.get_scale()`` or ``scaler.scale(torch.ones((), device=...))`` of a gradient scaler.
        ranks: The processes whose samples enter the values, where several processes train: ``"own"`` for this
            process, ``"all"`` for all of them, or ``packprop.distributed.AllRanks(...)`` with options.
            For values of all ranks, packprop saves them and calls the hook when the backward pass is over.
        probes: Indices of samples (or a mask) that do not count in ``.grad`` and in the values, as if the loss
            were taken over the other samples alone. Values of the probes, as if the loss were taken over them
            alone, are saved under the same names with the suffix ``_probes``. ``batch_dot_probes``: ``[n, m]``
            has the inner products between training samples and probes.

    Raises:
        BadInput: For a class instead of an instance, or anything that is not an extension; for a budget that is
            not a number of bytes, or is given with ``ranks``; for ``ranks`` without a process group. In the
            backward pass, before any work: for a budget that no choice of chunks keeps to, or a plan that was
            made for something else.
    """
    return Backpack(extensions, extension_hook, memory, debug, loss_scale, ranks, probes)


class Backpack(OwnMode):
    """The context that ``backpack`` returns; only the innermost one is active."""

    call = "backpack"
    """The function that made the context."""

    def __init__(
        self,
        extensions: Sequence[Any],
        hook: Hook | None,
        memory: int | str | Plan | None,
        debug: bool,
        loss_scale: float | Tensor = 1.0,
        ranks: str | AllRanks = "own",
        probes: Sequence[int] | Tensor | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        super().__init__()
        self.extensions = check_extensions(f"{self.call}(...) was entered.", *extensions)
        if hook is not None and not callable(hook):
            raise BadInput(
                f"{self.call}(extension_hook=...) was entered.",
                f"extension_hook of type {type(hook).__name__}",
                "it cannot be called",
                "give a function of one module",
            )
        self._loss_scale = factor_of(self.call, loss_scale)
        self._ranks = ranks_of(ranks)
        if self._ranks is not None and memory is not None:
            raise BadInput(
                "backpack(memory=..., ranks=...) was entered.",
                "a budget for values of all ranks",
                "a plan does not count what ranks exchange",
                "leave memory out, or ask for values of this rank's own samples, ranks='own'",
            )
        self.rows = range(0)
        """The samples of the last pass on this rank, as indices into the samples of all ranks, rank by rank."""
        self._probes, self._clipping = probes, clipping
        require_alone(probes, memory is not None, self._ranks is not None)
        self._memory = memory if isinstance(memory, Plan) else budget_of(memory)
        self._hook, self._debug, self._running, self._seen = hook, debug, False, False
        self._drawn: dict[Seed, list[Columns]] = {}  # columns that extensions for modules drew for this pass

    def __enter__(self) -> Self:
        drop_stale_recording()
        _local.active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._seen = False
        return self

    def __exit__(self, *error: Any) -> None:
        drop_stale_recording()
        _local.active.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own
        if not self._seen and self._is_needed and error[0] is None:
            warnings.warn(
                f"No backward pass was seen inside `with {self.call}(...)`: call loss.backward() inside it.",
                PackpropWarning,
                stacklevel=2,
            )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        call = None
        if func is Tensor.backward:
            call = BackwardCall.of_tensor(*args, **kwargs)
        elif func is torch.autograd.backward:
            call = BackwardCall.of_function(*args, **kwargs)
        if call is None or self._running or is_dry_run() or _local.active[-1] is not self:
            return func(*args, **kwargs)
        self._running = self._seen = True
        try:
            if any(extension.keeps_graph for extension in self.extensions):
                call.keeps_graph = True
                args, kwargs = _retaining(args, kwargs)
            return self._backward(call, lambda: func(*args, **kwargs))
        finally:
            self._running = False

    @property
    def _is_needed(self) -> bool:
        """Tell whether the context has anything to compute besides a plain pass."""
        return bool(self.extensions) or self._clipping is not None or self._probes is not None

    def _backward(self, call: BackwardCall, backward: Callable[[], None]) -> None:
        """Run the user's ``backward``, and compute the extensions along with it."""
        warn_of_compiled()
        if not self._is_needed or call.is_refused_by_torch:
            return backward()
        if self._ranks is None:
            return self._pass(call, backward, None)
        with JointPass(self._ranks, self.extensions) as joint:
            joint.require_possible(call.create_graph)
            self._pass(call, backward, joint)
            self.rows = joint.rows

    def _pass(self, call: BackwardCall, backward: Callable[[], None], joint: JointPass | None) -> None:
        """Run one pass; its values are those of this rank or, with ``joint``, of all ranks."""
        graph = walk(call.roots, call.gradients, call.leaves, unshards=True)
        planned = self._memory is not None
        limited = self._memory.memory is not None if isinstance(self._memory, Plan) else planned
        require_sharded(graph, self.extensions, self._ranks, create_graph=call.create_graph, planned=planned)
        if not graph.uses:
            require_complete(graph)
            if self._probes is not None or self._clipping is not None:
                raise nothing_recorded(MARK_THE_LOSS, ASKED if self._clipping is None else self._clipping.asked)
            if meets_samples_unseen(graph):
                warnings.warn(NOT_RECORDED, PackpropWarning, stacklevel=6)
        saver = ResultSaver(graph, self._hook, self._loss_scale)
        if not graph.uses or (joint is not None and samples_of_nothing(graph) == 0):
            if joint is None:
                return backward()
            with swept(graph, self.extensions, self._ranks):
                pass  # other ranks may sweep
            joint.agree(graph, None, saver)
            with swept(graph, self.extensions, self._ranks):
                pass
            joint.before_backward()
            backward()
            return joint.hand_over(saver)
        if is_traced():
            graph.hooks.require_none()
        names = ", ".join(extension.name for extension in self.extensions) or self.call
        graph.asked = f"{names}: quantities that are made of those of single samples were asked for."
        settle_loss_inputs(graph, self.extensions, kept=call.keeps_graph or call.create_graph)
        leaves_out = self._probes is not None or self._clipping is not None
        of_samples = leaves_out or not all(extension.of_batch for extension in self.extensions)
        is_plain = not (call.create_graph or call.leaves is not None or is_traced())
        how = self._clipping, call.create_graph, is_plain
        # products of whole batches keep the curvature of penalties
        alone = self._probes is None and joint is None and (of_samples or not graph.terms)
        if alone and saved_nothing(graph, self.extensions, saver, *how):
            return backward()
        with swept(graph, self.extensions, self._ranks):
            check_graph(graph, of_samples or (joint is not None and joint.finds_samples))
        if call.create_graph:
            require_differentiable(graph)
        extensions, groups = by_groups(graph, self._probes, self.extensions, is_plain)
        clip = None if self._clipping is None else settled(self._clipping, graph, is_plain, groups)
        sizes = self._chunk_sizes(graph)
        request = Request(graph, extensions, sizes, call.create_graph, self._drawn, groups=groups, clip=clip)
        if joint is not None:
            joint.agree(graph, request)
        backward_pass = BackwardPass(
            request,
            saver.save if joint is None else joint.keep,
            begin=lambda: saver.take_off(extensions, reuse=not (limited or is_traced())),
        )
        if self._debug:
            print(f"packprop: {graph.samples} samples, {len(graph.uses)} uses")
            for use in graph.uses:
                print(f"  {graph.label(use)}: {use.layouts[0]}")
        graph.hold(call.keeps_graph)
        keep = True
        try:
            if call.leaves is None:
                with contextlib.ExitStack() as own_sweeps:
                    own_sweeps.enter_context(swept(graph, self.extensions, self._ranks))

                    def users_pass(leaves: Sequence[Tensor] | None) -> None:
                        own_sweeps.close()
                        if joint is not None:
                            joint.before_backward()
                        backward() if leaves is None else call.run_restricted(leaves)

                    backward_pass.run(users_pass)
            else:  # the user's pass to these inputs alone does not visit every node that the values need
                with swept(graph, self.extensions, self._ranks):
                    backward_pass.run(None)
                kinds = {row.seed.kind for each in self.extensions for row in each.rows}
                if joint is not None:
                    joint.before_backward()
                with graph.hooks.refusing_changes(changed_gradient) if "gradient" in kinds else NOTHING:
                    backward()
            if joint is not None:
                joint.hand_over(saver)
            saver.warn_of_large()
            keep = call.keeps_graph
        finally:
            graph.release(keep)

    def _chunk_sizes(self, graph: Graph) -> ChunkSizes:
        """Return the chunk sizes of the given plan, or of a plan for passes of these shapes."""
        if self._memory is not None and graph.documents is not None:
            raise without_plan()
        if self._memory is None:
            keep_freed_pages()
            return default_chunk_sizes(next((leaf.device for leaf in graph.leaves()), None))
        if isinstance(self._memory, Plan):
            self._memory.require_fit(graph, self.extensions, self._hook is not None)
            return self._memory.chunk_sizes
        budget = self._memory
        return decided(SIZES_OF_CHUNKS, lambda: chunk_sizes_of_pass(graph, self.extensions, budget))


class BackwardCall:
    """The arguments of one call of ``backward``."""

    def __init__(
        self, roots: Any, gradients: Any, retain_graph: bool | None, create_graph: bool, inputs: Any
    ) -> None:
        self.roots = _listed(roots)
        self.gradients = _listed(gradients) if gradients is not None else [None] * len(self.roots)
        self.create_graph = create_graph
        self.keeps_graph = create_graph if retain_graph is None else retain_graph
        chosen = None if inputs is None else _listed(inputs)
        self.leaves = None if chosen is None else [t for t in chosen if isinstance(t, Tensor) and t.is_leaf]

    @classmethod
    def of_tensor(
        cls,
        root: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> BackwardCall:
        """Return the call of ``Tensor.backward`` with these arguments."""
        return cls(root, gradient, retain_graph, create_graph, inputs)

    @classmethod
    def of_function(
        cls,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> BackwardCall:
        """Return the call of ``torch.autograd.backward`` with these arguments."""
        gradients = grad_variables if grad_tensors is None else grad_tensors
        return cls(tensors, gradients, retain_graph, create_graph, inputs)

    @property
    def is_refused_by_torch(self) -> bool:
        """Tell whether torch refuses this call; its own message is then the best one."""
        return not all(root.requires_grad for root in self.roots) or any(
            root.numel() != 1 and given is None for root, given in zip(self.roots, self.gradients, strict=True)
        )

    def run_restricted(self, leaves: Sequence[Tensor]) -> None:
        """Run the pass for some leaves only."""
        gradients = self.gradients if any(given is not None for given in self.gradients) else None
        torch.autograd.backward(self.roots, gradients, self.keeps_graph, inputs=leaves)


def _retaining(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``backward`` with ``retain_graph=True``, the third one in both spellings."""
    if len(args) > 2:
        return (*args[:2], True, *args[3:]), kwargs
    return args, {**kwargs, "retain_graph": True}


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) or not isinstance(value, Sequence) else list(value)
