"""The helper that runs a function in several processes."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor

from tests.distributed.processes import ProcessesFailed, in_processes, needs_groups, outcomes_of
from tests.selection import thorough

pytestmark = needs_groups


def total(rank: int, factor: int) -> Tensor:
    value = torch.tensor([float(factor * (rank + 1))])
    torch.distributed.all_reduce(value)
    return value


def one_hangs(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    torch.distributed.all_reduce(torch.zeros(1))


def one_dies(rank: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def never(rank: int) -> None:
    time.sleep(60)


def test_values_come_back_by_rank() -> None:
    assert [value.tolist() for value in in_processes(total, 3, 2)] == [[12.0]] * 3


@thorough
def test_one_that_raises_ends_the_others() -> None:
    with pytest.raises(ProcessesFailed, match=r"all_reduce[\s\S]*rank 1 has had enough"):
        in_processes(one_hangs, 2)


@thorough
def test_one_that_dies_is_named() -> None:
    found = outcomes_of(one_dies, 2, group=False, patient=True)
    assert (found[0].value, found[0].error) == (0, None)
    assert found[1].error == "it died"


@thorough
def test_time_is_limited() -> None:
    with pytest.raises(ProcessesFailed, match="never"):
        in_processes(never, 1, seconds=1)
