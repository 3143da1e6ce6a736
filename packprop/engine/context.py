"""The context ``with backpack(...):``: ``backward()`` inside it also computes quantities for the parameters."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from packprop.engine.curvature.columns import Columns
from packprop.engine.distributed.joint import JointPass
from packprop.engine.distributed.statement import AllRanks, ranks_of
from packprop.engine.graph.graph import Graph
from packprop.engine.memory.plan import Plan
from packprop.engine.memory.planning import chunk_sizes_of_pass
from packprop.engine.memory.search import budget_of
from packprop.engine.passes.chunks import ChunkSizes, default_chunk_sizes
from packprop.engine.passes.clipping import Clipping
from packprop.engine.passes.probes import require_alone
from packprop.engine.passes.saving import Hook, factor_of
from packprop.engine.recording.marks import replace
from packprop.engine.recording.unrecorded import warn_of_compiled
from packprop.engine.samples.documents import without_plan
from packprop.engine.tensors.device import keep_freed_pages
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.traced import decided
from packprop.engine.user_pass import BackwardCall, PassOptions, run_pass
from packprop.errors import BadInput, PackpropWarning
from packprop.types import Extensions, Seed, check_extensions

KEEPS_GRAPH = attrgetter("keeps_graph")

SIZES_OF_CHUNKS = "sizes of chunks"
"""Name of the decision that passes under a budget make, and that a traced pass takes over."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.active: list[Backpack] = []


_local = _Local()


def innermost() -> Backpack | None:
    """Return the innermost active context of this thread; ``None`` outside of any context."""
    return _local.active[-1] if _local.active else None


