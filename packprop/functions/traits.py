"""Functions that mix samples, reorder rows, only expand a parameter, or use metadata of a tensor alone."""

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


MAY_DRAW = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
"""Functions with a rule that may draw random numbers, for dropout between layers."""


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    """Functions and methods with these names, as far as this release of PyTorch has them."""
    owners = (torch, Tensor)
    return frozenset(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))


SAMPLES_LEAD: dict[Callable[..., Any], int] = {
    **{F.linear: 2, F.conv1d: 3, F.conv2d: 4, F.conv3d: 5},
    **{F.conv_transpose1d: 3, F.conv_transpose2d: 4, F.conv_transpose3d: 5},
}
"""Functions whose other axes cannot hold the samples -> of how many axes the input must be for that."""


def leads_with_samples(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function keeps samples apart on the leading axis of its input, if it keeps them at all."""
    return bool(args) and isinstance(args[0], Tensor) and SAMPLES_LEAD.get(function) == args[0].dim()


EXPANSIONS = _functions("expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat")
"""Functions that repeat the entries of their first argument, or of each one, and do nothing else.

The last one also repeats longer axes as a whole, which is no expansion.
"""


LIKE_ANOTHER = _functions("type_as", "view_as", "reshape_as", "expand_as", "to")
"""Functions of their first argument, which take from a second tensor its shape, type or device and no entry."""


SEPARATE = _functions(
    "broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d", "align_tensors"
)
"""Functions of several tensors that give each of them another shape: no entry of one meets another's."""


CONSTANTS = _functions(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)
"""Functions that make a tensor without a gradient, and take a tensor for its shape, type or device alone."""


METADATA = _functions(
    *("dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr", "__len__"),
)
"""Functions that tell something about a tensor, and return none."""


REORDERINGS = _functions(
    *("__getitem__", "index_select", "gather", "take_along_dim", "take", "masked_select"),
    *("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce"),
    *("index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_", "scatter_reduce_", "__setitem__"),
    *("sort", "topk", "argsort", "msort", "repeat_interleave", "unique", "nonzero"),
)
"""Functions by which data can decide on the order of rows."""


def takes_by_index(function: Callable[..., Any], args: Any) -> bool:
    """Whether a call of one of ``REORDERINGS`` takes rows by a list of them; a slice keeps their order."""
    if function not in (Tensor.__getitem__, Tensor.__setitem__):
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(part, (Tensor, list)) for part in index)


def is_one_index(index: Any) -> bool:
    """Whether an index holds single numbers and slices alone, be they given as tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        isinstance(part, (int, slice, type(None), type(...)))
        or (isinstance(part, Tensor) and part.dim() == 0 and part.dtype != torch.bool)
        for part in parts
    )


UNUSUAL = frozenset({Tensor.__setitem__, Tensor.register_hook, *MIXERS}).union(
    EXPANSIONS, LIKE_ANOTHER, SEPARATE, CONSTANTS, REORDERINGS
)
"""All functions that recording knows something about, beside rules and losses: the others pass quickly."""
