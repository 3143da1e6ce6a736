"""Exchanges between ranks: waiting for each other, and merging of partial results, each by its own monoid."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import MOMENTS, SUM, Moments, Monoid
from packprop.engine.tensors.device import tensor_of
from packprop.errors import PackpropError

BUCKET = 2**24
"""The number of entries that one call sums over ranks."""

Group: TypeAlias = "torch.distributed.ProcessGroup | None"  # quoted: PyTorch may be built without it
"""The ranks that take part; ``None`` for all."""


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Form(NamedTuple):
    """The facts that ranks tell each other about a partial result before they merge it.

    Args:
        monoid: Its monoid.
        shape: Its shape, without the axis that it grows along.
        dtype: Its precision.
        length: Its length along that axis; for moments the number of rows, if that is known.
    """

    monoid: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    length: int | None = None


def merge_over_ranks(
    partial: Mapping[Key, Any],
    monoid_of: Callable[[Key], Monoid],
    *,
    group: Group = None,
    gather: bool = True,
    absent: int | Mapping[Key, int] = 0,
) -> dict[Key, Any]:
    """Merge the partial results of all ranks; every rank of the group must call it.

    Args:
        partial: Partial results of this rank: tensors under ``SUM``, ``Moments`` under ``MOMENTS``, lists of
            tensors under ``CAT``. Ranks may have different ones. They are not changed.
        monoid_of: The monoid of the partial result under a key.
        group: The ranks; ``None`` for all.
        gather: Join results with a row for each sample, in the order of ranks; else each rank keeps its own.
        absent: The number of rows of zeros that this rank adds to results that only other ranks have: its
            number of samples, or a number for each key.

    Returns:
        A partial result under every key that any rank has, the same on all ranks, except rows not gathered.

    Raises:
        PackpropError: On every rank, if partial results under one key do not fit together.
    """
    return dict(merged_in_turn(partial, monoid_of, group=group, gather=gather, absent=absent))


def merged_in_turn(
    partial: Mapping[Key, Any],
    monoid_of: Callable[[Key], Monoid],
    *,
    group: Group = None,
    gather: bool = True,
    absent: int | Mapping[Key, int] = 0,
) -> Iterator[tuple[Key, Any]]:
    """Merge as ``merge_over_ranks`` does, a few results at a time, so that there is no second copy of all."""
    own = {key: _form(monoid_of(key), value) for key, value in partial.items()}
    forms = exchanged((own, absent), group)
    known: dict[Key, list[Form | None]] = {
        key: [each.get(key) for each, _ in forms] for each, _ in forms for key in each
    }
    for key, of_ranks in known.items():
        _require_same(key, of_ranks, gather)
    found = [(key, partial.get(key), of_ranks) for key, of_ranks in known.items()]

    def lacking(key: Key) -> list[int]:
        return [each if isinstance(each, int) else each.get(key, 0) for _, each in forms]

    for bucket in in_buckets(found, lambda each: _entries(each[2]), BUCKET):
        yield from _merged(bucket, monoid_of, group, gather, lacking)


def in_buckets(items: Iterable[Value], entries: Callable[[Value], int], enough: int) -> Iterator[list[Value]]:
    """Yield lists of items, in order: each but the last has ``enough`` entries or more."""
    bucket: list[Value] = []
    total = 0
    for item in items:
        bucket.append(item)
        total += entries(item)
        if total >= enough:
            yield bucket
            bucket, total = [], 0
    if bucket:
        yield bucket


def exchanged(value: Value, group: Group) -> list[Value]:
    """Return the values of all ranks, in their order."""
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group)
    return found


def summed(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Sum tensors over ranks, all of one precision and device in one call; the arguments stay unchanged."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    sums: dict[int, Tensor] = {}
    for (dtype, _), places in kinds.items():
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        torch.distributed.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat, group=group)
        pieces = flat.split([tensors[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            sums[place] = piece.view(tensors[place].shape)
    return [sums[place] for place in range(len(tensors))]


def _form(monoid: Monoid, value: Any) -> Form:
    if monoid is SUM and value is not None:
        return Form(monoid.name, tuple(value.shape), value.dtype)
    if monoid is MOMENTS:
        length = None if isinstance(value.samples, Tensor) else value.samples
        return Form(monoid.name, tuple(value.mean.shape), value.mean.dtype, length)
    if monoid.axis is not None:
        axis, shape = monoid.axis, [*value[0].shape]
        length = sum(piece.shape[axis] for piece in value)
        return Form(monoid.name, (*shape[:axis], *shape[axis + 1 :]), value[0].dtype, length)
    return Form(monoid.name)


def _require_same(key: Hashable, of_ranks: Sequence[Form | None], gather: bool) -> None:
    """Refuse results that cannot be merged, on every rank alike."""
    there = [(rank, form) for rank, form in enumerate(of_ranks) if form is not None]
    grows = there[0][1].length is not None and there[0][1].monoid != MOMENTS.name
    kinds = {form._replace(length=None, shape=form.shape if gather or not grows else ()) for _, form in there}
    if len(kinds) > 1:
        told = "; ".join(
            f"rank {rank}: {form.monoid} of {list(form.shape)}, {form.dtype}" for rank, form in there
        )
        raise PackpropError(
            "Results of several ranks were to be merged.",
            f"the result {key!r}",
            f"its kind, shape or precision differs between ranks ({told})",
            "give every rank the same model and the same extensions, and pad sequences to one length; or "
            "ask for values of each rank's own samples",
        )


def _entries(of_ranks: Sequence[Form | None]) -> int:
    there = [form for form in of_ranks if form is not None]
    return math.prod(there[0].shape) * max(form.length or 1 for form in there)


def _merged(
    bucket: Sequence[tuple[Key, Any, list[Form | None]]],
    monoid_of: Callable[[Key], Monoid],
    group: Group,
    gather: bool,
    lacking: Callable[[Key], list[int]],
) -> Iterator[tuple[Key, Any]]:
    """Merge some results: sums together, moments together, all others one by one."""
    device = _device(bucket, group)
    sums: dict[Key, Tensor] = {}
    moments: dict[Key, Moments] = {}
    numbers: list[int | None] = []
    rank = torch.distributed.get_rank(group)
    for key, value, of_ranks in bucket:
        monoid = monoid_of(key)
        form = next(form for form in of_ranks if form is not None)
        zero_rows = lacking(key)
        lengths = [zero_rows[r] if each is None else each.length for r, each in enumerate(of_ranks)]
        known = [length for length in lengths if length is not None]
        zeros = functools.partial(torch.zeros, dtype=form.dtype, device=device)
        if monoid is SUM and form.dtype is not None:
            sums[key] = zeros(form.shape) if value is None else value
        elif monoid is MOMENTS:
            if value is None:
                value = Moments(zero_rows[rank], zeros(form.shape), zeros(form.shape))
            moments[key] = value
            numbers.append(sum(known) if len(known) == len(lengths) else None)
        elif monoid.axis is not None:
            if value is None:
                value = [zeros((*form.shape[: monoid.axis], zero_rows[rank], *form.shape[monoid.axis :]))]
            yield key, _gathered(value, monoid.axis, known, group) if gather else value
        else:
            there = [each for each in exchanged((value is not None, value), group) if each[0]]
            yield key, functools.reduce(monoid.merge, [value for _, value in there]) if there else None
    yield from zip(sums, summed([*sums.values()], group), strict=True)
    yield from zip(moments, _merge_moments([*moments.values()], numbers, group), strict=True)


def _merge_moments(moments: Sequence[Moments], numbers: Sequence[int | None], group: Group) -> list[Moments]:
    """Merge moments over ranks: each rank shifts its deviations to the mean of all rows, then they add up.

    ``numbers`` has the number of rows of all ranks for each; ``None`` if data decide it.
    """
    means = [each.mean for each in moments]
    counted = [place for place, number in enumerate(numbers) if number is None]
    counts = [tensor_of(moments[place].samples).to(means[place]) for place in counted]
    totals: list[Any] = [*numbers]
    for place, total in zip(counted, summed(counts, group), strict=True):
        totals[place] = total
    shares = [
        each.samples / (total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1))
        for each, total in zip(moments, totals, strict=True)
    ]
    together = summed([mean * share for mean, share in zip(means, shares, strict=True)], group)
    distances = [
        each.deviation + (each.mean - mean).square() * each.samples
        for each, mean in zip(moments, together, strict=True)
    ]
    merged = zip(totals, together, summed(distances, group), strict=True)
    return [Moments(total, mean, deviation) for total, mean, deviation in merged]


def _gathered(pieces: list[Tensor], axis: int, lengths: Sequence[int], group: Group) -> list[Tensor]:
    """Return the pieces of all ranks, in their order; they may be of different lengths."""
    own = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
    longest = max(lengths)
    shape = (*own.shape[:axis], longest, *own.shape[axis + 1 :])
    filled = own.new_zeros(shape)
    filled.narrow(axis, 0, own.shape[axis]).copy_(own)
    found = [torch.empty_like(filled) for _ in lengths]
    given, taken = filled, found
    if own.is_complex():
        given, taken = torch.view_as_real(filled), [torch.view_as_real(each) for each in found]
    torch.distributed.all_gather(taken, given, group)
    return [each.narrow(axis, 0, length) for each, length in zip(found, lengths, strict=True)]


def _device(bucket: Sequence[tuple[Any, Any, Any]], group: Group) -> torch.device:
    """Return the device for zeros in place of missing results: that of other results, or else the group's."""
    for _, value, _ in bucket:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor):
                return tensor.device
    accelerator = torch.accelerator.current_accelerator()
    on_processor = accelerator is None or torch.distributed.get_backend(group) in ("gloo", "mpi")
    return torch.device("cpu") if on_processor or accelerator is None else accelerator


