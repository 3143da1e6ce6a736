"""Saved tensors of nodes, read such that autograd can read them again.

# NOTE [Saved twice]
A non-reentrant checkpoint recomputes the saved tensors of its nodes in each pass, and returns each tensor only
once. packprop visits a use just before its node runs, and both need the same tensors. So packprop puts each
tensor that it reads back to where the checkpoint keeps it. Outside of a pass, a checkpoint runs its region
again for each tensor that is read, and would keep the recomputed tensors as long as the graph exists. packprop
frees them. Both steps read a checkpoint's frame and holders, which its hooks refer to: no public interface
says where it keeps a tensor. It stores recomputed tensors under the number of the pass, or outside of all
passes under a random number of 128 bits, and records in the holder that a tensor was returned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

from packprop.errors import PackpropError

OUTSIDE = 2**64
"""A number that is larger than the numbers of all passes."""

SHOWS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "data")
"""True where PyTorch shows the hooks on a saved tensor; 2.6 does not."""


class _Handle:
    """A key of a tensor that a checkpoint keeps; the holder owns the key."""


class _Kept(NamedTuple):
    """A tensor that a checkpoint returns only once, and the place where it keeps the tensor.

    The node saved a ``holder`` in place of the tensor; the checkpoint's ``frame`` stores it under a ``number``.
    """

    holder: Any
    frame: Any
    number: Any
    value: Tensor


def saved_tensor(node: Any, name: str | int) -> Any:
    """Return a saved tensor by name, like ``node._saved_name``, or by number, like ``node.saved_tensors``."""
    if isinstance(name, int):  # a checkpoint returns all of them together, and each only once
        values, kept = _read(node._raw_saved_tensors, lambda: node.saved_tensors)
    else:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if not _is_kept_elsewhere(raw):
            return getattr(node, f"_saved_{name}")
        values, kept = _read([raw], lambda: [getattr(node, f"_saved_{name}")])
    _put_back(kept)
    return values[name if isinstance(name, int) else 0]


@contextlib.contextmanager
def saved_again(node: Any) -> Iterator[None]:
    """Keep the saved tensors of a node for the pass, although you call the node inside the context."""
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


@contextlib.contextmanager
def explaining_checkpoints() -> Iterator[None]:
    """Explain why a pass through a checkpoint fails in a version of PyTorch that does not show hooks.

    Raises:
        PackpropError: In place of PyTorch's ``CheckpointError``.
    """
    try:
        yield
    except checkpoint.CheckpointError as error:
        if SHOWS_HOOKS:
            raise
        raise PackpropError(
            "A quantity beyond the gradient was asked for.",
            "a part of the model inside torch.utils.checkpoint",
            f"PyTorch {torch.__version__} does not show what a checkpoint keeps, and returns it only once",
            "use PyTorch 2.10 or newer; or call the model without checkpoints",
        ) from error


def keeps_elsewhere(*nodes: Any) -> bool:
    """Tell whether a checkpoint keeps saved tensors of any of the nodes, and recomputes them when read."""
    for node in nodes:
        kind: Any = type(node)
        for name in raw_names(kind):
            raw = getattr(node, name)
            if any(map(_is_kept_elsewhere, raw if isinstance(raw, (tuple, list)) else (raw,))):
                return True
    return False


def _saved_by(node: Any) -> Iterator[tuple[Sequence[Any], Callable[[], Sequence[Any]]]]:
    """Yield all saved values of a node, each with its reader: only the node can read its own outputs."""
    kind: Any = type(node)
    for name in raw_names(kind):
        raw, public = getattr(node, name), name.removeprefix("_raw_")
        if not isinstance(raw, (tuple, list)):
            yield [raw], functools.partial(_one, node, f"_{public}")
        elif public == "saved_tensors":  # of a user's own function
            yield raw, functools.partial(getattr, node, public)
        else:
            yield raw, functools.partial(_unpacked, raw)


@functools.lru_cache(maxsize=1024)
def raw_names(kind: type) -> tuple[str, ...]:
    """Return the names under which a type of node shows the raw form of its saved values."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _one(node: Any, name: str) -> list[Any]:
    return [getattr(node, name)]


def _unpacked(raws: Sequence[Any]) -> list[Any]:
    return [raw.unpack() for raw in raws]


def _is_kept_elsewhere(raw: Any) -> bool:
    return type(getattr(raw, "data", None)).__module__ == checkpoint.__name__


def _read(raws: Sequence[Any], read: Callable[[], Sequence[Any]]) -> tuple[Sequence[Any], list[_Kept]]:
    """Return saved tensors, and records of those that a checkpoint keeps.

    The checkpoint runs again if this pass has read one of them before.
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
            own = getattr(frame, "saved_args", ())  # PyTorch 2.10 keeps them in a node
            given = [raw for raw in own if _is_kept_elsewhere(raw)]
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
    """Return the numbers of the passes that have read a tensor."""
    return {number for number, handle in holder.handles.items() if handle is None}


def _put_back(kept: list[_Kept]) -> None:
    for holder, frame, number, value in kept:
        if not _is_outside(number) and holder.handles.get(number) is None:
            handle = holder.handles[number] = _Handle()
            frame.recomputed[number][handle] = value


def _is_outside(number: Any) -> bool:
    """Tell whether a number stands for a recomputation outside of all passes."""
    return isinstance(number, int) and number >= OUTSIDE


def _drop(frame: Any, number: Any) -> None:
    """Free the tensors that a region has recomputed under a number."""
    for table in (frame.recomputed, frame.is_recomputed, frame.recomp_counter):
        table.pop(number, None)
    for reference in frame.weak_holders:
        holder = reference()
        if holder is not None:
            holder.handles.pop(number, None)


def _frame_of(hook: Any) -> Any:
    """Return the frame of a checkpoint, which its hooks refer to."""
    names, cells = hook.__code__.co_freevars, hook.__closure__ or ()
    found = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    return found["frame"]
