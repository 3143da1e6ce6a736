"""Values for no samples: an empty batch, which Poisson sampling may draw, or an empty subset of a batch.

Values of samples have no rows, ``[0, *p]``. Sums over samples are zero. The variance of no rows is NaN, like
any mean over nothing. Samples without entries, such as sequences of length zero, have rows of zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import SINGLE
from packprop.engine.algebra.structures import ByToken, Dense
from packprop.engine.graph.completeness import require_complete, require_separable
from packprop.engine.graph.graph import Graph
from packprop.engine.passes.clipping import Clipping, clip_factors, settled
from packprop.engine.passes.request import require_indices
from packprop.engine.passes.saving import ResultSaver
from packprop.engine.samples.feeding import model_outputs
from packprop.engine.samples.loss_rows import locate_rows
from packprop.errors import PackpropError
from packprop.types import Extension, Row

OF_SAMPLES = ("gradient", "ggn", "empirical", "hessian", "hessian_mc", "jacobian")
"""Seeds with statistics of per-sample gradients, for which zeros can replace any structure."""


def samples_of_nothing(graph: Graph) -> int | None:
    """Return the number of samples of a pass in which no sample has an entry; ``None`` if a sample has one."""
    shapes = [loss.call.shape for loss in graph.losses] or [shape for _, _, shape in graph.outputs]
    if not shapes or not all(0 in shape for shape in shapes):
        return None
    outputs = model_outputs(graph)
    return locate_rows(graph, outputs)[0] if all(0 in output.shape for output in outputs) else None


def knows_nothing(extension: Extension) -> bool:
    """Tell whether an extension has a value for no samples."""
    return all(
        row.over_n is SINGLE or (row.seed.kind in OF_SAMPLES and (row.sums or not row.seed.by_token))
        for row in extension.rows
    )


class ZeroProduct:
    """A product with a block of zeros, in place of a function that belongs to a graph."""

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return zeros like ``vectors``."""
        return torch.zeros_like(vectors)

    def scaled(self, factor: Tensor | float) -> ZeroProduct:
        """Return the product with a multiple of the block."""
        return self


def results_of_nothing(extension: Extension, leaf: Tensor, graph: Graph, samples: int = 0) -> list[Any]:
    """Return the results of the rows of an extension for a leaf, before ``finish``.

    Args:
        extension: An extension for which ``knows_nothing`` is true.
        leaf: Any leaf of the graph.
        graph: The graph of the pass.
        samples: The number of samples, none of which has an entry.
    """
    zeros = torch.zeros_like(leaf, dtype=extension.dtype_of(leaf.dtype))
    if torch.is_grad_enabled():  # lets a caller differentiate values in the leaf
        zeros = zeros + 0 * leaf
    results: list[Any] = []
    for row in extension.rows:
        if row.over_n is SINGLE:  # products
            results.append(ZeroProduct())
            continue
        columns = _columns(row, graph, samples)
        structure: Any = Dense(zeros.expand(columns, samples, *leaf.shape))
        if row.seed.by_token:
            structure = ByToken(structure, columns, zeros.new_zeros(columns, samples, dtype=torch.bool))
        statistic: Callable[..., Any] = row.statistic
        if row.of_parameter:
            name = graph.distinct_names(extension.name)[id(leaf)]
            statistic = functools.partial(statistic, name=name, shape=leaf.shape)
        if row.after is None:
            results.append(statistic(structure))
        else:
            results = row.after(results)
            results.append(statistic(structure, results))
    return results


def saved_nothing(
    graph: Graph,
    extensions: Sequence[Extension],
    saver: ResultSaver,
    clipping: Clipping | None = None,
    create_graph: bool = False,
    is_plain: bool = True,
) -> bool:
    """Tell whether no sample of the pass has an entry; if so, save the values, and report the norms.

    Args:
        graph: The graph of the pass.
        extensions: The quantities to compute.
        saver: Saves the values.
        clipping: The request for clipped gradients, if there is one.
        create_graph: Whether values are differentiable.
        is_plain: Whether the pass is ``backward()`` without options, and not traced.

    Raises:
        PackpropError: For an extension that has no value in such a pass.
    """
    samples = samples_of_nothing(graph)
    if samples is None:
        return False
    if clipping is not None or not all(extension.of_batch for extension in extensions):
        require_separable(graph)
    require_complete(graph)
    for extension in extensions:
        why = _without_value(extension, graph, samples)
        if why:
            raise PackpropError(
                f"{extension.name}() was asked for.",
                f"the loss's input, of shape {list(model_outputs(graph)[0].shape)}",
                ("its samples have no entries: " if samples else "the batch is empty: ") + why,
                "leave it out of this pass, or skip the pass (`if len(x):`); in packprop.compute, an empty "
                "batch adds nothing to the values of a data set",
            )
    require_indices(extensions, samples)
    clip = None if clipping is None else settled(clipping, graph, is_plain)
    saver.take_off(extensions, reuse=False)
    counts = {each: samples if each.subsampling is None else len(each.subsampling) for each in extensions}
    with torch.set_grad_enabled(create_graph):
        for leaf in reversed(graph.leaves()):
            results = {each: results_of_nothing(each, leaf, graph, counts[each]) for each in extensions}
            saver.save(leaf, results, counts)
    if clip is not None:
        zeros = [group.leaves[0].new_zeros(samples, dtype=torch.float32) for group in clip.groups]
        clip.tell(clip_factors(clip, zeros))
    return True


def _without_value(extension: Extension, graph: Graph, samples: int) -> str:
    """Return the reason why an extension has no value; an empty text if it has one."""
    rows = extension.rows
    if any(row.seed.by_token and not row.sums for row in rows):
        return "packprop cannot tell how many tokens a sample has"
    if not knows_nothing(extension):
        return (
            "this extension takes means over samples, or values that the samples define: it needs at least one"
        )
    if graph.terms and any(row.over_n is SINGLE or _has_penalties(row) for row in rows):
        return "only the penalty would have curvature, and packprop does not compute that without samples"
    known = {shape for _, _, shape in graph.outputs}
    if any(row.over_v.grows and _is_exact(row) for row in rows) and not samples:
        unknown = [output.shape for output in model_outputs(graph) if output.shape not in known]
        if unknown:
            return "packprop cannot tell how many positions, and so columns, a sample has"
    return ""


def _has_penalties(row: Row) -> bool:
    """Tell whether terms that no sample enters are part of a result."""
    return row.seed.kind.startswith("hessian") and row.sums


def _is_exact(row: Row) -> bool:
    """Tell whether there is a column for each entry of a sample in the inputs of the losses."""
    return row.seed.kind == "ggn" and row.seed.mc_samples is None


def _columns(row: Row, graph: Graph, samples: int) -> int:
    """Return the number of seed vectors of a row."""
    if row.seed.kind == "jacobian" and row.seed.entries is not None:
        return len(row.seed.entries)
    if row.seed.kind == "jacobian":
        shapes = [shape for _, forward, shape in graph.outputs if forward.has_parameters]
    elif _is_exact(row):
        shapes = [output.shape for output in model_outputs(graph)]
    else:
        return row.seed.mc_samples or 1
    return sum(_entries(shape, samples) for shape in shapes)


def _entries(shape: torch.Size, samples: int) -> int:
    """Count the entries of one sample in a tensor of this shape, in which all samples or none have entries."""
    if 0 not in shape:
        return shape[1:].numel()
    return 0 if samples else math.prod(extent for extent in shape if extent)
