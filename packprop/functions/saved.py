"""What a node saved, read so that it can be read again.

# NOTE [Saved twice]
A non-reentrant checkpoint computes what its nodes saved again in each pass, and hands each tensor out once. A
use is visited just before its node runs, and needs the same tensors. So packprop puts each tensor that it reads
back into the place where the checkpoint keeps it. Outside of a pass a checkpoint runs its region again for each
tensor that is read, and would keep what it computed for as long as the graph is there: packprop drops that.
Both read what a checkpoint's hooks refer to, its frame and its holders, which are private and are used here
alone: nothing public says where a checkpoint keeps a tensor. A checkpoint files what it computes under the
number of the pass, or under a random number of 128 bits outside of all passes, and notes in the holder that the
tensor was handed out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import checkpoint

OUTSIDE = 2**64
"""Numbers from here on are no pass's."""


class _Handle:
    """A key of what a checkpoint keeps, which goes with its holder."""


class _Kept(NamedTuple):
    """A tensor that a checkpoint hands out once, and where it keeps it.

    Args:
        holder: What the node saved in place of the tensor.
        frame: The state of the checkpoint.
        number: What the checkpoint files the tensor under.
        value: The tensor.
    """

    holder: Any
    frame: Any
    number: Any
    value: Tensor


def saved_tensor(node: Any, name: str) -> Any:
    """What a node saved under a name, as for ``node._saved_name``."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if not _is_kept_elsewhere(raw):
        return getattr(node, f"_saved_{name}")
    kept = _read(raw)
    _put_back([kept])
    return kept.value


@contextlib.contextmanager
def saved_again(node: Any) -> Iterator[None]:
    """Inside, a node may be called by itself: what it saved is there for the pass, too."""
    names = [name for name in dir(node) if name.startswith("_raw_saved_")]
    raws = [raw for name in names for raw in _listed(getattr(node, name)) if _is_kept_elsewhere(raw)]
    if not raws:
        yield
        return
    kept = [_read(raw) for raw in raws]
    _put_back(kept)
    try:
        yield
    finally:
        _put_back(kept)
        for frame in {id(each.frame): each.frame for each in kept}.values():
            for number in [number for number in frame.recomputed if _is_outside(number)]:
                _drop(frame, number)


def keeps_elsewhere(node: Any) -> bool:
    """Whether a checkpoint keeps what a node saved, so that it is computed when it is read."""
    names = [name for name in dir(node) if name.startswith("_raw_saved_")]
    return any(_is_kept_elsewhere(raw) for name in names for raw in _listed(getattr(node, name)))


def _listed(raw: Any) -> tuple[Any, ...]:
    return tuple(raw) if isinstance(raw, (tuple, list)) else (raw,)


def _is_kept_elsewhere(raw: Any) -> bool:
    return type(getattr(raw, "data", None)).__module__ == checkpoint.__name__


def _read(raw: Any) -> _Kept:
    """Read a tensor that a checkpoint keeps; the region is run again if this pass has had it already."""
    holder, frame = raw.data, _frame_of(raw.unpack_hook)
    handed_out = _handed_out(holder)
    try:
        value = raw.unpack()
    except checkpoint.CheckpointError:
        if not handed_out:
            raise
        for number in handed_out:
            _drop(frame, number)
        _put_back([_read(given) for given in frame.saved_args if _is_kept_elsewhere(given)])
        handed_out = _handed_out(holder)
        value = raw.unpack()
    (number,) = _handed_out(holder) - handed_out
    if _is_outside(number):
        _drop(frame, number)
    return _Kept(holder, frame, number, value)


def _handed_out(holder: Any) -> set[Any]:
    """The passes that have had a tensor."""
    return {number for number, handle in holder.handles.items() if handle is None}


def _put_back(kept: list[_Kept]) -> None:
    for holder, frame, number, value in kept:
        if not _is_outside(number) and holder.handles.get(number) is None:
            handle = holder.handles[number] = _Handle()
            frame.recomputed[number][handle] = value


def _is_outside(number: Any) -> bool:
    """Whether a checkpoint files under a number what it has computed outside of all passes."""
    return isinstance(number, int) and number >= OUTSIDE


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
