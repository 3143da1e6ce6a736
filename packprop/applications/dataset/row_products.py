"""Products with the GGN of a batch by rows of its square root, where that is less work.

# NOTE [Products by rows]
Differentiating twice takes two passes through the batch, there and back, for each vector; PyTorch convolves for
one vector after the other. The GGN of a batch is also ``S^T S``: S has a row for each sample and each column of
the root of its loss's Hessian. One sweep makes the rows of a column, for any number of vectors, and two matrix
products do the rest. This saves time with many vectors, few outputs, and many positions that share weights, as
in convolutions. packprop counts multiplications, and decides by them alone, so that equal runs round in the
same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra import CAT, per_sample_grad
from packprop.engine.curvature import Columns, Product, Vectors, columns
from packprop.engine.graph import Graph
from packprop.engine.passes import BackwardPass, Request, default_chunk_sizes
from packprop.engine.tensors import accumulation_dtype, as_matrix, outside_autocast
from packprop.types import EXACT, Extension, Row


class RootRows(Extension):
    """Rows of the root of the GGN: ``[c, n, *p]``."""

    savefield = "root_rows"
    rows = (Row(EXACT, per_sample_grad, over_n=CAT[1], over_v=CAT[0], degree=0.5),)


def row_product(graph: Graph, parameters: Sequence[Tensor], count: int, room: int) -> Product | None:
    """Return a product by rows, if it is less work for ``count`` vectors; see NOTE [Products by rows].

    Args:
        graph: The graph of a batch, with its samples located.
        parameters: The parameters of vectors and products; a product is zero for a parameter outside the graph.
        count: The number of vectors.
        room: Bytes for rows; ``row_product`` returns ``None`` if the rows of one column take more.
    """
    leaves = graph.leaves()
    entries = sum(leaf.numel() for leaf in leaves)
    if any(leaf.is_complex() for leaf in leaves):
        return None
    groups = columns(graph, EXACT, create_graph=False)
    work = _multiplications(graph)
    if sum(group.count for group in groups) * (work + graph.samples * entries * count) >= 2 * work * count:
        return None
    bytes_of_column = 2 * graph.samples * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    step = room // max(1, bytes_of_column)
    if not step:
        return None

    @outside_autocast
    def product(vectors: Vectors) -> list[Tensor]:
        wide = [vector.to(accumulation_dtype(vector.dtype)) for vector in vectors]
        sums = [torch.zeros_like(vector) for vector in wide]
        for group in groups:
            for start, stop in group.chunks(step):
                rows = _rows(graph, group, start, stop)
                pairs = [
                    (
                        as_matrix(rows[id(parameter)].flatten(0, 1)).to(vector.dtype),
                        as_matrix(vector),
                        as_matrix(total),
                    )
                    for parameter, vector, total in zip(parameters, wide, sums, strict=True)
                    if id(parameter) in rows
                ]
                if pairs:
                    along = torch.stack([row @ vector.mT for row, vector, _ in pairs]).sum(0)
                    for row, _, total in pairs:
                        total.addmm_(along.mT, row)
        return sums

    return product


def _rows(graph: Graph, group: Columns, start: int, stop: int) -> dict[int, Tensor]:
    """Return rows ``[c, n, *p]`` of the columns from ``start`` to ``stop``, by the identity of the leaf."""
    extension, found = RootRows(), dict[int, Tensor]()
    part = Columns(group.edges, stop - start, lambda first, last: group.chunk(start + first, start + last))

    def done(leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        if extension in results:
            found[id(graph.home(leaf))] = results[extension][0]

    sizes = default_chunk_sizes(graph.roots[0].device)
    BackwardPass(Request(graph, [extension], sizes, drawn={EXACT: [part]}), done).run(None)
    return found


def _multiplications(graph: Graph) -> int:
    """Count the multiplications by weights in a forward pass."""
    total = 0
    for use in graph.uses:
        for entry in use.entries:
            if entry.fans is not None:
                fans = entry.fans
                outputs = fans.groups * fans.fan_out
                rows = use.shapes[0].numel() // max(1, outputs) if fans.rows is None else fans.rows
                total += rows * outputs * fans.fan_in
    return total
