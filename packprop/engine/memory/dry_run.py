"""Dry runs, which run one step on tensors without data and count the memory that it would take.

# NOTE [Dry runs]
A dry run is the real code, under fake tensors, with a count of the storage that is alive. Model, loss, walk,
sweeps and statistics are those of the real pass, so the count is right. Repeated work (chunks of samples,
chunks of columns) runs three times at most; see also NOTE [Repeated columns]. A dry run assumes that samples
are where they usually are, unless a real pass of the same shapes has found them. It does not see memory inside
a kernel.

A plan holds for a training loop. The first step has to find the samples. Each later step holds the results of
the step before until its first own result. Results that it overwrites in place, as without a budget, stay until
their turn comes (NOTE [Results in place]); the dry run then runs a second step. The peak is the largest of all.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from packprop.engine.algebra.structures import Statistical
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.search import leaves_above
from packprop.engine.graph.walk import walk
from packprop.engine.memory.mesh import Mesh
from packprop.engine.memory.peaks import Peak, PeakRecorder
from packprop.engine.memory.plan import (
    ASKED,
    Line,
    Plan,
    facts_of,
    forms_gradients,
    inputs_of,
    line_of,
)
from packprop.engine.passes.backward_pass import BackwardPass
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.request import Request, settle_loss_inputs
from packprop.engine.passes.saving import grows, set_aside
from packprop.engine.samples.locating import check_graph, copy_sample_locations, is_order_of_data
from packprop.engine.tensors.dry import TensorSpec, dry_run, storage_key
from packprop.engine.tensors.names import named_parameters
from packprop.engine.tensors.nesting import map_instances, map_tensors, tensors_in
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.random import python_random_unchanged
from packprop.engine.tensors.repeated import counting_repeated
from packprop.errors import PackpropError, PackpropWarning
from packprop.types import Extension

Forward = Callable[[nn.Module, Callable[[Any], Any]], Tensor]
"""Computes the loss, given a copy of the model and a function that turns ``TensorSpec`` into tensors.

Shapes that depend on the number of samples also go through the function."""


BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
"""Names of the tables of a module's backward hooks: they run in your own pass alone."""


@dataclass(frozen=True)
class PlannedStep:
    """One step of a training loop, for planning.

    Args:
        model: The model, which is copied without its data.
        forward: Computes the loss from the copy.
        extensions: The extensions of the step.
        device: The device of the step.
        gradients: Says that the step also computes ``.grad``.
        freed: Says that an extension hook removes the values of each parameter as soon as they are saved.
        accumulated: Says that ``.grad`` holds gradients of an earlier pass when the step begins.
        mesh: The mesh that shards the model, if there is one.
        retains_graph: Says that ``backward()`` does not free the graph, as under ``retain_graph=True``.
    """

    model: nn.Module
    forward: Forward
    extensions: tuple[Extension, ...]
    device: torch.device
    gradients: bool
    freed: bool = False
    accumulated: bool = False
    mesh: Mesh | None = None
    retains_graph: bool = False

    def of_fewer(self, samples: int, number: int) -> PlannedStep:
        """Return the step for ``number`` of ``samples`` samples, which lie on the leading axes of its inputs.

        A leading axis may also hold several positions of each sample, as in a loss over all tokens.
        """

        def fewer(shape: torch.Size) -> torch.Size:
            positions, rest = divmod(shape[0], samples) if shape else (0, 0)
            return torch.Size((positions * number, *shape[1:])) if positions and not rest else shape

        def made(value: Any) -> Any:
            if isinstance(value, torch.Size):
                return fewer(value)
            return map_instances(TensorSpec, lambda spec: spec._replace(shape=fewer(spec.shape)), value)

        def forward(model: nn.Module, fake: Callable[[Any], Any]) -> Tensor:
            return self.forward(model, lambda value: fake(made(value)))

        return replace(self, forward=forward)


