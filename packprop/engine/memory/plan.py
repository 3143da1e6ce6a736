"""Plans of the memory of a step, as values that print."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packprop.engine.algebra.choices import CHOICES, forced_algorithm
from packprop.engine.algebra.structures import Outer, Statistical
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.memory.bytes import byte_text
from packprop.engine.memory.mesh import Mesh
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.tensors.dry import TensorSpec
from packprop.engine.tensors.nesting import map_instances
from packprop.engine.tensors.plain_text import import_rich, plain_text
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.errors import BadInput, PackpropWarning
from packprop.types import Extension

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Line:
    """The work for one parameter.

    Args:
        parameter: Its name.
        use: Functions that it enters.
        structure: The way in which it enters them.
        algorithm: Says whether its per-sample gradients are formed, and how; *in turn*: one at a time.
        samples: Samples in a chunk.
        count: Samples in all.
        bytes: Bytes of the per-sample gradients of a chunk, or of one in turn; 0 if none are formed.
    """

    parameter: str
    use: str
    structure: str
    algorithm: str
    samples: int
    count: int
    bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks of samples."""
        return -(-self.count // self.samples)


def line_of(
    graph: Graph, leaf: Tensor, uses: Sequence[ReachedUse], structure: Statistical, samples: int
) -> Line:
    """Return the line of a leaf with this structure, in chunks of ``samples`` samples."""
    in_chunk, in_turn = min(samples, graph.samples), _formed_in_turn(structure)
    formed = 1 if in_turn else in_chunk if forms_gradients(structure) else 0
    return Line(
        graph.name(leaf),
        " + ".join(use.name for use in uses),
        type(structure).__name__,
        _algorithm(structure),
        in_chunk,
        graph.samples,
        formed * leaf.numel() * accumulation_dtype(leaf.dtype).itemsize,
    )


def forms_gradients(structure: Statistical) -> bool:
    """Tell whether per-sample gradients were formed, for a chunk at once or one after the other."""
    return getattr(structure, "formed", True) or _formed_in_turn(structure)


def _formed_in_turn(structure: Statistical) -> bool:
    """Tell whether per-sample gradients were formed one at a time."""
    return isinstance(structure, Outer) and not structure.formed and "matrices" in vars(structure)


def _algorithm(structure: Statistical) -> str:
    if not forms_gradients(structure):
        return "cotangents and inputs alone"
    if _formed_in_turn(structure):
        return "gradients in turn"
    if not isinstance(structure, Outer) or structure.shape[1] == 1:
        return "per-sample gradients"
    return f"gradients by {'groups' if structure.by_groups else 'products'}"


ASKED = "A plan was asked for."

RESULTS_BEFORE = "results of the batches before"
"""The label of tensors that stay in memory throughout a pass over a batch of a data set."""


class BudgetTooSmall(BadInput):
    """Raised if no choice of chunks fits a budget; ``floor`` is the smallest peak of all, in bytes."""

    floor: int = 0


@dataclass(frozen=True)
class Plan:
    """The memory of a step, and its chunks; prints as two tables.

    Args:
        peak: The most bytes of tensor storage alive at once, in forward and backward pass.
        memory: The budget in bytes; ``None`` if there is none.
        device: The type of device of the plan.
        chunk_sizes: The sizes of the chunks.
        lines: One line for each parameter.
        parts: The bytes of each kind of tensor at the peak, the largest first.
        items: The largest single tensors at the peak: (description, bytes).
        samples: Samples in the batch.
        results: Bytes of all results.
        extensions: Names of the extensions.
        freed: Says that the plan counts on an extension hook that removes values.
        accumulated: Says that it counts gradients of an earlier pass, which are in memory when a step begins.
        facts: The facts that a pass must share with the plan; see ``facts_of``.
        mesh: The mesh that shards the model, if there is one: then the plan is that of one device.
        inputs: The inputs of each extended model that a pass must share with the plan; see ``inputs_of``.
    """

    peak: int
    memory: int | None
    device: str
    chunk_sizes: ChunkSizes
    lines: tuple[Line, ...]
    parts: dict[str, int]
    items: tuple[tuple[str, int], ...]
    samples: int
    results: int
    extensions: tuple[str, ...]
    freed: bool
    accumulated: bool
    facts: tuple[str, ...] = field(repr=False)
    mesh: Mesh | None = None
    inputs: dict[str, str] = field(default_factory=dict, repr=False)

    def beside(self, kind: str, size: int) -> Plan:
        """Return the same plan, plus ``size`` bytes that stay in memory throughout."""
        parts = dict(sorted({**self.parts, kind: size}.items(), key=lambda part: -part[1]))
        return replace(self, peak=self.peak + size, parts=parts) if size else self

    def require_fit(self, graph: Graph, extensions: Sequence[Extension], hooked: bool = False) -> None:
        """Refuse a pass that does not fit the plan; ``hooked`` says that the pass has an extension hook.

        Warn of gradients of an earlier pass that the plan did not count.

        Raises:
            BadInput: With the first difference.
        """
        device = next((leaf.device.type for leaf in graph.leaves()), self.device)
        pairs = zip(facts_of(graph, extensions, device), self.facts, strict=False)
        difference = next(
            (f"{of}{it}; planned was {planned}" for (of, it), planned in pairs if it != planned), None
        )
        for model, given in inputs_of(graph).items():
            if difference is None and given != self.inputs.get(model, given):
                difference = f"inputs of {model}: {given}; planned was {self.inputs[model]}"
        if self.freed and not hooked:
            difference = "no extension hook; planned was one that removes values"
        if difference is not None:
            raise BadInput(
                "A backward pass with a plan was started.",
                difference,
                "the plan was made for another model, batch or device: its peak does not apply here",
                "make a plan for this one, or give the budget itself: backpack(..., memory='600MiB')",
            )

        if not self.accumulated and gradients_are_there(graph.leaves()):
            warnings.warn(
                "Parameters have gradients of an earlier pass; the plan assumes none: the peak may be larger "
                "by their size. Call zero_grad() before the step, or make the plan with accumulated=True.",
                PackpropWarning,
                stacklevel=2,
            )

    def __str__(self) -> str:
        return plain_text(*self._tables(), width=112)

    def _tables(self) -> tuple[Table, Table]:
        """Return the table of parameters, and that of the tensors at the peak."""
        import_rich()
        from rich.table import Table

        titles = "parameter", "use", "structure", "algorithm", "chunks x samples", "their gradients"
        table = Table(*titles, box=None)
        for line in self.lines:
            chunks = f"{line.chunks} x {line.samples}"
            cells = (line.parameter, line.use, line.structure, line.algorithm, chunks, byte_text(line.bytes))
            table.add_row(*cells)
        budget = "no budget" if self.memory is None else f"budget {byte_text(self.memory)}"
        where = self.device if self.mesh is None else f"each of {self.mesh} {self.device} devices"
        peak = Table("", "", title=f"peak {byte_text(self.peak)} on {where}, {budget}", box=None)
        for kind, size in self.parts.items():
            peak.add_row(kind, byte_text(size))
        peak.add_section()
        peak.add_row("largest at the peak", "")
        for name, size in self.items:
            peak.add_row(f"  {name}", byte_text(size))
        return table, peak


def facts_of(graph: Graph, extensions: Sequence[Extension], device: str) -> Iterator[tuple[str, str]]:
    """Yield words and values that a pass must share with its plan; errors name the first that differs."""
    yield "extensions ", ", ".join(extension.name for extension in extensions)
    yield "parameters on ", device
    yield from ((f"algorithms(...) with {kind} ", str(forced_algorithm(kind))) for kind in CHOICES)
    yield "a graph that backward() ", "retains" if graph.kept else "frees"
    yield "uses of parameters: ", str(sum(len(use.shapes) for use in graph.uses))
    for use in graph.uses:
        again = " in a checkpoint" if use.recomputed else ""
        yield from (("", f"{use.name} {[*shape]}{again}") for shape in use.shapes)
    for extension in extensions:
        # attributes of other classes need not be options: they may keep what they have seen
        names: list[str] = [option.name for option in fields(extension)] if is_dataclass(extension) else []
        options = dict(options_of(extension))  # a generator counts as None
        yield from ((f"{extension.name} with {name} ", options.get(name, "None")) for name in names)
    yield "trainable parameters: ", str(len(graph.leaves()))
    for leaf, (shape, dtype) in zip(graph.leaves(), leaf_shapes(graph), strict=True):
        yield f"parameter {graph.name(leaf)!r} ", f"{[*shape]} {dtype}"


def inputs_of(graph: Graph) -> dict[str, str]:
    """Return shapes and precisions of the inputs of each extended model, and autocast, by the model's class."""
    found: dict[str, list[str]] = {}
    for forward in graph.forwards:
        specs: list[TensorSpec] = []
        map_instances(TensorSpec, specs.append, (forward.args, forward.kwargs))
        texts = found.setdefault(type(forward.module()).__name__, [])
        texts += sorted(f"{[*spec.shape]} {spec.dtype}" for spec in specs)
        texts += [f"autocast to {dtype}" for _, dtype, _ in forward.autocast.regions]
    return {model: ", ".join(texts) for model, texts in found.items()}


def leaf_shapes(graph: Graph) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return the shapes and precisions of the parameters."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in graph.leaves())


def options_of(extension: Extension) -> tuple[tuple[str, str], ...]:
    """Return the options that change the memory: no generator, and of ``subsampling`` only the length."""
    return tuple(
        (name, f"of {len(option)}" if name == "subsampling" and option is not None else repr(option))
        for name, option in vars(extension).items()
        if not isinstance(option, torch.Generator)
    )


def gradients_are_there(leaves: Iterable[Tensor]) -> bool:
    """Tell whether a pass adds to gradients of an earlier pass."""
    return any(leaf.grad is not None for leaf in leaves)
