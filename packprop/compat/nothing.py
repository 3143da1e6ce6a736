"""Values of extensions for no samples: an empty batch, or an empty subset of one.

packprop itself refuses an empty subset. Programs that were written for BackPACK may meet one, as when classes
are looked at one by one and a batch has none of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from packprop.engine.nothing import entries_of_sample, result_of_nothing
from packprop.errors import PackpropError
from packprop.graph.graph import Graph
from packprop.graph.walk import walk
from packprop.types import Extension


def value_of_nothing(extension: Extension, parameter: Tensor, entries: int) -> Any:
    """What an extension says of a parameter where there are no samples.

    Args:
        extension: One that ``knows_nothing`` is true for.
        parameter: Any parameter.
        entries: Of one sample's input of the loss.
    """
    return extension.finish([result_of_nothing(extension, parameter, entries)], 0)


def graph_of_nothing(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Graph | None:
    """What lies between the roots of a pass and the leaves, if its losses were given no samples at all."""
    try:
        graph = walk(roots, gradients, None)
    except PackpropError:  # refused for another reason
        return None
    return graph if graph.losses and all(loss.call.shape[:1] == (0,) for loss in graph.losses) else None


def values_of_nothing(graph: Graph, extensions: Sequence[Extension]) -> list[tuple[Tensor, str, Any]]:
    """The values of extensions for no samples, as triples of leaf, attribute and value."""
    entries = entries_of_sample(graph)
    return [
        (leaf, extension.savefield, value_of_nothing(extension, leaf, entries))
        for extension in extensions
        for leaf in graph.leaves()
    ]
