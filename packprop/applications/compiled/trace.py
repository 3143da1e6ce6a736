"""A pass as a graph: traced on real tensors, with parameters, buffers and the batch as its inputs."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from packprop.applications.compiled.effects import Effects, Watch
from packprop.applications.compiled.graphs import constants_of, operations_of, tidy
from packprop.applications.compiled.passes import ASKED, Outcome, Pass
from packprop.applications.compiled.reads import ReadsValue
from packprop.applications.compiled.state import state_of
from packprop.engine.recording import unchanged
from packprop.engine.tensors import Decisions, map_instances, map_tensors, not_traceable, tensors_in, traced
from packprop.errors import PackpropError

OWN = str(Path(__file__).resolve().parents[2])
TORCH = (str(Path(torch.__file__).parent), *(str(Path(each).parent) for each in torch.__path__))
"""Folders of code that is not the user's."""

HANDING_ON = tuple(
    f"{OWN}/{name}.py"
    for name in (
        *("engine/context", "engine/recording/recorder"),
        *("applications/compiled/effects", "applications/compiled/reads"),
    )
)
"""Files of modes: the calls of the user's code go through them."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the outputs of a graph."""

    number: int


@dataclass(frozen=True)
class Traced:
    """A pass as a graph.

    Args:
        graph: Maps parameters, buffers and the tensors of the batch to a tuple of tensors; it writes to
            buffers. The first output says whether values are faulty.
        template: The results of the pass, with places in the outputs for tensors.
        decisions: Decisions that depend on values, as the previous pass made them.
        effects: The effects of the graph besides its outputs.
        may_fail: Says that there are conditions for faulty values.
        seconds: The time that tracing took.
    """

    graph: GraphModule
    template: Outcome
    decisions: Decisions
    effects: Effects
    may_fail: bool
    seconds: float

    @property
    def operations(self) -> int:
        """The number of operations in the graph."""
        return operations_of(self.graph)

    def outcome(self, outputs: Sequence[Tensor]) -> Outcome:
        """Return the results of the pass, given the outputs of the graph."""

        def filled(value: Any) -> Any:
            return map_instances(Place, lambda place: outputs[place.number], value)

        made = self.template
        return Outcome(filled(made.loss), filled(made.gradients), filled(made.results), made.finished)


def trace(step: Pass, inputs: Any, targets: Any, decisions: Decisions) -> Traced:
    """Trace a pass; then restore the model, the random states, and everything else that it has written to.

    Args:
        step: The pass.
        inputs: The model's inputs.
        targets: The loss's arguments beside the outputs.
        decisions: Decisions that depend on values, as the previous pass made them.

    Raises:
        NotTraceable: If a replay would differ from the pass.
        PackpropError: If the model asks for values in Python.
    """
    start = time.perf_counter()
    templates: list[Outcome] = []
    conditions: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for module in step.modules:
            stack.enter_context(unchanged(module, ASKED))
        state = state_of(step.modules, step.loss, step.extensions, (inputs, targets))
        watch = Watch(state.tensors)
        stack.callback(watch.undo)

        def run(*_: Tensor) -> tuple[Tensor, ...]:
            with watch.watching(), traced(decisions) as own:
                outcome = step.run_apart(state.parameters, inputs, targets)
            conditions.extend(own.faults)
            outputs = [_fault(own.faults, outcome.loss)]
            templates.append(_with_places(outcome, outputs))
            return tuple(outputs)

        graph = _make_graph(run, state.tensors)
    if any(tensor.requires_grad for tensor in constants_of(graph)):
        raise not_traceable(
            "a tensor that requires gradients and belongs neither to the model nor to the loss module",
            "a graph takes parameters as inputs, and finds them in these modules",
        )
    if watch.unsized is not None:
        why = "the size of what it returns depends on values, and a graph has one size"
        raise not_traceable(watch.unsized, why)
    tidy(graph)
    effects = watch.effects([*constants_of(graph)])
    return Traced(graph, templates[0], decisions, effects, bool(conditions), time.perf_counter() - start)


def _fault(conditions: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return a tensor ``[]`` that tells whether any of the conditions holds."""
    if not conditions:
        return torch.zeros((), dtype=torch.bool, device=like.device)
    flat = [condition.reshape(()).to(like.device) for condition in conditions]
    return flat[0] if len(flat) == 1 else torch.stack(flat).any()


def _with_places(outcome: Outcome, outputs: list[Tensor]) -> Outcome:
    """Move the tensors of an outcome to the outputs, and leave places for them."""
    results = [*tensors_in([*outcome.results.values()])]
    taken = {tensor.untyped_storage().data_ptr() for tensor in results}

    def place(tensor: Tensor) -> Place:
        outputs.append(tensor)
        return Place(len(outputs) - 1)

    def own(gradient: Tensor) -> Place:  # later passes add to gradients in place
        storage = gradient.untyped_storage().data_ptr()
        shared = storage in taken
        taken.add(storage)
        return place(gradient.clone() if shared else gradient)

    loss: Any = place(outcome.loss)
    gradients: Any = map_tensors(own, outcome.gradients)
    return Outcome(loss, gradients, map_tensors(place, outcome.results), outcome.finished)


def _make_graph(run: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> GraphModule:
    """Trace a function of real tensors.

    Raises:
        PackpropError: With the line that asks for a value, if there is one.
        NotTraceable: If it is packprop's own line, or something else cannot be traced.
    """
    torch.clear_autocast_cache()  # copies of weights in low precision would be constants
    try:
        graph: GraphModule = make_fx(run)(*tensors)
        return graph
    except PackpropError:
        raise
    except Exception as error:
        line = _innermost(error)
        asks_for_value = isinstance(error, ReadsValue) or "get value out of a tracing tensor" in str(error)
        if asks_for_value and line is not None and not line.filename.startswith(OWN):
            raise PackpropError(
                ASKED,
                _said(line),
                "it asks for a value of a tensor, or decides by one: a graph that is traced once cannot",
                "write it with tensors (torch.where, masks), or use `with packprop.backpack(...)` around "
                "loss.backward(), which runs every pass anew",
            ) from error
        said = ["the model asks for a value"] if asks_for_value else [*str(error).strip().splitlines(), ""]
        why = f"PyTorch could not trace it: {type(error).__name__}: {said[0]}"
        raise not_traceable(_said(line), why) from error
    finally:
        torch.clear_autocast_cache()


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost line that is not PyTorch's, nor packprop's on the way to a call of the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each
        for each in frames
        if not each.filename.startswith((*TORCH, "<")) and each.filename not in HANDING_ON
    ]
    return own[-1] if own else None


def _said(frame: traceback.FrameSummary | None) -> str:
    return "the pass" if frame is None else f"{frame.filename}:{frame.lineno}: {frame.line}"
