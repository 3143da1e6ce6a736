"""A budget in bytes -> bites: one step is run on tensors without data, and what it would take is counted.

# NOTE [Dry runs]
A dry run is the real code, under fake tensors, with a count of the storage that is alive: model, loss, walk,
sweeps and statistics are those of the real pass, so that the count is, too. What repeats itself (bites of
samples, chunks of columns) is run three times at most. Samples are taken to be where they usually are, unless
a real pass of the same shapes has found them. What a kernel allocates inside of itself is not seen.

A plan holds for a training loop: in the first step samples are to be found, in the others the results of the
step before are there until the first of their own are; the peak is the largest of all.
"""

from __future__ import annotations

import copy
import functools
import io
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node

from packprop.algorithms import CHOICES, forced
from packprop.bites import Bites, default_bites
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.graph import Found, Graph, walk
from packprop.memory import LiveBytes, Spec, byte_count, byte_text, keep_freed_pages, pretending, storage_key
from packprop.observe import Observation
from packprop.samples import check_graph, same_verdicts
from packprop.structures import Outer, Quadratic
from packprop.tape import extend, record
from packprop.types import Extension, map_kind, map_tensors, tensors_in

ASKED = "A plan was asked for."
LARGEST = 5
"""Tensors that are listed of a peak."""
CUDA_BLOCK = 512
"""Bytes that CUDA's allocator rounds to."""


