"""The pass over one batch: its memory, operation by operation, and the costs of each quantity in each layer.

# NOTE [Costs of layers]
The report computes each quantity alone, once to count bytes and once more to measure wall time. All that
happens after the work on one layer, up to the end of the work on the next, counts for the next layer: the way
back to it, and the use of the cotangents that arrive there. Quantities of one pass share the way back, so the
pass takes less time than the sum.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batch_pass import BatchPass
from packprop.applications.dataset.parts import readings_of
from packprop.applications.dataset.state import MergedResults
from packprop.applications.dataset.stream import BatchStream
from packprop.applications.reports.profile.layers import ROOT, TOTAL, owner_of
from packprop.engine.memory import LiveBytes, plan_over_data, step_over_data
from packprop.engine.passes import ChunkSizes, tasks_by_seed
from packprop.engine.recording import extended
from packprop.engine.tensors import (
    LossFunction,
    moved,
    named_parameters,
    random_numbers_from,
    random_states,
    tensors_in,
)
from packprop.errors import PackpropError, PackpropWarning
from packprop.types import INPUTS, Extension, Seed

ASKED = "The memory of a pass was to be noted."

TITLES = {
    "gradient_moments": "gradient",
    "batch_l2": "sample norms",
    "sample_ggn_trace_monte_carlo": "GGN trace, drawn",
    "kfac": "Kronecker factors",
    "sample_ggn_trace_exact": "GGN trace, exact",
}
"""Names of quantities on the page, by the attribute of the extension."""

PHASES = {"none": "inputs", "gradient": "gradients", "drawn": "drawn columns", "ggn": "exact columns"}
"""Names of the parts of a pass, by the cotangents of each."""

PATIENCE = 60.0
"""The report does not run a batch again for each quantity if a pass takes this many seconds."""

POINTS = 400
"""The number of points of the timeline; each is the maximum of its operations."""


Extensions = Callable[[], Sequence[Extension]]
Phase = tuple[str, int, int]
"""A part of a pass: its name, its first operation, the one after its last."""


@dataclass(frozen=True)
class Cost:
    """The cost of a quantity in a layer; see NOTE [Costs of layers].

    Args:
        layer: The name of the layer; ``"(total)"`` for the whole way back through the model.
        quantity: The name of the quantity.
        seconds: Wall time.
        bytes: The peak of bytes beside those alive before the work on the layer.
    """

    layer: str
    quantity: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of tensor storage in the pass over the first batch, and the plan for it.

    Args:
        samples: Samples in the batch.
        timeline: Bytes alive after each operation, at most ``POINTS`` of them: (operation, bytes).
        operations: The number of operations of the pass.
        forward: The last operation of the forward pass; ``None`` if it is not known.
        peak: The most bytes that were alive at once.
        budget: The budget; ``None`` without one.
        planned: The peak by the plan, with the results of the batches before; ``None`` if there is no plan.
        why_not: The reason why there is no plan.
        parts: The bytes of each kind of tensor at the planned peak.
        choices: The plan's choices for each parameter; the fields of ``Line``, and ``chunks``.
        phases: The parts of the pass, in their order: name, first operation, the one after the last; empty if
            the report cannot tell them apart.
        costs: The cost of each quantity in each layer; see NOTE [Costs of layers].
        why_no_costs: The reason why there are no costs.
    """

    samples: int
    timeline: list[tuple[int, int]]
    operations: int
    forward: int | None
    peak: int
    budget: int | None = None
    planned: int | None = None
    why_not: str | None = None
    parts: dict[str, int] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    why_no_costs: str | None = None

    def phase_at(self, operation: int) -> str:
        """Return the part of the pass that an operation belongs to; empty if the parts are unknown."""
        return next((name for name, first, after in self.phases if first <= operation < after), "")


@dataclass
class Noted:
    """The record of a pass. Each place is a time in seconds, and a number of operations (0 if not counted).

    Args:
        start: The beginning of the pass.
        forward: The end of the forward pass, if it is known.
        visits: The layer and the ``id`` of each finished parameter, and the end of the work on it.
        end: The end of the pass.
        history: Bytes alive after each operation, if they were counted.
        peak: The maximum of these bytes.
        samples: The number of samples in the batch.
    """

    start: tuple[float, int] = (0.0, 0)
    forward: tuple[float, int] | None = None
    visits: list[tuple[str, int, float, int]] = field(default_factory=list)
    end: tuple[float, int] = (0.0, 0)
    history: list[int] = field(default_factory=list)
    peak: int = 0
    samples: int = 0


