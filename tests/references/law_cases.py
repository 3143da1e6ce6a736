"""Cases that laws are tested on: one of each structure, each way of sharing, and whole models."""

from __future__ import annotations

import pytest

from tests.cases import CASES
from tests.references.running import ROWS

# One of each structure, each way of sharing, and the whole models.
LAW_CASES = [
    case
    for case in CASES
    if "smoke" in case.tags
    or case.name
    in {
        "linear-3d-square",
        "conv2d-groups",
        "convtranspose2d-options",
        "layernorm-shared",
        "embedding-positions",
        "embedding-bag-mean",
        "prelu-channels",
        "class-token-through-layer",
        "einsum-quadratic",
        "weight-norm",
        "tied-transpose",
        "windows",
        "time-first-inside",
        "lstm",
        "cdist",
        "own-coupled",
        "mse-map",
        "ce-map-weights-ignore-smoothing",
        "flattened-attention-mse",
        "none-then-weighted-mean",
        "two-forward-passes",
    }
]
SIZE = 4
each_case = pytest.mark.parametrize("case", LAW_CASES, ids=lambda case: case.name)
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
