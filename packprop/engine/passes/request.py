"""The request of one backward pass, as tasks by seed, and the checks before any work begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from packprop.engine.algebra.factors import is_for_real_numbers
from packprop.engine.algebra.monoid import SUM
from packprop.engine.algebra.statistics import summed_grad, total_grad
from packprop.engine.curvature.columns import Columns
from packprop.engine.graph.completeness import require_loss_inputs
from packprop.engine.graph.graph import Graph
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.clipping import Clip
from packprop.engine.passes.probes import Groups, OfGroup
from packprop.engine.samples.locating import require_terms
from packprop.errors import BadInput, PackpropError
from packprop.types import GRADIENT, INPUTS, Extension, Row, Seed

Chosen = tuple[int, ...] | None
"""Indices of the samples that a task takes; ``None`` for all samples."""


@dataclass(frozen=True, eq=False)
class Request:
    """The request of one backward pass.

    Args:
        graph: The graph of the pass, with its samples located.
        extensions: The quantities to compute.
        chunk_sizes: Limits on the work that the pass takes at once.
        create_graph: Whether results are differentiable.
        drawn: Columns that were drawn for this pass already, by seed; the pass takes them instead of drawing.
        draws: Sampled seeds that are drawn before any other, in this order, even if no extension needs them.
        known: Returns, for a leaf and an extension, the results of the rows before the last one, if earlier
            passes over all samples have computed them. Such an extension consists of its last row. See
            NOTE [Second reading] (``applications/dataset/parts.py``).
        groups: Training rows and probes, if there are probes; see NOTE [Probe rows].
        clip: The bounds on gradients of samples, if they are clipped; see NOTE [Clipping].
        is_whole: Whether an earlier pass took every statistic of all samples at once, at a single use. This
            pass then does the same, and computes no chunk sizes.
    """

    graph: Graph
    extensions: Sequence[Extension]
    chunk_sizes: ChunkSizes
    create_graph: bool = False
    drawn: dict[Seed, list[Columns]] = field(default_factory=dict)
    draws: Sequence[Seed] = ()
    known: Callable[[Tensor, Extension], list[Any]] | None = None
    groups: Groups | None = None
    clip: Clip | None = None
    is_whole: bool = False

    @functools.cached_property
    def summed(self) -> Task:
        """The task that sums a leaf's gradient in place of autograd, over all samples or training rows."""
        if self.groups is None:
            return task_of(SUMMED)
        return task_of(TOTAL, self.groups, self.groups.of_training)


@dataclass(frozen=True)
class Task:
    """One row of one extension."""

    extension: Extension
    index: int
    row: Row

    @property
    def shows_cotangents(self) -> bool:
        """Tell whether NaN in any cotangent shows in the result, and packprop checks the result."""
        return (self.row.sums or self.row.condenses) and self.extension.subsampling is None


class _SummedGradient(Extension):
    """The gradient itself, summed from per-sample gradients."""

    rows = (Row(GRADIENT, summed_grad),)


class _TotalGradient(Extension):
    """The gradient itself, computed in one product."""

    savefield = "total_grad"
    rows = (Row(GRADIENT, total_grad),)


SUMMED, TOTAL = _SummedGradient(), _TotalGradient()


def task_of(extension: Extension, groups: Groups | None = None, factor: Tensor | float = 1.0) -> Task:
    """Return the task of an extension with one row; with probes, for training rows alone and times a factor."""
    if groups is not None:
        extension = OfGroup(extension, groups.training, factor)
    return Task(extension, 0, extension.rows[0])


def tasks_by_seed(extensions: Sequence[Extension]) -> dict[Seed, list[Task]]:
    """Group the rows of all extensions by their seed."""
    tasks: dict[Seed, list[Task]] = {}
    for extension in extensions:
        for index, row in enumerate(extension.rows):
            tasks.setdefault(row.seed, []).append(Task(extension, index, row))
    return tasks


def settle_loss_inputs(graph: Graph, extensions: Sequence[Extension], kept: bool = False) -> None:
    """Free the inputs of the losses, unless an extension needs more than gradients and inputs of uses.

    ``kept``: whether a later pass may need them.

    Raises:
        FreedGraph: If an extension needs them, and an earlier pass has freed them.
    """
    settle_for_seeds(graph, [row.seed for extension in extensions for row in extension.rows], kept)


