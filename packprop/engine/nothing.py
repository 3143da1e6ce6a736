"""Values for no samples: an empty batch, as Poisson sampling draws it, or an empty subset of one.

Values of samples have no rows, ``[0, *p]``; sums over samples are zero; the variance of no rows is NaN, as a
mean over nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.monoid import SINGLE
from packprop.algebra.structures import Dense
from packprop.engine.clipping import Clipping, clip_factors, settled
from packprop.engine.saving import Hook, ResultSaver
from packprop.graph.completeness import require_complete, require_separable
from packprop.graph.graph import Graph
from packprop.graph.separation import model_outputs
from packprop.types import Extension


def is_about_nothing(graph: Graph, extensions: Sequence[Extension]) -> bool:
    """Whether no sample is in the batch that a pass is about, and all that is asked for has a value then."""
    shapes = [loss.call.shape for loss in graph.losses] or [shape for _, _, shape in graph.outputs]
    if not shapes or not all(0 in shape for shape in shapes) or not all(map(knows_nothing, extensions)):
        return False
    declared = [
        size[axis] == 0
        for forward in graph.forwards
        for size, axis in zip(forward.sizes, forward.axes, strict=True)
        if axis is not None
    ]
    if declared:
        return all(declared)
    return all(output.samples == 0 for output in model_outputs(graph))


def knows_nothing(extension: Extension) -> bool:
    """Whether an extension has a value where there are no samples."""
    rows = extension.rows
    if len(rows) != 1 or rows[0].of_parameter:
        return False
    seed = rows[0].seed
    return rows[0].over_n is SINGLE or (seed.kind in ("gradient", "ggn", "hessian") and not seed.by_token)


def result_of_nothing(extension: Extension, parameter: Tensor, entries: int) -> Any:
    """The result of the one row of an extension for a parameter, before it is finished.

    Args:
        extension: One that ``knows_nothing`` is true for.
        parameter: Any parameter.
        entries: Of one sample's input of the loss.
    """
    (row,) = extension.rows
    if row.over_n is SINGLE:  # products
        return torch.zeros_like
    exact = entries if row.seed.kind == "ggn" else 1
    columns = exact if row.seed.mc_samples is None else row.seed.mc_samples
    dtype = extension.dtype_of(parameter.dtype)
    return row.statistic(Dense(torch.zeros(columns, 0, *parameter.shape, dtype=dtype, device=parameter.device)))


def entries_of_sample(graph: Graph) -> int:
    """Entries of one sample's input of all losses."""
    return sum(loss.call.shape[1:].numel() for loss in graph.losses)


def save_nothing(
    graph: Graph, extensions: Sequence[Extension], hook: Hook | None, clipping: Clipping | None
) -> None:
    """Save the values of a pass over no samples, and tell the norms of none."""
    require_separable(graph)
    require_complete(graph)
    saver = ResultSaver(graph, hook)  # what is zero has no scale
    saver.take_off(extensions, reuse=False)
    entries = entries_of_sample(graph)
    for leaf in reversed(graph.leaves()):
        saver.save(leaf, {each: [result_of_nothing(each, leaf, entries)] for each in extensions})
    if clipping is not None:
        clip = settled(clipping, graph, True)
        none = [group.leaves[0].new_zeros(0, dtype=torch.float32) for group in clip.groups]
        clip.tell(clip_factors(clip, none))