def _taken_over(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a ``backward`` that hands over to the innermost context; ``Tensor.backward`` also calls it."""

    def backward(*args: Any, **kwargs: Any) -> None:
        is_compiling = torch.compiler.is_compiling()  # the compiler cannot read the rest
        context = None if is_compiling or is_dry_run() else innermost()
        run = plain if context is None or context.is_running else context.take_over
        return run(*args, **kwargs)

    return backward


replace(torch.autograd, "backward", _taken_over)


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
            every trainable parameter under its ``savefield``, and overwrites the value of an earlier pass. If
            two share a ``savefield``, it holds the value of the last one, and packprop warns you.
        extension_hook: Called with each module that owns parameters as soon as all their values are saved.
        memory: The most bytes of tensor storage that may be alive at once in a step, including parameters,
            activations and results (``"600MiB"``, a number), or a ``Plan``. A budget makes packprop run the
            model once more for each new shape, without data, to find chunks that fit.
        retain_graph: Accepted for existing code, without effect. To keep the graph, call
            ``backward(retain_graph=True)``.
        debug: Print the uses of parameters that the pass goes through.
        loss_scale: The factor on the loss that you pass to ``backward()``. Values are those of the loss without
            this factor; ``.grad`` is as PyTorch makes it. A number, or a tensor of one entry, which packprop
            reads without waiting for the device: ``1 / steps`` under gradient accumulation,
            ``scaler.get_scale()`` or ``scaler.scale(torch.ones((), device=...))`` of a gradient scaler.
        ranks: The processes whose samples enter the values, where several processes train: ``"own"`` for this
            process, ``"all"`` for all of them, or ``packprop.AllRanks(...)`` with options.
            packprop saves values of all ranks, and calls the hook, when the backward pass is over.
        probes: Indices of samples (or a mask) that do not count in ``.grad`` and in the values, as if the loss
            were taken over the other samples alone. Values of the probes, as if the loss were taken over them
            alone, are saved under the same names with the suffix ``_probes``. ``batch_dot_probes`` ``[n, m]``
            has the inner products between training samples and probes.

    Raises:
        BadInput: For a class instead of an instance, or anything that is not an extension; for a hook that
            cannot be called; for a budget that is not a number of bytes, or is given with ``ranks``; for
            ``ranks`` without a process group. In the backward pass, before any work: for a budget that no
            choice of chunks keeps to, or a plan for another model, batch or device.
    """
    return Backpack(extensions, extension_hook, memory, debug, loss_scale, ranks, probes)


class Backpack:
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
        self.extensions = check_extensions(f"{self.call}(...) was entered.", *extensions)
        if hook is not None and not callable(hook):
            raise BadInput(
                f"{self.call}(extension_hook=...) was entered.",
                f"extension_hook of type {type(hook).__name__}",
                "it cannot be called",
                "give a function of one module",
            )
        scale, joined = factor_of(self.call, loss_scale), ranks_of(ranks)
        if joined is not None and memory is not None:
            raise BadInput(
                "backpack(memory=..., ranks=...) was entered.",
                "a budget for values of all ranks",
                "a plan does not count what ranks exchange",
                "leave memory out, or ask for values of this rank's own samples, ranks='own'",
            )
        self.rows = range(0)
        """The samples of the last pass on this rank, as indices into the samples of all ranks, rank by rank."""
        require_alone(probes, memory is not None, joined is not None)
        budget = memory if isinstance(memory, Plan) else budget_of(memory)
        self._options = PassOptions(
            self.call, self.extensions, hook, budget, debug, scale, joined, probes, clipping
        )
        self.is_running = self._seen = False
        self._drawn: dict[Seed, list[Columns]] = {}  # columns that extensions for modules drew for this pass

    def __repr__(self) -> str:
        asked = ", ".join(extension.name for extension in self.extensions)
        return f"<{self.call}({asked or '...'})>"

    def __enter__(self) -> Self:
        _local.active.append(self)
        self._seen = False
        return self

    def __exit__(self, *error: Any) -> None:
        _local.active.remove(self)
        if not self._seen and self._options.are_any and error[0] is None:
            warnings.warn(
                f"No backward pass was seen inside `with {self.call}(...)`: call loss.backward() inside it.",
                PackpropWarning,
                stacklevel=2,
            )

    def take_over(self, *args: Any, **kwargs: Any) -> None:
        """Run ``torch.autograd.backward`` with these arguments, and compute the extensions along with it."""
        call = BackwardCall(*args, **kwargs)
        call.keeps_graph |= any(map(KEEPS_GRAPH, self.extensions))
        self.is_running = True
        try:
            with torch.inference_mode(False):  # which leaves derivatives out of the graph, in silence
                self._backward(call, call.run)
        finally:
            self.is_running = False
            self._drawn.clear()  # a failed pass has not taken all columns

    def _backward(self, call: BackwardCall, backward: Callable[[], None]) -> None:
        """Run the user's ``backward``, alone or as a part of a pass that computes the extensions."""
        warn_of_compiled()
        if not self._options.are_any or call.is_plain:
            return backward()
        self._seen = True
        if call.create_graph and self._options.memory is not None:
            raise BadInput(
                f"{self.call}(memory=...) was entered.",
                "backward(create_graph=True)",
                "a plan does not count the graph of the gradient and of the values",
                "leave memory out, or call backward() without create_graph",
            )
        if self._options.ranks is None:
            return self._pass(call, backward, None)
        with JointPass(self._options.ranks, self.extensions) as joint:
            joint.require_possible(call.create_graph)
            self._pass(call, backward, joint)
            self.rows = joint.rows

    def _pass(self, call: BackwardCall, backward: Callable[[], None], joint: JointPass | None) -> None:
        """Run one pass; its values are those of this rank or, with ``joint``, of all ranks."""
        run_pass(self._options, call, backward, joint, self._drawn, self._chunk_sizes)

    def _chunk_sizes(self, graph: Graph) -> ChunkSizes:
        """Return the chunk sizes of the given plan, or of a plan for passes of these shapes."""
        budget = self._options.memory
        if budget is None:
            keep_freed_pages()
            devices = (site.leaf.device for use in graph.uses for site in use.sites)
            return default_chunk_sizes(next(devices, None))
        if graph.documents is not None:
            raise without_plan()
        if isinstance(budget, Plan):
            budget.require_fit(graph, self.extensions, self._options.hook is not None)
            return budget.chunk_sizes
        return decided(SIZES_OF_CHUNKS, lambda: chunk_sizes_of_pass(graph, self.extensions, budget))
