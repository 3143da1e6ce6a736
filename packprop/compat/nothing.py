"""Values of extensions for an empty subset of the samples.

packprop itself refuses an empty subset. Programs for BackPACK may give one, for example if they go through
classes one by one and a batch has no sample of a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.graph import Graph
from packprop.engine.passes import results_of_nothing
from packprop.types import Extension


def values_of_nothing(graph: Graph, extensions: Sequence[Extension]) -> list[tuple[Tensor, str, Any]]:
    """Return the values of extensions for no samples, as triples of leaf, attribute and value."""
    with torch.no_grad():
        return [
            (leaf, extension.savefield, extension.finish(results_of_nothing(extension, leaf, graph), 0))
            for extension in extensions
            for leaf in graph.leaves()
        ]
