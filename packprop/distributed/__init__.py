"""Several processes: what a value is that the samples of all ranks make up, and how it is put together."""

from packprop.distributed.merging import merge_over_ranks
from packprop.distributed.ranks import AllRanks

__all__ = ["AllRanks", "merge_over_ranks"]
