"""Several processes: values of the samples of all ranks, and how packprop puts them together."""

from packprop.distributed.merging import merge_over_ranks
from packprop.distributed.ranks import AllRanks

__all__ = ["AllRanks", "merge_over_ranks"]
