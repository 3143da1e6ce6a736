"""Runners of a traced graph: the graph itself, or its compiled form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from packprop.applications.compiled.costs import peak_of, seconds_in_turns
from packprop.applications.compiled.parts import put_together
from packprop.engine.memory import byte_text
from packprop.engine.passes import AutocastRegions

Backend = str | Callable[..., Any]
Run = Callable[..., Sequence[Tensor]]

REPLAY = "eager"
"""The backend that replays the traced graph, operation by operation."""

SLOWER = 1.1
"""The ratio of compiled time to the graph's time that is more than noise.

A tie goes to the compiler: its code leaves Python free for other threads.
"""

COSTLY = 10.0
"""Seconds of compiling from which on you hear that it was for nothing."""

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of ``torch.compile`` that make CUDA graphs."""


class Runner:
    """Runs a traced graph; compiles it in the first call, unless you want it plain.

    Args:
        graph: The graph.
        backend: ``"eager"``, or a backend of ``torch.compile``.
        mode: A mode of ``torch.compile``.
    """

    def __init__(self, graph: GraphModule, backend: Backend, mode: str | None) -> None:
        self.backend = backend
        self._graph, self._mode = graph, mode
        self._copies = backend == "cudagraphs" or (backend != REPLAY and mode in WITH_CUDA_GRAPHS)
        self._run: Run | None = graph if backend == REPLAY else None
        self._devices: set[str] = set()
        self.seconds: float | None = None
        """The seconds that compiling took."""
        self.verdict: str | None = None
        """The reason why the graph is replayed uncompiled, although you asked to compile it, if it is."""
        self.warning: str | None = None
        """The message for the user."""

    @property
    def is_costly(self) -> bool:
        """Tell whether compiling took long."""
        return self.seconds is not None and self.seconds > COSTLY

    @property
    def took(self) -> str:
        """Say how long compiling took."""
        return f"after {self.seconds or 0:.0f} s of compiling"

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of the graph; differentiate nothing."""
        return self._through(self._run, tensors)

    def settle(self, tensors: Sequence[Tensor], budget: int | None) -> None:
        """Keep the compiled graph if it is faster than the plain one, and within the budget.

        Args:
            tensors: Inputs of the graph, which it may write to.
            budget: The most bytes that may be alive at once; any number if ``None``.
        """
        if self.backend == REPLAY:
            return
        as_it_is = partial(self._through, self._graph)
        if budget is not None and (peak := peak_of(self, tensors)) > budget:
            self.verdict = (
                f"compiled by {self.backend!r} it takes {byte_text(peak)} of memory, as it is "
                f"{byte_text(peak_of(as_it_is, tensors))}, and the budget is {byte_text(budget)}"
            )
            self.warning = (
                f"A traced pass is replayed as it is: {self.verdict}. Give a larger budget to have it "
                'compiled, or packprop.compile(..., backend="eager") to do without a compiler.'
            )
        else:
            own, other = seconds_in_turns([self, as_it_is], tensors)
            if own > SLOWER * other:
                self.verdict = f"compiled it takes {1000 * own:.3g} ms, as it is {1000 * other:.3g} ms"
            if self.verdict is not None and self.is_costly:
                self.warning = (
                    f"A traced pass is replayed as it is, {self.took}: {self.verdict}. "
                    'packprop.compile(..., backend="eager") does without a compiler.'
                )
        if self.verdict is not None:
            self._run, self.backend, self._copies = self._graph, REPLAY, False

    def _through(self, run: Run | None, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self._devices = self._devices or {tensor.device.type for tensor in tensors}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            regions = AutocastRegions.now(self._devices)
            if regions.regions:  # the graph already holds the effect of autocast
                stack.enter_context(regions.switched(False))
            if self._copies:
                torch.compiler.cudagraph_mark_step_begin()
            outputs = self._compile_and_run(tensors) if run is None else run(*tensors)
            # a CUDA graph has one place for each output, which the next replay overwrites
            return [each.clone() for each in outputs] if self._copies else outputs

    def _compile_and_run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compile the graph; without a compiler that can do it, replay it."""
        start = time.perf_counter()
        outputs: Sequence[Tensor]
        try:
            run = _compiled(_for_compiler(self._graph), tensors, self.backend, self._mode)
            outputs = run(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler that is missing, or fails
            self._run, self.backend, self._copies = self._graph, REPLAY, False
            said = " ".join([line for line in str(error).strip().splitlines() if line][:2])
            self.verdict = f"no compiler could take it ({type(error).__name__}: {said})"
            self.warning = (
                f"No compiler could take a traced pass ({type(error).__name__}: {said}). The graph is replayed "
                'as it is, as by packprop.compile(..., backend="eager").'
            )
            outputs = self._graph(*tensors)
            return outputs
        self._run, self.seconds = run, time.perf_counter() - start
        return outputs


def _for_compiler(graph: GraphModule) -> GraphModule:
    """Return a copy of a graph, without constructs that are slow to compile."""
    copied = Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    put_together(copied)
    return GraphModule(graph, copied)


def _compiled(graph: GraphModule, tensors: Sequence[Tensor], backend: Backend, mode: str | None) -> Run:
    """Compile the graph.

    This calls Inductor directly, as PyTorch documents for backends that are made of others. The checks of
    ``torch.compile`` in each call of a graph take a third of the time of a small one, and packprop knows their
    answers. Random numbers are PyTorch's own, so that they are the same with and without a compiler.
    """
    run: Run
    if backend != "inductor":
        run = torch.compile(graph, backend=backend, mode=mode, dynamic=False)
        return run
    options: dict[str, Any] = {"fallback_random": True}
    if mode is not None:
        options |= torch._inductor.list_mode_options(mode)
    inductor: Any = torch._dynamo.lookup_backend(backend)
    run = inductor(graph, [*tensors], config_patches=options)
    return run