PATIENCE = 600.0
"""Seconds that a rank waits for the others by default."""


class RefusedElsewhere(PackpropError):
    """Raised if another rank has refused its part of a pass; all ranks know, and none waits for this one."""


def arrive(
    group: Group,
    timeout: float,
    asked: str = "Quantities were asked for in a backward pass of several ranks.",
    instead: str = "run the same passes on all ranks, each inside `with backpack(..., ranks=...)` of the same "
    "extensions; a rank without samples runs an empty batch; or allow more time: AllRanks(timeout=...)",
) -> None:
    """Wait until all ranks are at the same place.

    Args:
        group: The ranks.
        timeout: Seconds to wait for the others.
        asked: The call of the user, for messages.
        instead: What to do if some ranks do not come, for messages.

    Raises:
        RefusedElsewhere: If some ranks do not come in time. Only gloo reports this; other backends do not wait.
    """
    if torch.distributed.get_backend(group) != "gloo":
        return
    try:
        torch.distributed.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        raise RefusedElsewhere(
            asked,
            f"rank {torch.distributed.get_rank(group)}, at the beginning",
            f"not all ranks came within {timeout:g} s: one has ended, is late, or does something else "
            f"({str(error).splitlines()[0]})",
            instead,
        ) from error


def require_well(group: Group, failure: str = "") -> None:
    """Wait until every rank has told whether it can continue; ``failure`` is the reason why this one cannot.

    Raises:
        RefusedElsewhere: On every rank, if one cannot continue.
    """
    is_nccl = torch.distributed.get_backend(group) == "nccl"
    failed = torch.tensor(int(bool(failure)), device="cuda" if is_nccl else "cpu")
    torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, group)
    if not failed:
        return
    told = exchanged(failure, group)
    rank = next(rank for rank, each in enumerate(told) if each)
    raise RefusedElsewhere(
        "Quantities were asked for in a backward pass of several ranks.",
        f"rank {rank}",
        f"it has failed in its part of the pass:\n{told[rank]}\n",
        "read the error of that rank",
    )