@dataclass(frozen=True)
class OneBatch:
    """A batch that you can pass through the model and back repeatedly.

    Args:
        model: The model, in the mode of the pass.
        loss: As for ``compute``.
        batch: Inputs and targets, on the device of the model.
        chunk_sizes: The chunk sizes of the batch.
        device: The device of the pass.
    """

    model: nn.Module
    loss: LossFunction | None
    batch: tuple[Any, Any]
    chunk_sizes: ChunkSizes
    device: torch.device

    def run(self, extensions: Sequence[Extension], counted: bool) -> Noted:
        """Run the pass; count the bytes of tensors if ``counted``, otherwise measure the time."""
        noted, live, loss = Noted(), LiveBytes() if counted else None, self.loss

        def now() -> tuple[float, int]:
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            return time.perf_counter(), 0 if live is None else len(live.history)

        def marked(outputs: Any, target: Any) -> Tensor:
            assert loss is not None
            value = loss(outputs, target)
            noted.forward = now()
            return value

        owners = {id(p): owner_of(name) or ROOT for name, p in named_parameters(self.model)}

        def visited(leaf: Tensor, *_: Any) -> None:
            if id(leaf) in owners:
                noted.visits.append((owners[id(leaf)], id(leaf), *now()))

        chosen = tuple(extensions)
        called = None if loss is None else marked
        step = BatchPass(ASKED, self.model, called, MergedResults(chosen), chosen, None, log=visited)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", PackpropWarning)  # the pass over all data has warned already
            if loss is None:
                hook = self.model.register_forward_hook(lambda *_: setattr(noted, "forward", now()))
                stack.callback(hook.remove)
            stack.enter_context(extended(self.model, loss))
            stack.enter_context(random_numbers_from(random_states([self.device])))
            if live is not None:
                stack.enter_context(live)
                live.own([*self.model.parameters(), *self.model.buffers(), *tensors_in(self.batch)], "before")
                live.restart()
            noted.start = now()
            parts = readings_of(chosen)[0]
            BatchStream(step, self.device).add(self.batch, self.chunk_sizes, parts, False, 0)
            noted.end, noted.samples = now(), step.merged.samples
        if live is not None:
            noted.history, noted.peak = live.history, live.peak
        return noted


def memory_use(
    model: nn.Module,
    loss: LossFunction | None,
    batch: tuple[Any, Any],
    extensions: Extensions,
    chunk_sizes: ChunkSizes,
    memory: int | str | None,
    device: torch.device,
) -> MemoryUse:
    """Run the pass over one batch again, for all quantities and for each alone; record memory and time.

    It restores random states afterwards.

    Args:
        model: The model, in the mode of the pass.
        loss: As for ``compute``.
        batch: Inputs and targets.
        extensions: Makes the extensions of the pass, with draws of their own.
        chunk_sizes: The chunk sizes of the batch.
        memory: The budget.
        device: The device of the pass.
    """
    batch = moved(batch, device)
    planned: dict[str, Any]
    try:
        step = step_over_data(model, loss, batch, extensions(), device)
        plan = plan_over_data(step, chunk_sizes, memory)
        choices = [{**asdict(line), "chunks": line.chunks} for line in plan.lines]
        planned = {"budget": plan.memory, "planned": plan.peak, "parts": plan.parts, "choices": choices}
    except PackpropError as error:
        planned = {"why_not": f"{error.where}: {error.why}"}
    one = OneBatch(model, loss, batch, chunk_sizes, device)
    chosen = [*extensions()]
    noted = one.run(chosen, counted=True)
    seconds = noted.end[0] - noted.start[0]
    costs: list[Cost] = []
    alone: list[Noted] = []
    why_no_costs = None
    if seconds < PATIENCE:
        costs, alone = costs_of(one, extensions)
    else:
        why_no_costs = f"the pass over the first batch took {seconds:.0f} s, and was not run for each quantity"
    return MemoryUse(
        samples=noted.samples,
        timeline=thinned(noted.history),
        operations=len(noted.history),
        forward=None if noted.forward is None else noted.forward[1],
        peak=noted.peak,
        phases=phases_of(noted, chosen, alone) if alone else [],
        costs=costs,
        why_no_costs=why_no_costs,
        **planned,
    )


