"""Several processes: values of the samples of all ranks, and merging of partial results of your own."""

from packprop.engine.distributed import AllRanks, merge_over_ranks

__all__ = ["AllRanks", "merge_over_ranks"]
