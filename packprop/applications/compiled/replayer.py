"""A repeated pass: ordinary at first, then a graph."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.compiled.checks import checked
from packprop.applications.compiled.compiler import REPLAY, Backend, Runner
from packprop.applications.compiled.passes import ASKED, Pass
from packprop.applications.compiled.state import State, first_change, python_random_states, state_of
from packprop.applications.compiled.trace import Traced, trace
from packprop.engine.context import SIZES_OF_CHUNKS
from packprop.engine.memory import gradients_are_there
from packprop.engine.recording import is_recording_disabled
from packprop.engine.tensors import (
    PARALLEL,
    Decisions,
    NotTraceable,
    has_late_hooks,
    noting_decisions,
    tensors_in,
    waiting,
)
from packprop.errors import BadInput, PackpropError, PackpropWarning

MOST = 8
"""The maximum number of kinds of calls that packprop traces; calls of further kinds run eagerly."""

WORTH = 32
"""The number of replays after which packprop compiles the graph of a kind of calls other than the first.

The last batch of an epoch is smaller, and comes only once in each.
"""

MEASURED = 5
"""The number of timed replays before packprop may call one slower than a pass."""

NOISE = 1.05
"""The factor by which the fastest replay may be slower than the fastest pass."""

SEEN = 64
"""The number of kinds of calls at which packprop forgets kinds that it has not traced."""


@dataclass
class Kind:
    """The state of all calls of one kind, which are those with the same ``State.key``.

    Args:
        inputs: A description of the arguments, for people.
        passes: The number of ordinary passes.
        pass_seconds: The time of the fastest ordinary pass, without tracing and checking.
        replay_seconds: The time of the fastest replay.
        traced: The graph, once there is one.
        is_first: Says that packprop traced this kind before all others.
        runner: The runner of the graph, once it was checked.
        tried: Says that packprop has tried to compile the graph.
        refusal: The reason why calls of this kind run as ordinary passes from now on, if they do.
        replays: The number of replays in place of a pass.
    """

    inputs: str
    passes: int = 1
    pass_seconds: float = math.inf
    replay_seconds: float = math.inf
    traced: Traced | None = None
    is_first: bool = False
    runner: Runner | None = None
    tried: bool = False
    refusal: str | None = None
    replays: int = 0

    def __str__(self) -> str:
        return f"{self.inputs}: {_became(self)}"


class Policy:
    """Decides when to trace calls of one kind, when to compile the graph, and whether to keep it.

    This policy traces calls as soon as possible; it compiles the first kind at once, others once frequent.
    """

    warns = True
    """Show warnings about calls that are not replayed."""

    def traces(self, kind: Kind) -> bool:
        """Tell whether to trace the next pass; asked before each one."""
        return True

    def holds(self) -> bool:
        """Tell whether graphs may replace passes now; asked before each use of a graph."""
        return True

    def compiles(self, kind: Kind) -> bool:
        """Tell whether to compile the graph; asked before the check of the graph, and after each replay."""
        return kind.is_first or kind.replays >= WORTH

    def keeps(self, kind: Kind) -> bool:
        """Tell whether to keep replays, which must not be slower than passes; asked after each replay."""
        return kind.replays < MEASURED or kind.replay_seconds < NOISE * kind.pass_seconds


class Replayer:
    """Runs an ordinary pass in the first three calls of a kind, and a graph from the fourth on.

    Args:
        step: The pass.
        backend: The compiler of graphs; ``"eager"`` for none.
        mode: As in ``torch.compile``.
        policy: Decides when packprop uses a graph.
    """

    def __init__(self, step: Pass, backend: Backend, mode: str | None, policy: Policy | None = None) -> None:
        self._pass, self._backend, self._mode = step, backend, mode
        self._policy = Policy() if policy is None else policy
        self._kinds: dict[Any, Kind] = {}
        self._traced_last: tuple[Any, ...] | None = None
        self._changed_themselves = 0
        self._warned: set[str] = set()

    @property
    def kinds(self) -> list[Kind]:
        """The state of calls, one for each kind so far."""
        return [*self._kinds.values()]

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Run the pass; return the loss ``[]``, cut from its graph."""
        state = self._state(inputs, targets)
        kind = self._kinds.get(state.key)
        if kind is not None and kind.traced is not None and not self._policy.holds():
            return self._run(inputs, targets)
        if kind is not None and kind.runner is not None:
            return self._replay(kind, kind.runner, state, inputs, targets)
        if kind is None:
            return self._first(state, inputs, targets)
        kind.passes += 1
        if kind.refusal is not None or (kind.traced is None and not self._policy.traces(kind)):
            return self._timed(kind, inputs, targets)
        if kind.traced is None:
            return self._second(kind, state, inputs, targets)
        return self._third(kind, kind.traced, state, inputs, targets)

    def _state(self, inputs: Any, targets: Any, before: State | None = None) -> State:
        """Return the state that this call depends on; plans also depend on the gradients there before it."""
        state = state_of(self._pass.modules, self._pass.loss, self._pass.extensions, (inputs, targets))
        if self._pass.budget is None:
            return state
        there = gradients_are_there(state.parameters) if before is None else before.key[-1]
        return State(state.parameters, state.batch, (*state.key, there))

    def _first(self, state: State, inputs: Any, targets: Any) -> Tensor:
        """Run an ordinary pass, which makes the decisions that later passes take over."""
        loss = self._run(inputs, targets)
        now = self._state(inputs, targets, state)
        if now.key != state.key or any(a is not b for a, b in zip(now.tensors, state.tensors, strict=True)):
            self._changed_themselves += 1
            if self._changed_themselves > 2:  # many models change in their first pass
                change = first_change(self._pass.modules, state.key, now)
                self._warn("changes", f"a pass changes the model: {change}")
            return loss
        if len(self._kinds) >= SEEN:
            self._forget(state)
        kind = self._kinds[state.key] = Kind(_described((inputs, targets)))
        kind.refusal = self._reason_against(state)
        return loss

    def _second(self, kind: Kind, state: State, inputs: Any, targets: Any) -> Tensor:
        """Run an ordinary pass, then trace one on the same values."""
        before = python_random_states()
        with noting_decisions() as decisions:
            loss = self._timed(kind, inputs, targets)
        if python_random_states() != before:
            self._refuse(kind, "it draws random numbers from Python or NumPy, which a replay would not do")
            return loss
        try:
            with waiting("tracing a step", self._policy.warns):
                kind.traced = trace(self._pass, inputs, targets, decisions)
        except PackpropError as error:
            if self._policy.warns and not isinstance(error, NotTraceable):
                raise
            self._refuse(kind, f"{error.where}: {error.why}")
            return loss
        kind.is_first = self._traced_last is None
        self._traced_last = state.key
        return loss

    def _third(self, kind: Kind, traced: Traced, state: State, inputs: Any, targets: Any) -> Tensor:
        """Run an ordinary pass, and a replay beside it."""
        compiles = not kind.tried and self._backend != REPLAY and self._policy.compiles(kind)
        kind.tried = kind.tried or compiles
        runner = Runner(traced.graph, self._backend if compiles else REPLAY, self._mode)
        if compiles and not kind.is_first:
            self._say_compiled_again(state)
        said = f"{'compiling' if compiles else 'checking'} {traced.operations:,} operations of a step"
        with noting_decisions() as decisions, waiting(said, self._policy.warns):
            outcome, fault = checked(self._pass, traced, runner, state, inputs, targets)
        if (differing := _differing(traced.decisions, decisions)) is not None:
            fault = f"each pass decides it from values: {differing}"
        if runner.warning is not None:
            self._say(runner.warning, runner.warning, stacklevel=5)
        if fault is None:
            kind.runner = runner
        elif runner.backend != REPLAY:
            self._warn("compiler", f"{runner.backend!r} does not do what the graph says: {fault}")
        else:
            self._refuse(kind, f"a replay does not do what the pass does: {fault}")
            kind.traced = None
        return self._pass.deliver(state.parameters, outcome)

    def _replay(self, kind: Kind, runner: Runner, state: State, inputs: Any, targets: Any) -> Tensor:
        """Run the graph in place of a pass; if values are faulty, run a pass, which reports them."""
        traced = kind.traced
        assert traced is not None
        start = time.perf_counter()
        self._pass.clear(state.parameters, traced.template)
        before = traced.effects.kept(state.tensors) if traced.may_fail else None
        outputs = runner(state.tensors)
        if bool(outputs[0]):
            assert before is not None
            before.put_back()
            return self._run(inputs, targets)
        kind.replays += 1
        if not kind.tried and self._backend != REPLAY and self._policy.compiles(kind):
            kind.runner = None  # the next call is a check again
        loss = self._pass.deliver(state.parameters, traced.outcome(outputs))
        kind.replay_seconds = min(kind.replay_seconds, time.perf_counter() - start)
        if not self._policy.keeps(kind):
            own, other = 1000 * kind.replay_seconds, 1000 * kind.pass_seconds
            if runner.is_costly:
                self._warn("slower", f"{runner.took}, a replay takes {own:.3g} ms and a pass {other:.3g} ms")
            kind.runner, kind.refusal = None, f"a replay takes {own:.3g} ms, a pass {other:.3g} ms"
        return loss

    def _timed(self, kind: Kind, inputs: Any, targets: Any) -> Tensor:
        start = time.perf_counter()
        loss = self._run(inputs, targets)
        kind.pass_seconds = min(kind.pass_seconds, time.perf_counter() - start)
        return loss

    def _run(self, inputs: Any, targets: Any) -> Tensor:
        try:
            return self._pass.run(inputs, targets)
        except RuntimeError as error:
            devices = [str(each.device) for each in tensors_in((inputs, targets))]
            own = {str(each.device) for module in self._pass.modules for each in module.parameters()}
            if isinstance(error, PackpropError) or "device" not in str(error) or own == set(devices):
                raise
            raise BadInput(
                ASKED,
                f"a batch on {', '.join(dict.fromkeys(devices))}",
                f"model and batch are not on one device: {error}",
                "move the batch to the device of the model",
            ) from error

    def _reason_against(self, state: State) -> str | None:
        """Return the reason not to trace calls of this kind, if there is one, and warn of it."""
        reason = None
        if is_recording_disabled():
            return "packprop.disable() is in force"
        if any(tensor.requires_grad for tensor in state.batch):
            reason = "a tensor of the batch requires gradients"
        elif any(isinstance(each, PARALLEL) for root in self._pass.modules for each in root.modules()):
            reason = "the model is spread over processes or devices, and a graph cannot contain their exchange"
        elif any(map(has_late_hooks, state.parameters)):
            reason = "a hook runs after the accumulation of a gradient, and a replay would not call it"
        elif any(type(each) not in PLAIN_TENSORS or each.layout is not torch.strided for each in state.tensors):
            reason = "a tensor has a class other than Tensor, Parameter and Buffer, or is not dense"
        elif sum(kind.traced is not None for kind in self._kinds.values()) >= MOST:
            change = first_change(self._pass.modules, self._traced_last or (), state)
            reason = f"{MOST} kinds of calls have been traced, and this is another: {change}"
        if reason is not None:
            self._warn(reason.split(":")[0], reason)
        return reason

    def _forget(self, state: State) -> None:
        """Forget the older half of the untraced kinds; most never come again."""
        untraced = [key for key, kind in self._kinds.items() if kind.traced is None]
        change = first_change(self._pass.modules, untraced[-1], state)
        self._warn("many", f"{SEEN} kinds of calls were made, the last two of which differ in {change}")
        for key in untraced[: len(untraced) // 2 + 1]:
            del self._kinds[key]

    def _refuse(self, kind: Kind, reason: str) -> None:
        kind.refusal = reason
        self._warn(reason, reason)

    def _say_compiled_again(self, state: State) -> None:
        """Warn once that calls of another kind have become frequent, and need a compiled graph of their own."""
        first = next((key for key, kind in self._kinds.items() if kind.is_first), None)
        if first is not None:
            change = first_change(self._pass.modules, first, state)
            self._say(
                "again",
                f"A compiled step is compiled again, for calls that differ from the first ones in {change}.",
            )

    def _warn(self, about: str, reason: str) -> None:
        """Warn once, for one reason, that calls run eagerly."""
        self._say(about, f"A compiled step runs passes eagerly, without a graph: {reason}.")

    def _say(self, about: str, warning: str, stacklevel: int = 6) -> None:
        """Warn, but only once for each value of ``about``."""
        if about not in self._warned and self._policy.warns:
            self._warned.add(about)
            warnings.warn(warning, PackpropWarning, stacklevel=stacklevel)


PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def _became(kind: Kind) -> str:
    """Describe the state of calls of one kind."""
    if kind.refusal is not None:
        return f"eager: {kind.refusal}"
    if kind.traced is None:
        return "eager; the next call is traced"
    said = f"{kind.traced.operations} operations, traced in {kind.traced.seconds:.2g} s"
    if kind.runner is None:
        return f"{said}; the next call compares an eager pass with a replay"
    if kind.runner.seconds is not None:
        said += f", compiled in {kind.runner.seconds:.2g} s"
        said += f" by {kind.runner.backend!r}" if kind.runner.verdict is None else ""
    said += "" if kind.runner.verdict is None else f"; {kind.runner.verdict}"
    return f"{said}; {kind.replays} replays"


def _described(batch: Any) -> str:
    """Return shapes and precisions of the tensors of a batch."""
    given = [f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors_in(batch)]
    return ", ".join(given) or "no tensors"


def _differing(before: Decisions, now: Decisions) -> str | None:
    """Describe the first decision that differs; sizes of chunks may, for they do not depend on values."""
    pairs = zip(before, now, strict=False)
    other = next((str(new[0]) for old, new in pairs if old != new and new[0] != SIZES_OF_CHUNKS), None)
    return other if len(before) == len(now) else other or "the number of decisions"
