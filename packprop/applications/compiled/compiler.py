"""Runners of a traced graph: the graph itself, or its compiled form."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from packprop.applications.compiled.costs import peak_of, seconds_in_turns
from packprop.applications.compiled.parts import put_together
from packprop.engine.memory import byte_text
from packprop.engine.tensors import AutocastRegions

Backend = str | Callable[..., Any]
Run = Callable[..., Sequence[Tensor]]

REPLAY = "eager"
"""The backend that replays the traced graph, operation by operation."""

SLOWER = 1.1
"""The ratio of compiled time to the plain graph's time above which the compiled graph counts as slower.

A tie goes to the compiler: its code leaves Python free for other threads.
"""

COSTLY = 10.0
"""The seconds of compiling above which a warning says that packprop does not use the result."""

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of ``torch.compile`` that make CUDA graphs."""


class Runner:
    """Runs a traced graph; compiles it in the first call, unless the backend is ``"eager"``.

    Args:
        graph: The graph.
        backend: ``"eager"``, or a backend of ``torch.compile``.
        mode: A mode of ``torch.compile``.
    """

    def __init__(self, graph: GraphModule, backend: Backend, mode: str | None) -> None:
        self.backend = backend
        self._graph, self._mode = graph, mode
        self._run: Run | None = graph if backend == REPLAY else None
        self._devices: set[str] = set()
        self.seconds: float | None = None
        """The seconds that compiling took."""
        self.verdict: str | None = None
        """The reason why the graph is replayed uncompiled although you chose a compiler, if it is."""
        self.warning: str | None = None
        """The warning for the user, if there is one."""

    @property
    def is_costly(self) -> bool:
        """Tell whether compiling took long."""
        return self.seconds is not None and self.seconds > COSTLY

    @property
    def took(self) -> str:
        """Return a phrase for warnings that says how long compiling took."""
        return f"after {self.seconds or 0:.0f} s of compiling"

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the graph without gradients; return its outputs."""
        self._devices = self._devices or {tensor.device.type for tensor in tensors}
        autocast = AutocastRegions.now(self._devices)  # the graph already holds its effect
        with torch.no_grad(), autocast.switched(False):
            if self._has_cuda_graph:
                torch.compiler.cudagraph_mark_step_begin()
                # a CUDA graph has one place for each output, which the next replay overwrites
                return [each.clone() for each in self._outputs(tensors)]
            outputs = self._outputs(tensors)
            return outputs if self.backend == REPLAY else _apart(outputs)

    def settle(self, tensors: Sequence[Tensor], budget: int | None) -> None:
        """Keep the compiled graph if it is no slower than the plain one, and within the budget.

        Args:
            tensors: Inputs of the graph, which it may write to.
            budget: The most bytes that may be alive at once; ``None`` for no limit.
        """
        if self.backend == REPLAY:
            return
        as_it_is = Runner(self._graph, REPLAY, None)
        if budget is not None and (peak := peak_of(self, tensors)) > budget:
            verdict = (
                f"compiled by {self.backend!r} it takes {byte_text(peak)} of memory, uncompiled "
                f"{byte_text(peak_of(as_it_is, tensors))}, and the budget is {byte_text(budget)}"
            )
            self.warning = (
                f"A traced pass is replayed uncompiled: {verdict}. Give a larger budget to have it "
                'compiled, or packprop.compile(..., backend="eager") to do without a compiler.'
            )
        else:
            own, other = seconds_in_turns([self, as_it_is], tensors)
            if own <= SLOWER * other:
                return
            verdict = f"compiled it takes {1000 * own:.3g} ms, uncompiled {1000 * other:.3g} ms"
            if self.is_costly:
                self.warning = (
                    f"A traced pass is replayed uncompiled, {self.took}: {verdict}. "
                    'packprop.compile(..., backend="eager") does without a compiler.'
                )
        self._replay_from_now_on(verdict)

    @property
    def _has_cuda_graph(self) -> bool:
        return self.backend == "cudagraphs" or (self.backend != REPLAY and self._mode in WITH_CUDA_GRAPHS)

    def _replay_from_now_on(self, verdict: str) -> None:
        self._run, self.backend, self.verdict = self._graph, REPLAY, verdict

    def _outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compile the graph if that has not been tried, and run it; if compiling fails, run it uncompiled."""
        if self._run is not None:
            return self._run(*tensors)
        start = time.perf_counter()
        try:
            run = _compiled(self._graph, tensors, self.backend, self._mode)
            outputs = run(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler that is missing, or fails
            said = " ".join([line for line in str(error).strip().splitlines() if line][:2])
            reason = f"({type(error).__name__}: {said})"
            self._replay_from_now_on(f"it could not be compiled {reason}")
            self.warning = (
                f"A traced pass could not be compiled {reason}. packprop replays the graph uncompiled, as "
                'packprop.compile(..., backend="eager") does.'
            )
            return self._outputs(tensors)
        self._run, self.seconds = run, time.perf_counter() - start
        return outputs


def _apart(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy outputs that a compiler, which computes equal ones once, has put at the place of another."""
    taken: set[int] = set()
    apart = []
    for each in outputs:
        place = each.data_ptr()
        apart.append(each.clone() if place in taken else each)
        taken.add(place)
    return apart


def _compiled(graph: GraphModule, tensors: Sequence[Tensor], backend: Backend, mode: str | None) -> Run:
    """Compile a copy of the graph without constructs that are slow to compile.

    packprop calls Inductor directly, as PyTorch documents for backends that call other backends. The checks of
    ``torch.compile`` in each call take a third of the time of a small graph, and packprop knows their answers.
    Random numbers are PyTorch's own, so that they are the same with and without a compiler.
    """
    copied = Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    put_together(copied)
    graph = GraphModule(graph, copied)
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