def settle_for_seeds(graph: Graph, seeds: Iterable[Seed], kept: bool = False) -> None:
    """Do the work of ``settle_loss_inputs``, for extensions whose rows have these seeds."""
    if any(seed not in (GRADIENT, INPUTS) for seed in seeds):
        require_loss_inputs(graph)
    elif not kept:
        graph.drop_loss_inputs()


def by_subsampling(tasks: Sequence[Task]) -> dict[Chosen, list[Task]]:
    """Group tasks by the samples that they choose."""
    groups: dict[Chosen, list[Task]] = {}
    for task in tasks:
        chosen = task.extension.subsampling
        groups.setdefault(None if chosen is None else tuple(chosen), []).append(task)
    return groups


def require_possible(request: Request, seeds: Iterable[Seed]) -> None:
    """Raise if the request cannot be computed for this graph.

    Raises:
        BadInput: For a sample that is not in the batch, or a row of a second pass that does not fit.
        PackpropError: For a loss that mixes samples; for products of gradients of a complex parameter.
    """
    require_indices(request.extensions, request.graph.samples)
    _require_second_passes(request.extensions)
    _require_real_numbers(request)
    seeds = list(seeds)
    of_samples = any(seed.kind in ("gradient", "ggn", "empirical") for seed in seeds)
    if of_samples or request.groups or request.clip or _asks_hessians_of_samples(request):
        require_terms(request.graph)


def _asks_hessians_of_samples(request: Request) -> bool:
    """Tell whether an extension needs Hessians of single samples; that of the whole loss needs no terms."""
    return any(
        row.seed.kind == "hessian" and (row.over_n is not SUM or extension.subsampling is not None)
        for extension in request.extensions
        for row in extension.rows
    )


def require_indices(extensions: Sequence[Extension], samples: int) -> None:
    """Raise if an index is that of a sample outside the batch.

    Raises:
        BadInput: With the first such index.
    """
    for extension in extensions:
        for index in extension.subsampling or ():
            if not -samples <= index < samples:
                raise BadInput(
                    f"{extension.name}(subsampling={list(extension.subsampling or ())}) was asked for.",
                    f"index {index}",
                    f"the batch has {samples} samples",
                    f"give indices from 0 to {samples - 1}"
                    if samples
                    else "leave subsampling out of this pass",
                )


def _require_real_numbers(request: Request) -> None:
    """Raise for squares, products and factors of gradients of a complex parameter."""
    parameter = next((leaf for leaf in request.graph.leaves() if leaf.is_complex()), None)
    if parameter is None:
        return
    for extension in request.extensions:
        rows = [
            row for row in extension.rows if row.seed.kind == "hessian_mc" or is_for_real_numbers(row.statistic)
        ]
        if rows:
            raise PackpropError(
                f"{extension.name}() was asked for.",
                f"parameter {request.graph.name(parameter)!r}, of {parameter.dtype}",
                "squares and products of gradients are defined for real parameters: an entry of a complex one "
                "stands for two real entries",
                "make it real, as w = nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(w) in "
                "the forward pass; BatchGrad takes complex parameters as they are",
            )


def _require_second_passes(extensions: Sequence[Extension]) -> None:
    for extension in extensions:
        for index, row in enumerate(extension.rows):
            if row.after is None:
                continue
            before, swept = extension.rows[:index], ("gradient", "ggn", "empirical", "jacobian")
            fits = row.seed.kind in swept and all(_share_columns(each.seed, row.seed) for each in before)
            if not fits or index != len(extension.rows) - 1:
                raise BadInput(
                    f"{extension.name}() was asked for.",
                    f"row {index}, which comes after others",
                    "a second pass goes over the columns of the first pass",
                    "make it the last row, with a seed that is swept, after rows of that seed or of inputs",
                )


def _share_columns(first: Seed, second: Seed) -> bool:
    """Tell whether a second pass may follow a first one: over equal columns, or fresh draws of equal kind."""
    if second.fresh:
        first = replace(first, mc_samples=second.mc_samples, fresh=True)
    return first.kind == INPUTS.kind or first == second
