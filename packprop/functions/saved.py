"""What a node saved, read so that it can be read again.

# NOTE [Saved twice]
A non-reentrant checkpoint computes what its nodes saved again in each pass, and hands each tensor out once. A
use is visited just before its node runs, and needs the same tensors. So packprop puts each tensor that it reads
back into the place where the checkpoint keeps it. Outside of a pass a checkpoint runs its region again for each
tensor that is read, and would keep what it computed for as long as the graph is there: packprop drops that.
Both need private parts of
``torch.utils.checkpoint``, which are used here alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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


def saved_tensor(node: Any, name: str | int) -> Any:
    """What a node saved under a name, as for ``node._saved_name``; by number as for ``node.saved_tensors``."""
    if isinstance(name, int):
        values: list[Any] = []

        def read() -> list[Any]:  # a checkpoint hands all of them out at once, and each only once
            values[:] = node.saved_tensors
            return values

        _put_back(_read(node._raw_saved_tensors, read))
        return (values or node.saved_tensors)[name]
    raw = getattr(node, f"_raw_saved_{name}", None)
    if not _is_kept_elsewhere(raw):
        return getattr(node, f"_saved_{name}")
    kept = _read([raw], lambda: [getattr(node, f"_saved_{name}")])
    _put_back(kept)
    return kept[0].value


@contextlib.contextmanager
def saved_again(node: Any) -> Iterator[None]:
    """Inside, a node may be called by itself: what it saved is there for the pass, too."""
    kept = [each for raws, read in _saved_by(node) for each in _read(raws, read)]
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
    return type(getattr(raw, "data", None)) is checkpoint._Holder


def _read(raws: Sequence[Any], read: Callable[[], Sequence[Any]]) -> list[_Kept]:
    """Read tensors of which a checkpoint keeps some: those that it keeps."""
    frames = [_frame_of(raw.unpack_hook) if _is_kept_elsewhere(raw) else None for raw in raws]
    owners = {id(frame): frame for frame in frames if frame is not None}
    if not owners:
        return []
    before = {key: set(frame.recomputed) for key, frame in owners.items()}
    values = read()
    if _pass() == OUTSIDE:
        for key, frame in owners.items():
            for number in set(frame.recomputed) - before[key]:
                _drop(frame, number)
    triples = zip(raws, frames, values, strict=True)
    return [_Kept(raw.data, frame, value) for raw, frame, value in triples if frame is not None]


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
