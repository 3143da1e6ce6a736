"""What a node saved, read so that it can be read again.

# NOTE [Saved twice]
A non-reentrant checkpoint computes what its nodes saved again in each pass, and hands each tensor out once. A use is
visited just before its node runs, and needs the same tensors. So packprop puts each tensor that it reads back into the
place where the checkpoint keeps it. Outside of a pass a checkpoint runs its region again for each tensor that is read,
and would keep what it computed for as long as the graph is there: packprop drops that. Both need private parts of
``torch.utils.checkpoint``, which are used here alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

OUTSIDE = -1
"""In place of the number of a pass, where none runs."""


class _Kept(NamedTuple):
    """A tensor that a checkpoint hands out once, and where it keeps it."""

    holder: Any
    frame: Any
    value: Tensor


def saved_tensor(node: Any, name: str) -> Any:
    """What a node saved under a name, as for ``node._saved_name``."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if not _is_kept_elsewhere(raw):
        return getattr(node, f"_saved_{name}")
    kept = _read(raw, lambda: getattr(node, f"_saved_{name}"))
    _put_back([kept])
    return kept.value


@contextlib.contextmanager
def saved_again(node: Any) -> Iterator[None]:
    """Inside, a node may be called by itself: what it saved is there for the pass, too."""
    kept = [_read(raw, read) for raw, read in _saved_by(node) if _is_kept_elsewhere(raw)]
    if not kept:
        yield
        return
    _put_back(kept)
    try:
        yield
    finally:
        _put_back(kept)


def keeps_elsewhere(node: Any) -> bool:
    """Whether a checkpoint keeps what a node saved, so that it is computed when it is read."""
    return any(_is_kept_elsewhere(raw) for raw, _ in _saved_by(node))


def _saved_by(node: Any) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Everything that a node saved, with what reads it: only the node itself can read what it made."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        raw = getattr(node, name)
        if isinstance(raw, (tuple, list)):
            yield from ((each, each.unpack) for each in raw)
        else:
            yield raw, functools.partial(getattr, node, name.removeprefix("_raw"))


def _is_kept_elsewhere(raw: Any) -> bool:
    return type(getattr(raw, "data", None)) is checkpoint._Holder


def _read(raw: Any, read: Callable[[], Any]) -> _Kept:
    """Read a tensor that a checkpoint keeps."""
    frame, before = _frame_of(raw.unpack_hook), None
    if _pass() == OUTSIDE:
        before = set(frame.recomputed)
    value = read()
    if before is not None:
        for number in set(frame.recomputed) - before:
            _drop(frame, number)
    return _Kept(raw.data, frame, value)


def _put_back(kept: list[_Kept]) -> None:
    number = _pass()
    if number == OUTSIDE:
        return
    for holder, frame, value in kept:
        if holder.handles.get(number) is None:
            handle = holder.handles[number] = checkpoint._Handle()
            frame.recomputed[number][handle] = value


def _drop(frame: Any, number: Any) -> None:
    """Drop what a region has computed again outside of a pass."""
    for table in (frame.recomputed, frame.is_recomputed, frame.recomp_counter):
        table.pop(number, None)
    for reference in frame.weak_holders:
        holder = reference()
        if holder is not None:
            holder.handles.pop(number, None)


def _frame_of(hook: Any) -> Any:
    """Where a checkpoint keeps its state, which its hooks refer to."""
    names, cells = hook.__code__.co_freevars, hook.__closure__ or ()
    found = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    return found["frame"]


def _pass() -> Any:
    """The number of the pass that runs; see ``torch.utils.checkpoint``, which tells passes apart by it."""
    return torch._C._current_graph_task_id()
