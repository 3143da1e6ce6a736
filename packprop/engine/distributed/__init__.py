"""Several processes: values of the samples of all ranks, and how packprop puts them together."""

from packprop.engine.distributed.joint import JointPass
from packprop.engine.distributed.merging import exchanged, merge_over_ranks, merged_in_turn
from packprop.engine.distributed.residence import require_sharded, swept
from packprop.engine.distributed.statement import AllRanks, ranks_of

__all__ = [
    "AllRanks",
    "JointPass",
    "exchanged",
    "merge_over_ranks",
    "merged_in_turn",
    "ranks_of",
    "require_sharded",
    "swept",
]
