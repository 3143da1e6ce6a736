"""Partial results of ranks merge as those of batches do, whichever ranks have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import packprop
from packprop.engine.algebra.monoid import CAT, KEEP, MOMENTS, SUM, Moments, Monoid, lift
from packprop.engine.distributed import merge_over_ranks, merging
from tests.distributed.processes import in_processes, needs_groups

pytestmark = needs_groups

LENGTHS = (3, 0, 5)
"""Rows on each rank."""

BY_MAX = Monoid("MAX", torch.maximum, lambda value: value)
MONOIDS = {"sum": SUM, "moments": MOMENTS, "rows": CAT[0], "columns": CAT[1], "kept": KEEP, "largest": BY_MAX}


def rows_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return 1e4 + torch.randn(LENGTHS[rank], 2, 4, generator=generator, dtype=torch.float64)


def moments_of(rows: torch.Tensor) -> Moments:
    mean = rows.mean(0) if len(rows) else torch.zeros(rows.shape[1:], dtype=rows.dtype)
    return Moments(len(rows), mean, (rows - mean).square().sum(0))


def partial_of(rank: int, lacking: tuple[str, ...] = ()) -> dict[str, Any]:
    rows = rows_of(rank)
    partial = {
        "sum": rows.sum(0),
        "moments": moments_of(rows),
        "rows": [*rows.split(2)] if len(rows) else [rows],
        "columns": lift(CAT[1], rows.transpose(0, 1)),
        "kept": torch.tensor([7]),
        "largest": rows.amax(0) if len(rows) else torch.zeros(2, 4, dtype=torch.float64),
    }
    return {key: value for key, value in partial.items() if key not in lacking}


def merged(rank: int) -> None:
    own = partial_of(rank)
    before = partial_of(rank)
    every = torch.cat([rows_of(r) for r in range(3)])
    got = merge_over_ranks(own, MONOIDS.__getitem__)
    torch.testing.assert_close(got["sum"], every.sum(0))
    expected = moments_of(every)
    assert got["moments"].samples == 8
    torch.testing.assert_close(got["moments"].mean, expected.mean)
    torch.testing.assert_close(got["moments"].deviation, expected.deviation, rtol=1e-9, atol=0)
    assert torch.equal(CAT[0].result(got["rows"]), every)
    assert torch.equal(CAT[1].result(got["columns"]), every.transpose(0, 1))
    assert got["kept"].tolist() == [7]
    assert torch.equal(got["largest"], every.amax(0))
    kept = merge_over_ranks(own, MONOIDS.__getitem__, gather=False)
    assert torch.equal(CAT[0].result(kept["rows"]), rows_of(rank))
    torch.testing.assert_close(own, before)  # nothing was changed


def of_some_ranks(rank: int) -> None:
    """What one rank lacks counts as rows of zeros there, if it is told how many."""
    lacking = ("sum", "moments", "rows", "kept") if rank == 0 else ()
    every = torch.cat([torch.zeros_like(rows_of(0)), rows_of(2)])
    got = merge_over_ranks(partial_of(rank, lacking), MONOIDS.__getitem__, absent=LENGTHS[0])
    torch.testing.assert_close(got["sum"], every.sum(0))
    assert got["moments"].samples == 8
    torch.testing.assert_close(got["moments"].deviation, moments_of(every).deviation)
    assert torch.equal(CAT[0].result(got["rows"]), every)
    assert got["kept"].tolist() == [7]
    without = merge_over_ranks(partial_of(rank, lacking), MONOIDS.__getitem__)
    assert without["moments"].samples == 5
    assert torch.equal(CAT[0].result(without["rows"]), rows_of(2))


def counted_by_data(rank: int) -> None:
    """Rows that count may be known to tensors alone."""
    rows = rows_of(rank)
    own = moments_of(rows)._replace(samples=torch.tensor(len(rows)))
    got = merge_over_ranks({"moments": own}, MONOIDS.__getitem__)["moments"]
    expected = moments_of(torch.cat([rows_of(r) for r in range(3)]))
    assert got.samples.item() == 8
    torch.testing.assert_close(got.mean, expected.mean)
    torch.testing.assert_close(got.deviation, expected.deviation, rtol=1e-9, atol=0)


def same_on_all(rank: int) -> list[torch.Tensor]:
    got = merge_over_ranks(partial_of(rank), MONOIDS.__getitem__)
    return [got["sum"], got["moments"].mean, got["moments"].deviation, *got["rows"]]


def not_alike(rank: int) -> str:
    try:
        merge_over_ranks({"sum": torch.zeros(2 + rank)}, MONOIDS.__getitem__)
    except packprop.PackpropError as error:
        return str(error)
    return ""


def single_precision(rank: int) -> None:
    """Deviations are right where the mean is a million times as large."""
    rows = rows_of(rank).float()
    got = merge_over_ranks({"moments": moments_of(rows)}, MONOIDS.__getitem__)["moments"]
    expected = moments_of(torch.cat([rows_of(r).float().double() for r in range(3)]))
    torch.testing.assert_close(got.deviation.double(), expected.deviation, rtol=2e-3, atol=0)


def everything(rank: int) -> tuple[list[torch.Tensor], str]:
    for check in (merged, of_some_ranks, counted_by_data, single_precision):
        check(rank)
    return same_on_all(rank), not_alike(rank)


def test_partial_results_of_ranks_merge() -> None:
    found = in_processes(everything, 3)
    for tensors, refused in found:
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[0][0], strict=True))  # bit for bit
        for part in ("'sum'", "rank 0: SUM of [2]", "rank 2: SUM of [4]"):
            assert part in refused


def test_results_merge_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as they have so many entries, so that there is no second copy of all."""
    asked: list[list[str]] = []

    def noted(bucket: Sequence[Any], *_: Any) -> Iterator[tuple[str, Any]]:
        asked.append([key for key, _, _ in bucket])
        yield from ((key, value) for key, value, _ in bucket)

    monkeypatch.setattr(merging, "BUCKET", 10)
    monkeypatch.setattr(merging, "exchanged", lambda value, group: [value])
    monkeypatch.setattr(merging, "_merged", noted)
    partial = {name: torch.zeros(2, 2) for name in "abcdefg"}
    assert merge_over_ranks(partial, lambda key: SUM).keys() == partial.keys()
    assert asked == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