def thinned(history: Sequence[int], points: int = POINTS) -> list[tuple[int, int]]:
    """Return at most ``points`` points of a timeline, each the highest of its stretch, at its own place.

    >>> thinned([1, 5, 2, 3, 9, 4], points=2)
    [(1, 5), (4, 9)]
    """
    step = -(-len(history) // points) if history else 1
    starts = range(0, len(history), step)
    highest = (max(range(at, min(at + step, len(history))), key=history.__getitem__) for at in starts)
    return [(at, history[at]) for at in highest]


def costs_of(batch: OneBatch, extensions: Extensions) -> tuple[list[Cost], list[Noted]]:
    """Return the cost of each quantity alone in each layer, and the records of the counted passes."""
    found: list[Cost] = []
    seen = []
    for index, extension in enumerate(extensions()):
        counted, timed = (batch.run([[*extensions()][index]], counts) for counts in (True, False))
        found += _costs(TITLES.get(extension.savefield, extension.name), counted, timed)
        seen.append(counted)
    return found, seen


def _costs(quantity: str, counted: Noted, timed: Noted) -> list[Cost]:
    """Return the costs of one quantity in each layer, from two passes; no costs if their visits differ."""
    layers = [visit[0] for visit in counted.visits]
    if counted.forward is None or timed.forward is None or layers != [visit[0] for visit in timed.visits]:
        return []
    seconds, sizes = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0)
    since, began = timed.forward[0], counted.forward[1]
    for layer, (_, _, when, _), (_, _, _, at) in zip(layers, timed.visits, counted.visits, strict=True):
        seconds[layer] += when - since
        sizes[layer] = max(sizes[layer], _added(counted.history, began, at))
        since, began = when, at
    whole = _added(counted.history, counted.forward[1], counted.end[1])
    total = Cost(TOTAL, quantity, timed.end[0] - timed.forward[0], whole)
    return [*(Cost(layer, quantity, seconds[layer], sizes[layer]) for layer in seconds), total]


def _added(history: Sequence[int], first: int, after: int) -> int:
    """Return the peak of bytes in some operations, less the bytes alive before."""
    before = history[first - 1] if first else 0
    return max([*history[first:after], before]) - before


def phases_of(noted: Noted, extensions: Sequence[Extension], alone: Sequence[Noted]) -> list[Phase]:
    """Return the parts of a pass with all extensions, told apart by the sweeps that each takes ``alone``.

    The list is empty if the numbers of sweeps do not add up, because a part might get the name of another.
    """
    if noted.forward is None:
        return []
    counts: dict[Seed, int] = {}
    for seed, tasks in tasks_by_seed(extensions).items():
        index = next(at for at, extension in enumerate(extensions) if extension is tasks[0].extension)
        others = {row.seed for row in extensions[index].rows} - {seed}
        if not others <= {INPUTS} or seed == INPUTS:
            counts[seed] = 1
        else:
            counts[seed] = len(sweeps_of(alone[index])) - len(others)
    order = sorted(counts, key=lambda seed: {"none": 0, "gradient": 2}.get(seed.kind, 1))
    names = [phase_name(seed) for seed in order for _ in range(counts[seed])]
    sweeps = sweeps_of(noted)
    if len(names) != len(sweeps):
        return []
    phases: list[Phase] = [("forward pass", 0, noted.forward[1])]
    for name, end in zip(names, sweeps, strict=True):
        last, first, begun = phases[-1]
        if last == name:
            phases[-1] = (name, first, end)
        else:
            phases.append((name, begun, end))
    name, first, _ = phases[-1]
    return [*phases[:-1], (name, first, noted.end[1])]


def phase_name(seed: Seed) -> str:
    """Return the name of the part of a pass that sends a seed back."""
    return PHASES.get("drawn" if seed.mc_samples is not None else seed.kind, seed.kind)


def sweeps_of(noted: Noted) -> list[int]:
    """Return the end of each sweep, in operations; a sweep begins when a parameter is visited again."""
    ends: list[int] = []
    met: set[int] = set()
    before = None
    for _, parameter, _, at in noted.visits:
        if parameter in met and parameter != before:
            met.clear()
        if not met:
            ends.append(at)
        met.add(parameter)
        ends[-1], before = at, parameter
    return ends
