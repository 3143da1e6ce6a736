"""A budget in bytes -> chunks: one step is run on tensors without data, and what it would take is counted.

# NOTE [Dry runs]
A dry run is the real code, under fake tensors, with a count of the storage that is alive: model, loss, walk,
sweeps and statistics are those of the real pass, so that the count is, too. What repeats itself (chunks of
samples, chunks of columns) is run three times at most. Samples are taken to be where they usually are, unless
a real pass of the same shapes has found them. What a kernel allocates inside of itself is not seen.

A plan holds for a training loop: in the first step samples are to be found, in the others the results of the
step before are there until the first of their own are; the peak is the largest of all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from packprop.algebra.structures import Outer, Quadratic
from packprop.engine.backward_pass import BackwardPass
from packprop.engine.chunks import ChunkSizes
from packprop.errors import PackpropError, PackpropWarning
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.samples import check_graph, copy_sample_locations
from packprop.graph.walk import walk
from packprop.memory.live import LiveBytes, storage_key
from packprop.memory.plan import ASKED, Line, Plan, Step, leaf_shapes, options_of, use_shapes
from packprop.tensors.dry import TensorSpec, dry_run
from packprop.tensors.nesting import map_instances, map_tensors, tensors_in
from packprop.types import Extension

LARGEST = 5
"""Tensors that are listed of a peak."""


CUDA_BLOCK = 512
"""Bytes that CUDA's allocator rounds to."""


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


class DryRun:
    """One step without data: see NOTE [Dry runs]."""

    def __init__(
        self,
        model: nn.Module,
        extensions: tuple[Extension, ...],
        device: torch.device,
        chunk_sizes: ChunkSizes,
        freed: bool,
        accumulated: bool,
    ) -> None:
        self._model, self._extensions, self._device, self._chunk_sizes = model, extensions, device, chunk_sizes
        self._freed, self._accumulated = freed, accumulated
        # autograd cannot even name a device that is not there: kernels are those of the CPU then
        there = device.type not in ("cpu", "meta") and torch.get_device_module(device).is_available()
        self._place = device if there else torch.device("cpu")
        with dry_run(device.type):
            self._counted = LiveBytes(CUDA_BLOCK if device.type == "cuda" else 1, self._look)
        self._batch: list[Any] = []
        self._lines: dict[str, Line] = {}
        self._parts: dict[str, int] = {}
        self._items: list[tuple[str, int]] = []
        self._before: list[_Peak] = []
        self._waiting: list[tuple[nn.Module, set[int]]] | None = None
        self._attached: set[int] = set()
        self._results = 0
        self._pass: BackwardPass | None = None
        self._copied = model

    def plan(self, step: Step, budget: int | None, gradients: bool) -> Plan:
        """Run it."""
        with ExitStack() as stack:
            stack.enter_context(dry_run(self._device.type))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            self._copied = copy_without_data(self._model, lambda value: _made(value, self._place))
            copy_sample_locations(self._copied, self._model)
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
            self._pass = BackwardPass(
                graph,
                self._extensions,
                False,
                lambda leaf, results: self._attach(graph, leaf, results),
                self._chunk_sizes,
                lambda leaf, uses, structure, samples: self._note(graph, leaf, uses, structure, samples),
                self._begin,
            )

            def backward(leaves: Sequence[Tensor] | None) -> None:
                torch.autograd.backward([value], inputs=leaves)

            self._pass.run(backward if gradients else None)
            rest = self._part()
            shapes, leaves = use_shapes(graph), leaf_shapes(graph)
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
            self._chunk_sizes,
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
            tuple(map(options_of, self._extensions)),
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
        if self._pass is not None:
            kinds |= dict.fromkeys(map(storage_key, self._pass.results.tensors()), "results")
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
        uses: Sequence[ReachedUse],
        structure: Quadratic,
        samples: int,
    ) -> None:
        name = graph.name(leaf)
        formed = _formed(structure)
        known, size = self._lines.get(name), leaf.numel() * leaf.element_size()
        if known is None or samples < known.samples or formed:
            self._lines[name] = Line(
                name,
                " + ".join(found.recorded.name for found in uses),
                type(structure).__name__,
                _algorithm(structure),
                min(samples, graph.samples),
                graph.samples,
                size if _in_turn(structure) else size * min(samples, graph.samples),
            )


def _formed(structure: Quadratic) -> bool:
    """Whether gradients of single samples were formed, of a chunk or one after the other."""
    return getattr(structure, "formed", True) or _in_turn(structure)


def _in_turn(structure: Quadratic) -> bool:
    """Whether gradients of single samples were there one at a time."""
    return isinstance(structure, Outer) and not structure.formed and "matrices" in vars(structure)


def _algorithm(structure: Quadratic) -> str:
    if not _formed(structure):
        return "cotangents and inputs alone"
    if _in_turn(structure):
        return "gradients in turn"
    if not isinstance(structure, Outer) or structure.shape[1] == 1:
        return "per-sample gradients"
    return f"gradients by {'groups' if structure.by_groups else 'products'}"


def copy_without_data(model: nn.Module, fake: Callable[[Any], Any]) -> nn.Module:
    """A copy of a module whose tensors have no data."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in tensors_in(list(vars(module).values())):
            made = fake(TensorSpec.of(tensor))
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if parameter else made
    return copy.deepcopy(model, memo)


def _made(value: Any, device: torch.device) -> Any:
    """The same nesting with tensors in place of their descriptions."""
    return map_instances(TensorSpec, lambda spec: spec.make(device), value)
