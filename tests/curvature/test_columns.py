"""Columns of the exact root of a loss's Hessian, taken whole or in chunks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import packprop
from packprop.engine.curvature.seeds import columns
from packprop.engine.graph.walk import walk
from packprop.engine.samples.locating import check_graph
from packprop.types import ENTRYWISE, EXACT, Seed


@pytest.mark.parametrize("seed", [EXACT, ENTRYWISE])
def test_chunks_of_columns_are_columns_of_the_whole(seed: Seed) -> None:
    """Whatever their order: by position, or by class as in the loss's input."""
    model = packprop.extend(nn.Conv1d(2, 3, 2))
    outputs = model(torch.randn(2, 2, 6))
    loss = packprop.extend(nn.CrossEntropyLoss())(outputs, torch.randint(3, (2, 5)))
    graph = walk([loss], [None], None)
    check_graph(graph)
    (group,) = columns(graph, seed, False)
    (whole,) = group.chunk(0, group.count)
    for start in range(group.count):
        for stop in range(start + 1, group.count + 1):
            (chunk,) = group.chunk(start, stop)
            assert torch.equal(chunk, whole[start:stop])
    places = [tuple(column.abs().sum((0, 1)).nonzero().flatten().tolist()) for column in whole]
    by_position = [(t,) for t in range(5) for _ in range(2)]
    assert places == (by_position if seed == EXACT else [(t,) for _ in range(3) for t in range(5)])
