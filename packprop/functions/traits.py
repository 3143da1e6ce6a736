"""Functions that mix samples, only expand a parameter, or use metadata of a tensor alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.functions.entry import functions_named
from packprop.functions.reorderings import REORDERINGS


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


MAY_DRAW = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
"""Functions with a rule that may draw random numbers, for dropout between layers."""


EXPANSIONS = functions_named("expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat")
"""Functions that repeat the entries of their first argument, or of each one, and do nothing else.

The last one also repeats longer axes as a whole, which is no expansion.
"""


LIKE_ANOTHER = functions_named("type_as", "view_as", "reshape_as", "expand_as", "to")
"""Functions of their first argument, which take from a second tensor its shape, type or device and no entry."""


SEPARATE = functions_named(
    "broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d", "align_tensors"
)
"""Functions of several tensors that give each of them another shape: no entry of one meets another's."""


CONSTANTS = functions_named(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)
"""Functions that make a tensor without a gradient, and take a tensor for its shape, type or device alone."""


METADATA = functions_named(
    *("dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr", "__len__"),
)
"""Functions that tell something about a tensor, and return none."""


def is_one_index(index: Any) -> bool:
    """Whether an index holds single numbers and slices alone, be they given as tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        isinstance(part, (int, slice, type(None), type(...)))
        or (isinstance(part, Tensor) and part.dim() == 0 and part.dtype != torch.bool)
        for part in parts
    )


UNUSUAL = frozenset({Tensor.__setitem__, Tensor.register_hook, torch.arange, *MIXERS}).union(
    EXPANSIONS, LIKE_ANOTHER, SEPARATE, CONSTANTS, REORDERINGS
)
"""All functions that recording knows something about, beside rules and losses: the others pass quickly."""
