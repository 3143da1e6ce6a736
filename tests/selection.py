"""What `make test` leaves to `make test-all`: tests marked `thorough`, by themselves or by `often`.

`make test` guards every part of the package in three minutes on two cores: it tries each law on some cases,
or on one case of each structure. Thorough are the same laws in further sizes, precisions and algorithms, and
tests that run processes or compilers for long.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.cases import CASES, ONE_OF_EACH, Case

thorough = pytest.mark.thorough
"""Marks a test, or a value of its parameters, that only `make test-all` runs."""

STRUCTURES = frozenset(case.name for case in ONE_OF_EACH) | {
    *("conv2d-groups", "convtranspose2d-options", "layernorm-shared", "embedding-positions"),
    *(
        "einsum-quadratic",
        "mse-map",
        "ce-map-weights-ignore-smoothing",
        "flattened-attention-mse",
        "none-then-weighted-mean",
    ),
    *(case.name for case in CASES if "smoke" in case.tags),
}
"""Names of the cases that stand for all others of the same structure or loss."""


def often(predicate: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark a test thorough for the parameters of which a function with their names says ``False``."""
    return pytest.mark.often.with_args(predicate)


def one_in(number: int) -> pytest.MarkDecorator:
    """Mark a test thorough for all but about one in so many of its parameters, the first among them.

    Which ones depends on their names alone, as if they were drawn: of crossed parameters each value remains.
    """
    return pytest.mark.one_in.with_args(number)


_FIRST: dict[Any, str] = {}


def mark_thorough(item: pytest.Item) -> None:
    """Apply ``often`` and ``one_in`` to a test that was collected."""
    for mark in item.iter_markers("often"):
        if not mark.args[0](**item.callspec.params):  # type: ignore[attr-defined]  # it has parameters
            item.add_marker(thorough)
    if item.get_closest_marker("thorough") is None:
        for mark in item.iter_markers("one_in"):
            first = _FIRST.setdefault(item.function, item.nodeid)  # type: ignore[attr-defined]  # it is a function
            if item.nodeid != first and zlib.crc32(item.nodeid.encode()) % mark.args[0]:
                item.add_marker(thorough)


each_structure = often(lambda case, **_: case.name in STRUCTURES)
"""Marks a test with a parameter ``case`` that `make test` runs on one case of each structure."""


def paired(cases: Iterable[Case]) -> list[Any]:
    """Return the parameters ``(case, size, reduction)``: the largest size with the first reduction, and so on.

    Crossed, they would tell no more: a reduction changes a divisor, whatever the number of samples.
    """
    found = []
    for case in cases:
        sizes, reductions = case.sizes[::-1], case.reductions
        for i in range(max(len(sizes), len(reductions))):
            size, reduction = sizes[min(i, len(sizes) - 1)], reductions[min(i, len(reductions) - 1)]
            found.append(pytest.param(case, size, reduction, id=f"{case.name}-n{size}-{reduction}"))
    return found
