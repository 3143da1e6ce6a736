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


RECURRENCES = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
"""Functions that say themselves which axis is time."""


MAY_DRAW = RECURRENCES
"""Functions with a rule that may draw random numbers, for dropout between layers."""


SAMPLES_LEAD: dict[Callable[..., Any], int] = {
    **{F.linear: 2, F.conv1d: 3, F.conv2d: 4, F.conv3d: 5},
    **{F.conv_transpose1d: 3, F.conv_transpose2d: 4, F.conv_transpose3d: 5},
}
"""Functions whose other axes cannot hold the samples -> of how many axes the input must be for that."""


def leads_with_samples(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function keeps samples apart on the leading axis of its input, if it keeps them at all."""
    dims = SAMPLES_LEAD.get(function)  # first: a parameter that is not initialized yet has no dim()
    return dims is not None and bool(args) and isinstance(args[0], Tensor) and dims == args[0].dim()


def axes_kept_and_mixed(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the first two axes of its first argument, those that a function keeps in its first output, and mixes.

    Along an axis that it keeps, rows depend on the same rows of the argument alone.
    """
    dims = args[0].dim()
    if function is F.embedding:
        return tuple(range(min(2, dims))), ()
    if function is F.linear:
        return ((0,), (1,)) if dims == 2 else ((0, 1)[: dims - 1], ())
    if leads_with_samples(function, args):
        return (0,), (1,)
    if function in RECURRENCES and dims == 3 and len(args) == 9 and isinstance(args[3], bool):
        return ((0,), (1,)) if args[8] else ((1,), (0,))
    return (), ()


EXPANSIONS = functions_named("expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat")
"""Functions that repeat the entries of their first argument, or of each one, and do nothing else.

The last one also repeats longer axes as a whole, which is no expansion.
"""


LIKE_ANOTHER = functions_named("type_as", "view_as", "reshape_as", "expand_as", "to")
"""Functions of their first argument, which take from a second tensor its shape, type or device and no entry."""


RESHAPINGS = functions_named("flatten", "reshape", "view")
"""Functions that may make several axes of their first argument into one, and keep the order of its entries."""


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
    EXPANSIONS, LIKE_ANOTHER, SEPARATE, CONSTANTS, REORDERINGS, RESHAPINGS
)
"""All functions that recording knows something about, beside rules and losses: the others pass quickly."""
