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
import functools
from collections.abc import Callable, Iterator, Sequence
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


def saved_tensor(node: Any, name: str | int) -> Any:
    """What a node saved under a name, as for ``node._saved_name``; by number as for ``node.saved_tensors``."""
    if isinstance(name, int):  # a checkpoint hands all of them out at once, and each only once
        values, kept = _read(node._raw_saved_tensors, lambda: node.saved_tensors)
    else:
        raw = getattr(node, f"_raw_saved_{name}", None)
        values, kept = _read([raw], lambda: [getattr(node, f"_saved_{name}")])
    _put_back(kept)
    return values[name if isinstance(name, int) else 0]


@contextlib.contextmanager
def saved_again(node: Any) -> Iterator[None]:
    """Inside, a node may be called by itself: what it saved is there for the pass, too."""
    saved = [(raws, read) for raws, read in _saved_by(node) if any(map(_is_kept_elsewhere, raws))]
    kept = [each for raws, read in saved for each in _read(raws, read)[1]]
    if not kept:
        yield
        return
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
    return any(_is_kept_elsewhere(raw) for raws, _ in _saved_by(node) for raw in raws)


def _saved_by(node: Any) -> Iterator[tuple[Sequence[Any], Callable[[], Sequence[Any]]]]:
    """Everything that a node saved, with what reads it: only the node itself can read what it made."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        raw, public = getattr(node, name), name.removeprefix("_raw_")
        if not isinstance(raw, (tuple, list)):
            yield [raw], functools.partial(_one, node, f"_{public}")
        elif public == "saved_tensors":  # of a user's own function
            yield raw, functools.partial(getattr, node, public)
        else:
            yield raw, functools.partial(_unpacked, raw)


@functools.lru_cache(maxsize=1024)
def _raw_names(kind: type) -> tuple[str, ...]:
    """Under which names nodes of a type show what they saved, as autograd keeps it."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _one(node: Any, name: str) -> list[Any]:
    return [getattr(node, name)]


def _unpacked(raws: Sequence[Any]) -> list[Any]:
    return [raw.unpack() for raw in raws]


def _is_kept_elsewhere(raw: Any) -> bool:
    return type(getattr(raw, "data", None)).__module__ == checkpoint.__name__


def _read(raws: Sequence[Any], read: Callable[[], Sequence[Any]]) -> tuple[Sequence[Any], list[_Kept]]:
    """Read tensors, of which a checkpoint may keep some; also returns those that it keeps.

    Its region is run again if this pass has had one of them already.
    """
    pairs = [(raw.data, _frame_of(raw.unpack_hook)) if _is_kept_elsewhere(raw) else None for raw in raws]
    there = [pair for pair in pairs if pair is not None]
    if not there:
        return read(), []
    before = [_handed_out(holder) for holder, _ in there]
    try:
        values = read()
    except checkpoint.CheckpointError:
        if not any(before):
            raise
        for frame in {id(frame): frame for _, frame in there}.values():
            for number in set().union(*before):
                _drop(frame, number)
            given = [raw for raw in frame.saved_args if _is_kept_elsewhere(raw)]
            _put_back(_read(given, functools.partial(_unpacked, given))[1])
        before = [_handed_out(holder) for holder, _ in there]
        values = read()
    kept = [value for pair, value in zip(pairs, values, strict=True) if pair is not None]
    found = []
    for (holder, frame), earlier, value in zip(there, before, kept, strict=True):
        (number,) = _handed_out(holder) - earlier
        found.append(_Kept(holder, frame, number, value))
    for _, frame, number, _ in found:
        if _is_outside(number):
            _drop(frame, number)
    return values, found


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
