"""What runs a traced graph: the graph itself, or what ``torch.compile`` makes of it."""

from __future__ import annotations

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
        self._graph, self._compiles = graph, backend != REPLAY
        self._copies = self._compiles and (backend == "cudagraphs" or mode in WITH_CUDA_GRAPHS)
        self._run: Run = graph if not self._compiles else _compiled(graph, backend, mode)
        self.backend = backend
        self.seconds: float | None = None
        """How long it took to compile."""

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of the graph; nothing is differentiated."""
        outputs: Sequence[Tensor]
        regions = AutocastRegions.now({tensor.device.type for tensor in tensors})
        with torch.no_grad(), regions.switched(False):  # the graph holds what autocast did
            if self._copies:
                torch.compiler.cudagraph_mark_step_begin()
            if not self._compiles or self.seconds is not None:
                return self._kept(self._run(*tensors))
            start = time.perf_counter()
            try:
                outputs = self._run(*tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler that is missing, or cannot do it
                self._run, self._compiles, self.backend = self._graph, False, REPLAY
                _warn_of_compiler(error)
                return self._graph(*tensors)  # type: ignore[no-any-return]  # torch does not say
            self.seconds = time.perf_counter() - start
            return self._kept(outputs)

    def _kept(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Outputs that no later replay writes over: a CUDA graph has one place for each."""
        return [each.clone() for each in outputs] if self._copies else outputs


def _compiled(graph: GraphModule, backend: Backend, mode: str | None) -> Run:
    """``torch.compile`` of a graph.

    Random numbers are PyTorch's own, so that they are the same with and without a compiler.
    """
    options: dict[str, Any] | None = None
    if backend == "inductor":
        options = {"fallback_random": True}
        if mode is not None:
            options |= torch._inductor.list_mode_options(mode)
        mode = None
    compiled: Run = torch.compile(graph, backend=backend, mode=mode, options=options, dynamic=False)
    return compiled


class _Said:
    warning = False


def _warn_of_compiler(error: Exception) -> None:
    """Say once that graphs are replayed without a compiler."""
    if _Said.warning:
        return
    _Said.warning = True
    said = [line for line in str(error).strip().splitlines() if line]
    warnings.warn(
        f"torch.compile failed on a traced pass ({type(error).__name__}: {' '.join(said[:2])}). The graph "
        'is replayed without a compiler, as by packprop.compile(..., backend="eager").',
        PackpropWarning,
        stacklevel=4,
    )
