"""Values of extensions for no samples: an empty batch, or an empty subset of one.

packprop itself refuses both. Programs that were written for BackPACK may meet them, as when classes are looked
at one by one and a batch has none of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.structures import Dense
from packprop.errors import PackpropError
from packprop.extensions import GGNMP, HMP, PCHMP
from packprop.graph.graph import Graph
from packprop.graph.walk import walk
from packprop.types import Extension


def knows_nothing(extension: Extension) -> bool:
    """Whether an extension has a value where there are no samples."""
    if isinstance(extension, (GGNMP, HMP, PCHMP)):
        return True
    seeds = [row.seed for row in extension.rows]
    return len(seeds) == 1 and seeds[0].kind in ("gradient", "ggn", "hessian") and not seeds[0].by_token


def value_of_nothing(extension: Extension, parameter: Tensor, entries: int) -> Any:
    """What an extension says of a parameter where there are no samples.

    Args:
        extension: One that ``knows_nothing`` is true for.
        parameter: Any parameter.
        entries: Of one sample's input of the loss.
    """
    if isinstance(extension, (GGNMP, HMP, PCHMP)):
        return torch.zeros_like
    (row,) = extension.rows
    exact = entries if row.seed.kind == "ggn" else 1
    columns = exact if row.seed.mc_samples is None else row.seed.mc_samples
    dtype = extension.dtype_of(parameter.dtype)
    gradients = torch.zeros(columns, 0, *parameter.shape, dtype=dtype, device=parameter.device)
    return extension.finish([row.statistic(Dense(gradients))], 0)


def graph_of_nothing(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Graph | None:
    """What lies between the roots of a pass and the leaves, if its losses were given no samples at all."""
    try:
        graph = walk(roots, gradients, None)
    except PackpropError:  # refused for another reason
        return None
    return graph if graph.losses and all(loss.call.shape[:1] == (0,) for loss in graph.losses) else None


def values_of_nothing(graph: Graph, extensions: Sequence[Extension]) -> list[tuple[Tensor, str, Any]]:
    """The values of extensions for no samples, as triples of leaf, attribute and value."""
    entries = sum(loss.call.shape[1:].numel() for loss in graph.losses)
    return [
        (leaf, extension.savefield, value_of_nothing(extension, leaf, entries))
        for extension in extensions
        for leaf in graph.leaves()
    ]
