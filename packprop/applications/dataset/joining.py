"""Restoring the sums of a run: those of one rank, or of several if the number of ranks has changed."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch

from packprop.applications.dataset.saved import ASKED
from packprop.applications.dataset.sources import Samples
from packprop.applications.dataset.state import MergedResults, counted_together
from packprop.applications.dataset.sums import merged_with
from packprop.engine.tensors import moved
from packprop.errors import BadInput


def require_divided(source: Any, before: int, now: int) -> None:
    """Refuse data that packprop does not divide among ranks, after the number of ranks has changed.

    Raises:
        BadInput: If each rank has batches of its own.
    """
    if not isinstance(source, Samples):
        raise BadInput(
            ASKED,
            "the checkpoint",
            f"it was written by {before} ranks, each with batches of its own; there are {now} now",
            f"continue with {before} ranks; any number of ranks may continue a run over a Dataset or a pair of "
            "tensors, which packprop divides among them",
        )


def take_up(
    results: MergedResults, own: dict[str, Any] | None, shared: dict[str, Any], device: torch.device | str
) -> None:
    """Restore the state of one rank, or, if it has none, what all ranks share."""
    if own is None:
        results.restore_what_is_shared(moved(shared, device))
    else:
        results.restore(moved({**own["results"], "rotations": shared["rotations"]}, device))


def take_up_others(
    results: MergedResults, others: Iterable[dict[str, Any]], device: torch.device | str
) -> None:
    """Merge the states of other ranks, in their order, into the results of the first one."""
    for own in others:
        other = MergedResults(results.extensions)
        take_up(other, own, own["results"], device)
        _join(results, other)


def _join(into: MergedResults, other: MergedResults) -> None:
    """Merge the results of another rank into those of one; growing results are then in the order of batches."""
    numbers = [number for number, _ in (*into.batches, *other.batches)]
    for key, value in other.partial.items():
        before = into.partial.get(key)
        if before is None:
            into.partial[key] = value
        elif into.grows(key):
            pieces = sorted(zip(numbers, [*before, *value], strict=True), key=itemgetter(0))
            into.partial[key] = [piece for _, piece in pieces]
        else:
            into.partial[key] = merged_with(into.monoid_of(key), before, value)
    vars(into).update(vars(counted_together([into.counts, other.counts])))
