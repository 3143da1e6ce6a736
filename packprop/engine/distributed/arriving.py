"""Waiting of ranks for each other before they exchange anything."""

from __future__ import annotations

from datetime import timedelta

import torch

from packprop.engine.distributed.merging import Group, exchanged
from packprop.errors import PackpropError

PATIENCE = 600.0
"""Seconds that a rank waits for the others by default."""


class RefusedElsewhere(PackpropError):
    """Raised if another rank has refused its part of a pass; all ranks know, and none waits for this one."""


def arrive(group: Group, timeout: float = PATIENCE) -> None:
    """Wait until all ranks are at the same place.

    Raises:
        PackpropError: If some do not come in time. Only gloo can say so; others end by their own timeout.
    """
    if torch.distributed.get_backend(group) != "gloo":
        return
    try:
        torch.distributed.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        raise RefusedElsewhere(
            "Quantities were asked for in a backward pass of several ranks.",
            f"rank {torch.distributed.get_rank(group)}, at the beginning of the pass",
            f"not all ranks came within {timeout:g} s: one has ended, is late, or runs another pass than "
            f"this one ({str(error).splitlines()[0]})",
            "run the same passes on all ranks, each inside `with backpack(..., ranks=...)` of the same "
            "extensions; a rank without samples runs an empty batch; or allow more time: AllRanks(timeout=...)",
        ) from error


def require_well(group: Group, failure: str = "") -> None:
    """Wait until all ranks say that they can go on, or with which failure not; all must come here.

    Raises:
        RefusedElsewhere: If another rank cannot.
    """
    is_nccl = torch.distributed.get_backend(group) == "nccl"
    failed = torch.tensor(int(bool(failure)), device="cuda" if is_nccl else "cpu")
    torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, group)
    if not failed:
        return
    told = exchanged(failure, group)
    rank = next(rank for rank, each in enumerate(told) if each)
    raise RefusedElsewhere(
        "Quantities were asked for in a backward pass of several ranks.",
        f"rank {rank}",
        f"it has failed in its part of the pass:\n{told[rank]}\n",
        "read the error of that rank",
    )
