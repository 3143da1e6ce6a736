"""One backward pass: the order of its sweeps, and the merging of results at leaves."""

from packprop.engine.passes.accumulator import Log
from packprop.engine.passes.backward_pass import BackwardPass, long_work_of
from packprop.engine.passes.chunks import ChunkSizes, default_chunk_sizes
from packprop.engine.passes.gradient import changed_gradient
from packprop.engine.passes.loss_terms import all_terms, is_of_batch, reduction_and_divisor
from packprop.engine.passes.nothing import knows_nothing, results_of_nothing, samples_of_nothing
from packprop.engine.passes.request import Request, settle_loss_inputs, tasks_by_seed
from packprop.engine.passes.saving import (
    Hook,
    moment_of,
    save_of_pass,
    set_aside,
    warn_of_diagonals,
    warn_of_skipped,
    without_correlations,
)

__all__ = [
    "BackwardPass",
    "ChunkSizes",
    "Hook",
    "Log",
    "Request",
    "all_terms",
    "changed_gradient",
    "default_chunk_sizes",
    "is_of_batch",
    "knows_nothing",
    "long_work_of",
    "moment_of",
    "reduction_and_divisor",
    "results_of_nothing",
    "samples_of_nothing",
    "save_of_pass",
    "set_aside",
    "settle_loss_inputs",
    "tasks_by_seed",
    "warn_of_diagonals",
    "warn_of_skipped",
    "without_correlations",
]
