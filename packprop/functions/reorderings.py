"""Functions by which data can decide on the order of rows, and along which axes they do."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from packprop.functions.entry import functions_named
from packprop.tensors.state import version

ALONG: dict[Callable[..., Any], tuple[int, int | None]] = {
    **dict.fromkeys(functions_named("index_select", "gather"), (1, None)),
    **dict.fromkeys(functions_named("index_add", "index_copy", "index_add_", "index_copy_"), (1, None)),
    **dict.fromkeys(functions_named("scatter", "scatter_add", "scatter_reduce"), (1, None)),
    **dict.fromkeys(functions_named("scatter_", "scatter_add_", "scatter_reduce_"), (1, None)),
    **dict.fromkeys(functions_named("take_along_dim", "repeat_interleave"), (2, None)),
    **dict.fromkeys(functions_named("sort", "argsort"), (1, -1)),
    **dict.fromkeys(functions_named("topk"), (2, -1)),
}
"""Functions along one axis -> place of their argument ``dim``, and what it is by default: ``None`` for all."""


REORDERINGS = frozenset(ALONG) | functions_named(
    *("__getitem__", "__setitem__", "take", "masked_select", "index_put", "index_put_"),
    *("msort", "unique", "nonzero", "_pack_padded_sequence"),
)


def takes_by_index(function: Callable[..., Any], args: Any) -> bool:
    """Whether a call of one of ``REORDERINGS`` takes rows by a list of them; a slice keeps their order."""
    if function not in (Tensor.__getitem__, Tensor.__setitem__):
        return True
    return any(isinstance(part, (Tensor, list)) for part in _parts(args[1]))


def axes_reordered(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counted: Container[Tensor] = (),
) -> frozenset[int] | None:
    """Axes of what a call of one of ``REORDERINGS`` returned along which rows may stand anywhere.

    Args:
        function: The function.
        args: Its arguments by place.
        kwargs: Its arguments by name.
        counted: Indices that are known to count rows from the first one on, as ``torch.arange`` does.

    Returns:
        The axes; ``None`` if it may be any.
    """
    if not takes_by_index(function, args):
        return frozenset()
    if function is Tensor.__getitem__:
        return _axes_of_index(args[0], _parts(args[1]), counted)
    place, default = ALONG.get(function, (0, None))
    dim = kwargs.get("dim", args[place] if 0 < place < len(args) else default)
    if isinstance(dim, bool) or not isinstance(dim, int):
        return None
    axes = args[0].dim()
    return frozenset({dim % axes} if axes else ())


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _axes_of_index(tensor: Tensor, parts: tuple[Any, ...], counted: Container[Tensor]) -> frozenset[int] | None:
    """For ``tensor[parts]`` with lists of rows: the new axes, which stand where the lists do."""
    places = [place for place, part in enumerate(parts) if isinstance(part, Tensor)]
    indices = [part for part in parts if isinstance(part, Tensor)]
    others = [part for part in parts if not isinstance(part, Tensor)]
    if not places or places[-1] - places[0] != len(places) - 1:
        return None
    if any(index.dtype == torch.bool for index in indices):
        return None
    if not all(isinstance(part, (slice, type(...))) for part in others):
        return None
    first = places[0]
    if any(part is ... for part in parts[:first]):
        first = tensor.dim() - (len(parts) - first)
    new = max(index.dim() for index in indices)
    is_counted = indices[0] in counted and version(indices[0]) == 0  # it was not changed in place since
    if new == 1 and is_counted and len(indices[0]) == tensor.shape[first]:
        return frozenset()  # one entry of each row, in their order
    return frozenset(range(first, first + new))
