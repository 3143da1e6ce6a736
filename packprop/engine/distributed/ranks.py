"""The samples behind a value: those of this rank, or those of all ranks of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from packprop.engine.distributed.arriving import PATIENCE
from packprop.errors import BadInput

ASKED = "Values of the samples of all ranks were asked for."

Share = Literal["terms", "samples", "equal"]
"""The weight of each rank's loss in the loss of all of them."""


@dataclass(frozen=True)
class AllRanks:
    """Makes values cover the samples of all ranks, as of one process that has them all.

    Sums, moments and Kronecker factors are the same on every rank. Values with a row for each sample stay on
    the rank of the sample, at the scale of the loss of all ranks, unless you gather them.

    Args:
        share: The weight of a rank's loss in the loss of all ranks, whose derivatives values are. ``"terms"``:
            as if there were one loss over all samples: under a mean its number of terms divided by that of all
            ranks, under a sum 1. ``"samples"``: its number of samples divided by that of all ranks.
            ``"equal"``: 1 divided by the number of ranks, as in the gradients of ``DistributedDataParallel``
            and ``fully_shard``. Or a positive number, for a loss that is already weighted.
        gather: Gives every rank the rows of all samples, in the order of ranks.
        group: The ranks that have samples of their own, and share parameters if any do; ``None`` for all.
        timeout: Seconds to wait for the other ranks before each pass; with gloo, the error then names the ranks
            that did not come.

    Raises:
        BadInput: For a share that is neither a name nor a positive number.
    """

    share: Share | float = "terms"
    gather: bool = False
    group: torch.distributed.ProcessGroup | None = None
    timeout: float = PATIENCE

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        named = isinstance(self.share, str) and self.share in get_args(Share)
        is_number = isinstance(self.share, (int, float)) and not isinstance(self.share, bool)
        if not (named or (is_number and 0 <= float(self.share) < math.inf)):
            raise BadInput(
                f"AllRanks(share={self.share!r}) was asked for.",
                "share",
                "it is not one of those that are known, nor a number that is not negative",
                f"choose from {', '.join(map(repr, get_args(Share)))}, or give what this rank's loss is "
                "multiplied by in the loss of all ranks",
            )
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or self.timeout <= 0:
            raise BadInput(
                f"AllRanks(timeout={self.timeout!r}) was asked for.",
                "timeout",
                "it is no positive number",
                "give seconds",
            )


def ranks_of(ranks: Any) -> AllRanks | None:
    """Read the argument ``ranks`` of ``backpack``: ``None`` for this rank's samples.

    Raises:
        BadInput: If it is neither ``"own"``, ``"all"`` nor an ``AllRanks``.
    """
    if ranks == "own":
        return None
    chosen = AllRanks() if ranks == "all" else ranks
    if not isinstance(chosen, AllRanks):
        raise BadInput(
            "backpack(ranks=...) was entered.",
            f"ranks={ranks!r}",
            "it does not say whose samples values are made of",
            "give 'own', 'all', or packprop.AllRanks(...)",
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise BadInput(
            ASKED,
            f"ranks={ranks!r}",
            "there is no process group in this process",
            "call torch.distributed.init_process_group() first, and start the program by torchrun",
        )
    if torch.distributed.get_rank(chosen.group) < 0:
        raise BadInput(
            ASKED,
            "AllRanks(group=...)",
            "this process is not in that group",
            "give the group that this process shares its data with",
        )
    return chosen