def copy_without_data(
    model: nn.Module, fake: Callable[[Any], Any], known: Sequence[tuple[nn.Module, nn.Module]] = ()
) -> nn.Module:
    """Return a copy of a module whose tensors have no data, and which has none of your backward hooks.

    ``known`` pairs modules with their copies, which are used in place of new ones.

    Raises:
        PackpropError: If something in the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for original, made in known:
        for each, own in zip(original.modules(), made.modules(), strict=True):
            memo[id(each)] = own
            pairs = zip(tensors_in([*vars(each).values()]), tensors_in([*vars(own).values()]), strict=False)
            memo.update((id(tensor), copied) for tensor, copied in pairs)
    seen, stack = set(memo), [model]
    while stack:  # modules may also stand in lists and mappings, which nn.Module does not look into
        item: Any = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            stack += vars(item).values()
            memo |= {id(vars(item)[name]): OrderedDict() for name in BACKWARD_HOOKS if name in vars(item)}
            for tensor in tensors_in([*vars(item).values()]):
                made = fake(TensorSpec.of(tensor))
                parameter = isinstance(tensor, nn.Parameter)
                memo.setdefault(id(tensor), nn.Parameter(made, tensor.requires_grad) if parameter else made)
        elif isinstance(item, torch.Generator):
            memo[id(item)] = item.clone_state()
        elif isinstance(item, (list, tuple, set)):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PackpropError(
            ASKED,
            f"{type(model).__name__}, which packprop copies without its data",
            f"copy.deepcopy() fails: {error}",
            "keep locks, files and generators outside of the module, or give it a method __deepcopy__; or "
            "leave the budget out",
        ) from error


class DryRun:
    """One run of a step without data: see NOTE [Dry runs].

    Args:
        step: The step to run.
        chunk_sizes: The sizes of its chunks.
    """

    def __init__(self, step: PlannedStep, chunk_sizes: ChunkSizes) -> None:
        self._step, self._chunk_sizes, device = step, chunk_sizes, step.device
        # autograd cannot even name a device that is not there: the kernels are those of the CPU then
        is_there = device.type not in ("cpu", "meta") and torch.get_device_module(device).is_available()
        self._device = device if is_there else torch.device("cpu")
        with dry_run(device.type):
            self._peaks = PeakRecorder(device)
        self._batch: list[Any] = []
        self._lines: dict[str, Line] = {}
        self._before_results: list[Peak] = []
        self._written_over: list[Extension] = []
        self._waiting: list[tuple[nn.Module, set[int]]] | None = None

    def run(self, budget: int | None) -> Plan:
        """Run the step; return a plan of its memory, which also names the budget."""
        step, peaks = self._step, self._peaks
        with ExitStack() as stack:
            stack.enter_context(python_random_unchanged())
            stack.enter_context(dry_run(step.device.type, peaks.live.of_batch))
            peaks.live.repeated = stack.enter_context(counting_repeated())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            model = copy_without_data(step.model, self._make_tensors)
            copy_sample_locations(model, step.model)
            stack.enter_context(peaks.live)
            stack.enter_context(torch.enable_grad())
            peaks.own_model(model, step.mesh)
            if step.accumulated:
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            parts, forward, graph = self._run_step(model)
            kept, results = peaks.saved_alive(), peaks.saved_bytes
            samples = graph.samples
            facts = tuple(value for _, value in facts_of(graph, step.extensions, step.device.type))
            inputs = inputs_of(graph)
            if step.gradients and not step.freed:
                again = [forward, *self._before_results]
                if is_order_of_data(graph):  # then each step locates the samples anew
                    again.append(parts[1])
                parts += [part.beside("results", kept) for part in again]
            del graph
            self._written_over = [each for each in step.extensions if grows(each)]
            in_place = budget is None and step.device.type == "cpu" and step.gradients and not step.freed
            if self._written_over and in_place:
                if not step.accumulated:
                    model.zero_grad()
                parts += self._run_step(model)[0]
        peak = max(parts, key=lambda part: part.size)
        order = [name for name, _ in named_parameters(model) if name in self._lines]
        return Plan(
            peak.size,
            budget,
            step.device.type,
            self._chunk_sizes,
            tuple(self._lines[name] for name in dict.fromkeys([*order, *self._lines])),
            dict(sorted(peak.parts.items(), key=lambda part: -part[1])),
            tuple(peak.items),
            samples,
            results,
            tuple(extension.name for extension in step.extensions),
            step.freed,
            step.accumulated,
            facts,
            step.mesh,
            inputs,
        )

    def _run_step(self, model: nn.Module) -> tuple[list[Peak], Peak, Graph]:
        """Run the step once; return the peaks of its parts, that of the forward pass, and the freed graph."""
        step, peaks = self._step, self._peaks
        self._batch.clear()
        self._before_results.clear()
        peaks.live.phase = "activations"
        loss = self._forward(model)
        self._warn_of_unknown()
        forward = peaks.end_part()
        peaks.live.phase = "temporary"
        graph = walk([loss], [None], None)
        settle_loss_inputs(graph, step.extensions)
        check_graph(graph, not all(extension.of_batch for extension in step.extensions))
        graph.kept = step.retains_graph or any(each.keeps_graph for each in step.extensions)
        locating = peaks.end_part()
        # a loss that is no module may read tensors of the user's, which are no copies
        own = [leaf for leaf in leaves_above([loss.grad_fn]) if not isinstance(leaf, FakeTensor)]
        with set_aside(step.extensions, own):
            self._backward(graph, loss)
        return [forward, locating, *self._before_results, peaks.end_part()], forward, graph

    def _make_tensors(self, value: Any) -> Any:
        """Return the same nesting with tensors in place of their descriptions."""
        return map_instances(TensorSpec, lambda spec: spec.make(self._device), value)

    def _forward(self, model: nn.Module) -> Tensor:
        def noted(value: Any) -> Any:
            made = self._make_tensors(value)
            tensors = [*tensors_in(made)]
            self._peaks.live.own(tensors, "batch")
            self._peaks.live.of_batch.update(map(storage_key, tensors))
            self._batch.append(made)  # the user holds it all the time, even if autograd does not keep it
            return made

        try:
            return self._step.forward(model, noted)
        except PackpropError:
            raise
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), "")
            raise PackpropError(
                ASKED,
                f"the forward pass of {type(self._step.model).__name__}, or its loss",
                f"it cannot be run without data: {type(error).__name__}: {said}",
                "plan a part of it that does not depend on values of data, take off forward hooks that read "
                "them, or leave the budget out",
            ) from error

    def _warn_of_unknown(self) -> None:
        """Warn of oneDNN's LSTMs: without data, PyTorch does not know how much memory they keep."""
        if self._step.device.type == "cpu" and any(
            detail.startswith("mkldnn_rnn_layer ") for _, detail in self._peaks.live.labels.values()
        ):
            warnings.warn(
                "An LSTM keeps a workspace for its backward pass whose size is not known without data: "
                "the peak will be higher than planned, mostly by about 16 times its outputs. Leave that much "
                "memory, or plan and run without a workspace: with torch.backends.mkldnn.flags(enabled=False).",
                PackpropWarning,
                stacklevel=2,
            )

    def _backward(self, graph: Graph, loss: Tensor) -> None:
        backward_pass = BackwardPass(
            Request(graph, self._step.extensions, self._chunk_sizes),
            lambda leaf, results: self._save(graph, leaf, results),
            lambda leaf, uses, structure, samples: self._note_line(graph, leaf, uses, structure, samples),
            lambda: self._begin(graph),
        )
        self._peaks.partial_results = backward_pass.results.tensors

        def backward(leaves: Sequence[Tensor] | None) -> None:
            torch.autograd.backward([loss], retain_graph=graph.kept, inputs=leaves)

        try:
            backward_pass.run(backward if self._step.gradients else None)
        finally:  # the pass refers to this run: a circle would keep alive what the step's function refers to
            self._peaks.partial_results = tuple

    def _begin(self, graph: Graph) -> dict[tuple[Extension, int], Tensor]:
        """End the part before the first result, and remove the results of the previous step.

        Return those that this step overwrites, each in its turn; see NOTE [Results in place].
        """
        self._before_results.append(self._peaks.end_part())
        spare: dict[tuple[Extension, int], Tensor] = {}
        for extension, leaf in itertools.product(self._step.extensions, graph.leaves()):
            old = vars(leaf).pop(extension.savefield, None)
            if extension in self._written_over and isinstance(old, Tensor):
                spare[extension, id(leaf)] = old
        return spare

    def _save(self, graph: Graph, leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        """Save the results of a leaf as the real pass does, and delete them where a hook will."""
        for extension, values in results.items():
            dtype = extension.dtype_of(leaf.dtype)
            if not self._step.gradients:  # a batch of a data set: merged results are rounded at the end
                dtype = accumulation_dtype(leaf.dtype)
            value = map_tensors(methodcaller("to", dtype), extension.finish(values, graph.samples))
            value = map_tensors(Tensor.contiguous, value)
            if value is not None:
                self._peaks.own_result(value)
                setattr(leaf, extension.savefield, value)
        if not self._step.freed:
            return
        if self._waiting is None:
            self._waiting = graph.owners()
        for module, unfinished in self._waiting:  # packprop calls a hook when a module has all its values
            unfinished.discard(id(leaf))
            if not unfinished:
                for parameter in module.parameters(recurse=False):
                    for extension in self._step.extensions:
                        vars(parameter).pop(extension.savefield, None)

    def _note_line(
        self, graph: Graph, leaf: Tensor, uses: Sequence[ReachedUse], structure: Statistical, samples: int
    ) -> None:
        """Keep one line for each leaf: of its smallest chunk, or the last in which gradients are formed."""
        name = graph.name(leaf)
        known = self._lines.get(name)
        if known is None or samples < known.samples or forms_gradients(structure):
            self._lines[name] = line_of(graph, leaf, uses, structure, samples)
