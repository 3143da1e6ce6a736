"""What runs a traced graph: the graph itself, or what a compiler makes of it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from packprop.engine.autocast import AutocastRegions
from packprop.errors import PackpropWarning

Backend = str | Callable[..., Any]
Run = Callable[..., Sequence[Tensor]]

REPLAY = "eager"
"""The backend that replays the traced graph, operation by operation."""

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of ``torch.compile`` that make CUDA graphs."""


class Runner:
    """Runs a traced graph; compiles it in the first call, unless it shall be replayed as it is.

    Args:
        graph: The graph.
        backend: ``"eager"``, or what ``torch.compile`` takes.
        mode: What ``torch.compile`` takes.
    """

    def __init__(self, graph: GraphModule, backend: Backend, mode: str | None) -> None:
        self.backend = backend
        self._graph, self._mode = graph, mode
        self._copies = backend == "cudagraphs" or (backend != REPLAY and mode in WITH_CUDA_GRAPHS)
        self._run: Run | None = graph if backend == REPLAY else None
        self._devices: set[str] = set()
        self.seconds: float | None = None
        """How long it took to compile."""

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of the graph; nothing is differentiated."""
        self._devices = self._devices or {tensor.device.type for tensor in tensors}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            regions = AutocastRegions.now(self._devices)
            if regions.regions:  # the graph holds what autocast did
                stack.enter_context(regions.switched(False))
            if self._copies:
                torch.compiler.cudagraph_mark_step_begin()
            outputs = self._compile_and_run(tensors) if self._run is None else self._run(*tensors)
            # a CUDA graph has one place for each output, which the next replay writes over
            return [each.clone() for each in outputs] if self._copies else outputs

    def _compile_and_run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compile the graph; without a compiler that can do it, replay it."""
        start = time.perf_counter()
        outputs: Sequence[Tensor]
        try:
            run = _compiled(self._graph, tensors, self.backend, self._mode)
            outputs = run(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler that is missing, or cannot do it
            self._run, self.backend, self._copies = self._graph, REPLAY, False
            _warn_of_compiler(error)
            outputs = self._graph(*tensors)
            return outputs
        self._run, self.seconds = run, time.perf_counter() - start
        return outputs


def _compiled(graph: GraphModule, tensors: Sequence[Tensor], backend: Backend, mode: str | None) -> Run:
    """The graph through a compiler.

    Inductor is called as itself, by its private name: what ``torch.compile`` checks in each call of a graph
    takes a third of the time of a small one, and is known here. Random numbers are PyTorch's own, so that they
    are the same with and without a compiler.
    """
    run: Run
    if backend != "inductor":
        run = torch.compile(graph, backend=backend, mode=mode, dynamic=False)
        return run
    options: dict[str, Any] = {"fallback_random": True}
    if mode is not None:
        options |= torch._inductor.list_mode_options(mode)
    run = torch._inductor.compile(graph, [*tensors], options=options)
    return run


class _Said:
    warning = False


def _warn_of_compiler(error: Exception) -> None:
    """Say once that graphs are replayed without a compiler."""
    if _Said.warning:
        return
    _Said.warning = True
    said = " ".join([line for line in str(error).strip().splitlines() if line][:2])
    warnings.warn(
        f"No compiler could take a traced pass ({type(error).__name__}: {said}). The graph is replayed as it "
        'is, as by packprop.compile(..., backend="eager").',
        PackpropWarning,
        stacklevel=6,
    )
