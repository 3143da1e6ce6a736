"""Functions that mix samples, that only expand a parameter, or that reorder rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _batch_norm_mixes(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    return bool(training)


MIXERS: dict[Callable[..., Any], Callable[..., bool]] = {F.batch_norm: _batch_norm_mixes}
"""Functions that can mix samples -> whether a call with given arguments does."""


EXPANSIONS = frozenset({Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to})
"""Functions that repeat the entries of their first argument, and do nothing else."""


REORDERINGS = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        *("__getitem__", "index_select", "gather", "take_along_dim", "take", "masked_select"),
        *("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce"),
        *("sort", "topk", "argsort", "msort", "repeat_interleave", "unique", "nonzero"),
    )
    if hasattr(owner, name)
)
"""Functions by which data can decide on the order of rows."""