def choices(device: torch.device, freed: bool = False) -> list[Bites]:
    """What is tried until the peak fits, least time and largest peak first.

    Smaller bites cost calls, fewer columns at once sweeps, which is dearer where a graph is small enough for
    vectorised ones: they are given up late. Algorithms that hold less cost multiplications; parameters in turn,
    which help only where their results are ``freed``, cost all sweeps again.
    """
    scratch, signals, *_ = default_bites(device)
    parts = (1, 1), (1, 4), (1, 16), (4, 16), (4, 64), (16, 64)
    found = [Bites(scratch // samples, signals // columns) for samples, columns in parts]
    found += [Bites(scratch // 16, 0), Bites(scratch // 16, 0, held=0), Bites(0, 0, held=0)]
    return found + [Bites(0, 0, 0, count) for count in (8, 1)] * freed


HELD = tuple(2**power for power in range(30, 9, -1))
"""Bytes of a sample: at each step those uses that hold most take algorithms that hold less."""


def looser(bites: Bites, loosest: Bites, name: str) -> list[Bites]:
    """``bites`` with more of one kind: first as in ``loosest``, then less and less of it, last what it is."""
    most, least = getattr(loosest, name), getattr(bites, name)
    if most == least:
        return [bites]
    between = HELD if most is None else tuple(most // 2**power for power in range(1, 19))
    values = (most, *(value for value in between if value > least), least)
    return [bites._replace(**{name: value}) for value in values]


class BudgetTooSmall(BadInput):
    """A budget is less than any choice of bites takes; ``floor`` is the least, in bytes."""

    floor: int = 0


@dataclass(frozen=True)
class Line:
    """What is done for one parameter.

    Args:
        parameter: Its name.
        use: Functions that it enters.
        structure: How it enters them.
        algorithm: Whether its per-sample gradients are formed, and how; *in turn*: one is there at a time.
        samples: Samples in a bite.
        count: Samples in all.
        bytes: Bytes of the per-sample gradients of a bite, or of one in turn.
    """

    parameter: str
    use: str
    structure: str
    algorithm: str
    samples: int
    count: int
    bytes: int

    @property
    def bites(self) -> int:
        """Number of bites of samples."""
        return -(-self.count // self.samples)


@dataclass(frozen=True)
class Plan:
    """What a step will take, and the bites that it is done in; prints as two tables.

    Args:
        peak: Most bytes of tensor storage alive at once, in forward and backward pass.
        memory: The budget in bytes; ``None`` if there is none.
        device: The type of device it is made for.
        bites: How much is taken at once.
        lines: One for each parameter.
        parts: What the peak is made of: kind -> bytes, the largest first.
        items: The largest single tensors at the peak: (description, bytes).
        samples: Samples in the batch.
        results: Bytes of all results.
        extensions: Names of what was asked for.
        freed: Whether it counts on an extension hook that takes values away.
        accumulated: Whether gradients of an earlier pass were taken to be there when a step begins.
        shapes: Uses and the shapes of their outputs, by which a pass is known again.
        leaves: Shapes and precisions of parameters, likewise.
        options: Names and values of the extensions' options, likewise.
    """

    peak: int
    memory: int | None
    device: str
    bites: Bites
    lines: tuple[Line, ...]
    parts: dict[str, int]
    items: tuple[tuple[str, int], ...]
    samples: int
    results: int
    extensions: tuple[str, ...]
    freed: bool
    accumulated: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(repr=False)
    leaves: tuple[tuple[tuple[int, ...], torch.dtype], ...] = field(repr=False)
    options: tuple[tuple[tuple[str, str], ...], ...] = field(repr=False)

    def require_fit(self, graph: Graph, extensions: Sequence[Extension], hooked: bool = False) -> None:
        """Refuse a pass that the plan was not made for; ``hooked`` if an extension hook is there.

        Warns if gradients of an earlier pass are there that the plan did not count.

        Raises:
            BadInput: With the first difference.
        """
        theirs = _shapes(graph)
        names = tuple(extension.name for extension in extensions)
        device = next((leaf.device.type for leaf in graph.leaves()), self.device)
        difference = None
        if self.freed and not hooked:
            difference = "no extension hook; planned was one that takes values away"
        elif names != self.extensions:
            difference = f"extensions {', '.join(names)}; planned were {', '.join(self.extensions)}"
        elif device != self.device:
            difference = f"parameters on {device}; planned was {self.device}"
        elif len(theirs) != len(self.shapes):
            difference = f"{len(theirs)} uses of parameters; planned were {len(self.shapes)}"
        else:
            for (use, shape), (planned_use, planned_shape) in zip(theirs, self.shapes, strict=True):
                if (use, shape) != (planned_use, planned_shape):
                    difference = f"{use} {list(shape)}; planned was {planned_use} {list(planned_shape)}"
                    break
        if difference is None:
            difference = self._other_options(extensions) or self._other_leaves(graph)
        if difference is not None:
            raise BadInput(
                "A backward pass with a plan was started.",
                difference,
                "the plan was made for another model, batch or device: its peak says nothing of this one",
                "make a plan for this one, or give the budget itself: backpack(..., memory='600MiB')",
            )

        if not self.accumulated and _gradients_are_there(graph.leaves()):
            warnings.warn(
                "Gradients of an earlier pass are there, and the plan counts on none: the peak may be higher "
                "by their size. Call zero_grad() before the step, or make the plan with accumulated=True.",
                PackpropWarning,
                stacklevel=2,
            )

    def _other_options(self, extensions: Sequence[Extension]) -> str | None:
        for extension, planned in zip(extensions, map(dict, self.options), strict=True):
            if not is_dataclass(extension):
                continue  # it may keep what it has seen
            for name, value in _options(extension):
                if planned.get(name, value) != value:
                    return f"{extension.name} with {name} {value}; planned was {planned[name]}"
        return None

    def _other_leaves(self, graph: Graph) -> str | None:
        for leaf, (shape, dtype) in zip(graph.leaves(), self.leaves, strict=False):
            if (tuple(leaf.shape), leaf.dtype) != (shape, dtype):
                what = f"parameter {graph.name(leaf)!r} {[*leaf.shape]} {leaf.dtype}"
                return f"{what}; planned was {[*shape]} {dtype}"
        return None

    def __str__(self) -> str:
        console = Console(width=112, file=io.StringIO(), record=True)
        console.print(self._table(), self._sum())
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _table(self) -> Table:
        table = Table("parameter", "use", "structure", "algorithm", "bites of samples", "a bite", box=None)
        for line in self.lines:
            bites = f"{line.bites} of {line.samples}" if line.bites > 1 else f"1 of {line.count}"
            cells = (line.parameter, line.use, line.structure, line.algorithm, bites, byte_text(line.bytes))
            table.add_row(*cells)
        return table

    def _sum(self) -> Table:
        budget = "no budget" if self.memory is None else f"budget {byte_text(self.memory)}"
        table = Table("", "", title=f"peak {byte_text(self.peak)} on {self.device}, {budget}", box=None)
        for kind, size in self.parts.items():
            table.add_row(kind, byte_text(size))
        table.add_section()
        table.add_row("largest at the peak", "")
        for name, size in self.items:
            table.add_row(f"  {name}", byte_text(size))
        return table


def plan(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    extensions: Sequence[Extension],
    memory: int | str | None = None,
    device: torch.device | str | None = None,
    *,
    gradients: bool = True,
    freed: bool = False,
    accumulated: bool = False,
) -> Plan:
    """What one step with extensions will take, and the bites that keep it inside a budget.

    Nothing is allocated and nothing of the model is changed: it is copied without its data. It may itself
    have none (``with torch.device("meta"):``), and ``device`` may be one that is not there.

    Args:
        model: Any module.
        loss: Loss module or function, called as ``loss(outputs, targets)``.
        batch: Inputs (a tensor, a tuple or a dictionary of arguments) and targets; their data do not matter.
        extensions: Instances from ``packprop.extensions``.
        memory: The most bytes of tensor storage that may be alive at once (``"600MiB"``, a number), with
            parameters, activations and results; ``None`` to be told what the default takes.
        device: Where the step will run; by default where the parameters are.
        gradients: Whether ``.grad`` is computed along, as by ``backward()``; ``compute`` does not.
        freed: Whether an extension hook takes the values of each parameter away as soon as they are there.
        accumulated: Whether ``.grad`` of an earlier pass is there when a step begins: gradients are added up
            over several passes, or zeroed by ``zero_grad(set_to_none=False)``.

    Raises:
        BadInput: If the budget is no number of bytes, or less than any choice of bites takes.
        PackpropError: If the forward pass decides on data.
    """
    budget = budget_of(memory)
    parameter = next(model.parameters(), None)
    here = parameter.device if parameter is not None else torch.device("cpu")
    where = torch.device(device) if device is not None else here
    inputs, targets = batch

    def step(copied: nn.Module, fake: Callable[[Any], Any]) -> Tensor:
        given = fake(map_tensors(Spec.of, inputs))
        target = fake(map_tensors(Spec.of, targets))
        extend(copied)
        judge = _copied(loss, fake) if isinstance(loss, nn.Module) else loss
        with record():
            if isinstance(given, dict):
                return judge(copied(**given), target)
            return judge(copied(*given) if isinstance(given, tuple) else copied(given), target)

    return _choose(model, step, tuple(extensions), budget, where, gradients, freed, accumulated)


def bites_over_data(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    extensions: Sequence[Extension],
    memory: int | str | None,
    device: torch.device | str,
) -> Bites:
    """The bites of one batch of many, whose results are merged into those of the batches before."""
    budget = budget_of(memory)
    if budget is None:
        keep_freed_pages()
        return default_bites(torch.device(device))
    there = _gradients_are_there(model.parameters())
    one = plan(model, loss, batch, extensions, None, device, gradients=False, accumulated=there)
    if one.peak + one.results <= budget:
        return one.bites
    left = max(1, budget - one.results)
    return plan(model, loss, batch, extensions, left, device, gradients=False, accumulated=there).bites


def plan_again(graph: Graph, extensions: Sequence[Extension], budget: int | None) -> Plan:
    """The plan of a pass whose forward part has been run: the model is run once more, without data.

    Raises:
        BadInput: If the pass is not one call of one model followed by one loss, or nothing fits.
    """
    calls = [forward for forward in graph.forwards if forward.has_parameters]
    model = calls[0].module() if len(calls) == 1 else None
    alone = len(graph.losses) == len(graph.roots) == 1
    if model is None or len(calls[0].arguments) != 1 or not alone:
        raise BadInput(
            "backpack(memory=...) was entered.",
            f"a backward pass through {len(calls)} calls of models and {len(graph.losses)} recorded losses",
            "a budget alone suffices for one call of one model followed by one loss",
            "make a plan of the step, packprop.plan(...), and give that as memory",
        )
    args, kwargs = calls[0].arguments[0]
    call = graph.losses[0].call
    rest = map_tensors(Spec.of, (call.args, call.kwargs))

    ends = {edge.node for edge, forward, _ in graph.outputs if forward.has_parameters}
    inside = graph.roots[0].grad_fn in ends

    def step(copied: nn.Module, fake: Callable[[Any], Any]) -> Tensor:
        given, named = fake(args), fake(kwargs)
        others = fake(rest[0][1:])
        options = fake({name: value for name, value in rest[1].items() if name != "input"})
        with record():
            outputs = list(tensors_in(copied(*given, **named)))
            if inside:  # the model returns its loss
                return next(t for t in outputs if t.shape == graph.roots[0].shape and t.requires_grad)
            output = next(t for t in outputs if t.numel() == call.shape.numel()).reshape(call.shape)
            if rest[0]:
                value = call.function(output, *others, **options)
            else:
                value = call.function(**options, input=output)
        total: Tensor = value.sum()
        return total

    between = 0 if inside else _between(call.edge.node, ends) * call.input.numel() * call.input.element_size()
    left = None if budget is None else max(1, budget - between)
    there = _gradients_are_there(graph.leaves())
    where = graph.leaves()[0].device
    chosen = _choose(model, step, tuple(extensions), left, where, True, accumulated=there)
    if not between:
        return chosen
    parts = {**chosen.parts, "between model and loss": between}
    return replace(chosen, peak=chosen.peak + between, memory=budget, parts=parts)


def _between(start: Node, ends: set[Node]) -> int:
    """Tensors like the loss's input that may be made between the model's output and there, and back."""
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if node not in ends and node not in seen:
            seen.add(node)
            stack += [upstream for upstream, _ in node.next_functions if upstream is not None]
    return 2 * len(seen)


def bites_again(graph: Graph, extensions: Sequence[Extension], budget: int) -> Bites:
    """The bites of ``plan_again``, found once for passes of equal structure and shapes."""
    kept = _CHOSEN.setdefault(graph.modules[0], {})
    asked = tuple((type(extension), _options(extension)) for extension in extensions)
    by_name = tuple(map(forced, CHOICES))
    key = (graph.signature, _leaves(graph), asked, budget, by_name, _gradients_are_there(graph.leaves()))
    if key not in kept:
        kept[key] = plan_again(graph, extensions, budget).bites
    return kept[key]


_CHOSEN: weakref.WeakKeyDictionary[nn.Module, dict[Any, Bites]] = weakref.WeakKeyDictionary()


def budget_of(memory: int | str | None) -> int | None:
    """Bytes of a budget.

    Raises:
        BadInput: If it is no positive number of bytes.
    """
    if memory is None:
        return None
    budget = byte_count(memory) if isinstance(memory, (int, str)) else None
    if not budget:
        raise BadInput(
            "A budget of memory was given.",
            f"memory={memory!r}",
            "it is no positive number of bytes",
            "give a number, a text such as '600MiB' or '2GiB', or a Plan",
        )
    return budget


Step = Callable[[nn.Module, Callable[[Any], Any]], Tensor]
"""From a model and what makes tensors without data to the loss."""


def _choose(
    model: nn.Module,
    step: Step,
    extensions: tuple[Extension, ...],
    budget: int | None,
    device: torch.device,
    gradients: bool,
    freed: bool = False,
    accumulated: bool = False,
) -> Plan:
    """The first of the choices that fits, and of each kind of bite as much as still fits.

    The choices make everything smaller where one thing may be what sets the peak: columns that take no memory
    need not be swept one by one because of a large layer, nor small layers take another algorithm with it.

    Raises:
        BadInput: If none does.
    """

    @functools.cache
    def tried(bites: Bites) -> Plan:
        return _DryRun(model, extensions, device, bites, freed, accumulated).plan(step, budget, gradients)

    def first(candidates: Sequence[Bites]) -> Bites:
        """The first that fits; the peak falls along them, and that of the last does."""
        assert budget is not None
        low, high = -1, len(candidates) - 1
        middle = 0  # mostly it is this one
        while high - low > 1:
            if tried(candidates[middle]).peak <= budget:
                high = middle
            else:
                low = middle
            middle = (low + high) // 2
        return candidates[high]

    bites = choices(device, freed)
    if budget is None or tried(bites[0]).peak <= budget:
        return tried(bites[0])
    if tried(bites[-1]).peak > budget:
        raise _impossible(tried(bites[-1]), budget)
    best = first(bites)
    for name in ("signals", "held", "scratch"):  # what is dearest to go without comes first
        best = first(looser(best, bites[0], name))
    return tried(best)


INSTEAD = {
    "BatchGrad": "BatchL2Grad or SumGradSquared",
    "BatchDotGrad": "BatchL2Grad",
    "BatchJacobian": "BatchJacobian(outputs=...) for some outputs",
    "SqrtGGNExact": "SqrtGGNMC",
    "SqrtGGNMC": "DiagGGNMC",
    "DiagGGNExact": "DiagGGNMC",
    "BatchDiagGGNExact": "DiagGGNExact",
    "BatchDiagGGNMC": "DiagGGNMC",
    "DiagHessian": "DiagHessianMC",
    "BatchDiagHessian": "DiagHessian",
    "EKFAC": "KFAC",
    "KFAC": "DiagGGNMC",
    "KFLR": "DiagGGNExact",
    "KFRA": "DiagGGNMC",
    "HBP": "DiagGGNMC",
}
"""What takes less."""


def _impossible(floor: Plan, budget: int) -> BudgetTooSmall:
    largest = ", ".join(f"{kind} {byte_text(size)}" for kind, size in list(floor.parts.items())[:3])
    fixed = sum(floor.parts.get(kind, 0) for kind in ("parameters", "buffers", "gradients"))
    fitting = int((budget - fixed) / (floor.peak - fixed) * floor.samples) if floor.peak > fixed else 0
    advice = []
    if 0 < fitting < floor.samples:
        advice.append(f"a batch of {fitting} samples instead of {floor.samples}")
    if any(name.startswith(("Batch", "Sqrt")) for name in floor.extensions):
        advice.append("an extension hook that reduces and deletes each parameter's value")
    advice += [f"{INSTEAD[name]} in place of {name}" for name in floor.extensions if name in INSTEAD]
    advice.append("requires_grad=False on parameters that do not matter, or checkpointing")
    error = BudgetTooSmall(
        "A budget of memory was given.",
        f"memory={byte_text(budget)} on {floor.device}",
        f"with the smallest bites the step still takes {byte_text(floor.peak)}: {largest}",
        "; or ".join(advice),
    )
    error.floor = floor.peak
    return error


class _Peak(NamedTuple):
    """The most bytes that were alive at once in a part of a step, and what they were made of."""

    size: int
    parts: dict[str, int]
    items: list[tuple[str, int]]

    def beside(self, kind: str, size: int) -> _Peak:
        """The same with something else that is there all the time."""
        parts = {**self.parts, kind: self.parts.get(kind, 0) + size}
        items = sorted([*self.items, (f"{kind}: of the step before", size)], key=lambda item: -item[1])
        return _Peak(self.size + size, parts, items[:LARGEST])


class _DryRun:
    """One step without data: see NOTE [Dry runs]."""

    def __init__(
        self,
        model: nn.Module,
        extensions: tuple[Extension, ...],
        device: torch.device,
        bites: Bites,
        freed: bool,
        accumulated: bool,
    ) -> None:
        self._model, self._extensions, self._device, self._bites = model, extensions, device, bites
        self._freed, self._accumulated = freed, accumulated
        # autograd cannot even name a device that is not there: kernels are those of the CPU then
        there = device.type not in ("cpu", "meta") and torch.get_device_module(device).is_available()
        self._place = device if there else torch.device("cpu")
        with pretending(device.type):
            self._counted = LiveBytes(CUDA_BLOCK if device.type == "cuda" else 1, self._look)
        self._batch: list[Any] = []
        self._lines: dict[str, Line] = {}
        self._parts: dict[str, int] = {}
        self._items: list[tuple[str, int]] = []
        self._before: list[_Peak] = []
        self._waiting: list[tuple[nn.Module, set[int]]] | None = None
        self._attached: set[int] = set()
        self._results = 0
        self._observation: Observation | None = None
        self._copied = model

    def plan(self, step: Step, budget: int | None, gradients: bool) -> Plan:
        """Run it."""
        with ExitStack() as stack:
            stack.enter_context(pretending(self._device.type))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            self._copied = _copied(self._model, lambda value: _made(value, self._place))
            same_verdicts(self._copied, self._model)
            stack.enter_context(self._counted)
            stack.enter_context(torch.enable_grad())
            self._counted.own(self._copied.parameters(), "parameters")
            self._counted.own(self._copied.buffers(), "buffers")
            if self._accumulated:
                for parameter in self._copied.parameters():
                    parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            self._counted.phase = "activations"
            value = self._forward(step)
            self._warn_of_unknown()
            forward = self._part()
            self._counted.phase = "temporary"
            graph = walk([value], [None], None)
            check_graph(graph)
            found = self._part()
            self._observation = Observation(
                graph,
                self._extensions,
                False,
                lambda leaf, results: self._attach(graph, leaf, results),
                self._bites,
                lambda leaf, uses, structure, samples: self._note(graph, leaf, uses, structure, samples),
                self._begin,
            )

            def backward(leaves: Sequence[Tensor] | None) -> None:
                torch.autograd.backward([value], inputs=leaves)

            self._observation.run(backward if gradients else None)
            rest = self._part()
            shapes, leaves = _shapes(graph), _leaves(graph)
        peaks = [forward, found, *self._before, rest]
        if gradients and not self._freed:
            left = sum(self._counted.sizes.get(key, 0) for key in self._attached)
            later = [forward, *self._before]
            if any(each.reordered for each in graph.forwards):  # then samples are found anew in each step
                later.append(found)
            peaks += [part.beside("results", left) for part in later]
        peak = max(peaks, key=lambda part: part.size)
        order = [name for name, _ in self._copied.named_parameters() if name in self._lines]
        return Plan(
            peak.size,
            budget,
            self._device.type,
            self._bites,
            tuple(self._lines[name] for name in dict.fromkeys([*order, *self._lines])),
            dict(sorted(peak.parts.items(), key=lambda part: -part[1])),
            tuple(peak.items),
            graph.samples,
            self._results,
            tuple(extension.name for extension in self._extensions),
            self._freed,
            self._accumulated,
            shapes,
            leaves,
            tuple(map(_options, self._extensions)),
        )

    def _forward(self, step: Step) -> Tensor:
        def noted(value: Any) -> Any:
            made = _made(value, self._place)
            self._counted.own(tensors_in(made), "batch")
            self._batch.append(made)  # it is the user's: there all the time, whether or not autograd keeps it
            return made

        try:
            return step(self._copied, noted)
        except PackpropError:
            raise
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), "")
            raise PackpropError(
                ASKED,
                f"the forward pass of {type(self._model).__name__}, or its loss",
                f"it cannot be run without data: {type(error).__name__}: {said}",
                "plan a part of it that does not decide on data, or leave the budget out",
            ) from error

    def _warn_of_unknown(self) -> None:
        """Say where PyTorch does not know the size of what is kept: the LSTMs of oneDNN, without data."""
        if self._device.type == "cpu" and any(
            detail.startswith("mkldnn_rnn_layer ") for _, detail in self._counted.labels.values()
        ):
            warnings.warn(
                "An LSTM keeps a workspace for its backward pass whose size is not known without data: "
                "the peak will be higher than planned, mostly by some 16 times its outputs. Leave that "
                "much, or plan and run without it: with torch.backends.mkldnn.flags(enabled=False).",
                PackpropWarning,
                stacklevel=2,
            )

    def _part(self) -> _Peak:
        """The end of a part of the step, and the beginning of the next."""
        peak = _Peak(self._counted.peak, self._parts, self._items)
        self._counted.restart()
        return peak

    def _begin(self) -> dict[tuple[Extension, int], Tensor]:
        """Here results of the step before are taken off."""
        self._before.append(self._part())
        return {}

    def _look(self) -> None:
        """At a new peak: what is alive, and what of it is largest."""
        kinds = {key: label for key, (label, _) in self._counted.labels.items()}
        kinds |= dict.fromkeys(self._attached & kinds.keys(), "results")
        if self._observation is not None:
            kinds |= dict.fromkeys(map(storage_key, self._observation.results.tensors()), "results")
        gradients = [p.grad for p in self._copied.parameters() if p.grad is not None]
        kinds |= dict.fromkeys(map(storage_key, gradients), "gradients")
        sizes = self._counted.sizes
        self._parts = {}
        for key, size in sizes.items():
            self._parts[kinds[key]] = self._parts.get(kinds[key], 0) + size
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:LARGEST]
        self._items = [(f"{kinds[key]}: {self._counted.labels[key][1]}", sizes[key]) for key in largest]

    def _attach(self, graph: Graph, leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        for extension, values in results.items():
            value = map_tensors(lambda t: t.to(leaf.dtype), extension.finish(values, graph.samples))
            self._attached.update(map(storage_key, tensors_in(value)))
            self._results += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
            setattr(leaf, extension.savefield, value)
        if not self._freed:
            return
        if self._waiting is None:
            self._waiting = graph.owners()
        for module, own in self._waiting:  # a hook is called when all of a module is there
            own.discard(id(leaf))
            if not own:
                for parameter in module.parameters(recurse=False):
                    for extension in self._extensions:
                        vars(parameter).pop(extension.savefield, None)

    def _note(
        self,
        graph: Graph,
        leaf: Tensor,
        uses: Sequence[Found],
        structure: Quadratic,
        samples: int,
    ) -> None:
        name = graph.name(leaf)
        formed = _formed(structure)
        known, size = self._lines.get(name), leaf.numel() * leaf.element_size()
        if known is None or samples < known.samples or formed:
            self._lines[name] = Line(
                name,
                " + ".join(found.use.name for found in uses),
                type(structure).__name__,
                _algorithm(structure),
                min(samples, graph.samples),
                graph.samples,
                size if _in_turn(structure) else size * min(samples, graph.samples),
            )


def _formed(structure: Quadratic) -> bool:
    """Whether gradients of single samples were formed, of a bite or one after the other."""
    return getattr(structure, "formed", True) or _in_turn(structure)


def _in_turn(structure: Quadratic) -> bool:
    """Whether gradients of single samples were there one at a time."""
    return isinstance(structure, Outer) and not structure.formed and "matrices" in vars(structure)


def _algorithm(structure: Quadratic) -> str:
    if not _formed(structure):
        return "signals and inputs alone"
    if _in_turn(structure):
        return "gradients in turn"
    if not isinstance(structure, Outer) or structure.shape[1] == 1:
        return "per-sample gradients"
    return f"gradients by {'groups' if structure.by_groups else 'products'}"


def _shapes(graph: Graph) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((found.use.name, tuple(shape)) for found in graph.found for shape in found.use.shapes)


def _leaves(graph: Graph) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in graph.leaves())


def _options(extension: Extension) -> tuple[tuple[str, str], ...]:
    """What changes what is taken: not a source of draws, and of chosen samples how many there are."""
    return tuple(
        (name, f"of {len(option)}" if name == "subsampling" and option is not None else repr(option))
        for name, option in vars(extension).items()
        if not isinstance(option, torch.Generator)
    )


def _gradients_are_there(leaves: Iterable[Tensor]) -> bool:
    """Whether a pass adds to gradients of an earlier one."""
    return any(leaf.grad is not None for leaf in leaves)


def _copied(model: nn.Module, fake: Callable[[Any], Any]) -> nn.Module:
    """A copy of a module whose tensors have no data."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in tensors_in(list(vars(module).values())):
            made = fake(Spec.of(tensor))
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if parameter else made
    return copy.deepcopy(model, memo)


def _made(value: Any, device: torch.device) -> Any:
    """The same nesting with tensors in place of their descriptions."""
    return map_kind(Spec, lambda spec: spec.make(device), value)
