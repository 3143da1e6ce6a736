"""Influence added up over checkpoints of training."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import Batches, Data
from packprop.applications.dataset.result import Result
from packprop.applications.dataset.sources import Given
from packprop.applications.queries.checks import numbers_of_groups
from packprop.applications.queries.influence import influence
from packprop.applications.queries.result import Influence
from packprop.engine.tensors import LossFunction
from packprop.errors import BadInput, require_number
from packprop.store.reading import Store
from packprop.store.search import Found

ASKED = "tracin(...) was called."


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A moment of training: the values of a model, and the gradients of the samples at that moment.

    Args:
        store: The store that you wrote with these values, or its folder.
        state: The values, from ``model.state_dict()``. It shares memory with the model, and further training
            changes it: keep a copy, ``copy.deepcopy(model.state_dict())``, or load what ``torch.save`` wrote.
        rate: The factor on products: the learning rate, times the number of steps that the checkpoint stands
            for. Leave it at 1 if ``curvature`` has the learning rate, as ``optimizer_curvature`` does.
        curvature: As for ``influence``: ``optimizer_curvature`` at that moment, for steps of AdamW.
        damping: As for ``influence``.
    """

    store: Store | str | Path
    state: Mapping[str, Any]
    rate: float = 1.0
    curvature: Result | Mapping[str, Any] | str | Path | None = None
    damping: float | None = None


def tracin(
    checkpoints: Sequence[Checkpoint],
    model: nn.Module,
    loss: LossFunction | None,
    queries: Data,
    *,
    k: int = 10,
    groups: Tensor | Sequence[int] | None = None,
    quantity: str | None = None,
    memory: int | str | None = "500MiB",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> Influence:
    """Find the samples whose steps lowered, or raised, each query's loss most during training.

    The products are ``sum_t rate_t <g_z, D_t^-1 g_q>``, with gradients at checkpoint t and its curvature D
    (TracIn: Pruthi et al. 2020; under the second moments of Adam: Xia et al. 2024). To first order this is the
    fall of the loss of q by all steps on z, if each of them is on z alone. ``tracin`` holds ``8 * q * n`` bytes
    of products for q queries and n samples.

    Args:
        checkpoints: At least one; their stores have the same samples in the same order.
        model: The model; it stays as it is, and a copy takes the values of the checkpoints.
        loss: As for ``influence``.
        queries: As for ``influence``; packprop reads them once for each checkpoint.
        k: The number of samples at each end.
        groups: As for ``influence``.
        quantity: As for ``influence``.
        memory: As for ``influence``; it does not count the products of all samples.
        batch_size: As for ``influence``.
        device: As for ``influence``.

    Raises:
        BadInput: For no checkpoints, values that do not fit the model, a rate that is no number, stores of
            different samples, queries that packprop can read only once, or that come in another order when it
            reads them again; and as ``influence`` does.
        PackpropError: As ``influence`` does.
    """
    given = [*checkpoints]
    require_number(ASKED, "k", k, "number of samples")
    stores = [each.store if isinstance(each.store, Store) else Store(each.store) for each in given]
    _require_fitting(given, stores)
    numbers = None if groups is None else numbers_of_groups(ASKED, groups, stores[0].samples)
    if len(given) > 1:
        batches = Batches(ASKED, queries, batch_size, whole=loss is None)
        batches.require_rereadable("queries", f"{len(given)} checkpoints read them")
        if isinstance(batches.source, Given):
            queries = _SameBatches(batches)
    moment = copy.deepcopy(model)
    each_alone = torch.arange(stores[0].samples, device="cpu")
    sums, found = torch.zeros((), device="cpu"), list[Influence]()
    for checkpoint, store in zip(given, stores, strict=True):
        _load(moment, checkpoint.state, len(found))
        options: dict[str, Any] = {"curvature": checkpoint.curvature, "damping": checkpoint.damping}
        options |= {"quantity": quantity, "memory": memory, "batch_size": batch_size, "device": device}
        moments = influence(store, moment, loss, queries, k=1, groups=each_alone, **options)
        assert moments.groups is not None
        sums = sums + checkpoint.rate * moments.groups
        found.append(dataclasses.replace(moments, groups=None))
    rows = [sums.topk(min(k, len(each_alone)), dim=1, largest=largest) for largest in (True, False)]
    largest, smallest = (Found(values, stores[0].identifiers[places], places) for values, places in rows)
    by_group = None
    if numbers is not None:
        by_group = sums.new_zeros(len(sums), int(numbers.max()) + 1).index_add_(1, numbers, sums)
    return dataclasses.replace(
        found[0],
        largest=largest,
        smallest=smallest,
        readings=sum(each.readings for each in found),
        groups=by_group,
        checkpoints=len(found),
    )


class _SameBatches:
    """Batches of a loader, the same in each reading: products of different queries are never added up."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._digest = batches, ""
        batches.watched = True

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches
        if self._digest:
            batches.begin_again()
        for _ in batches:
            yield batches.current
        if self._digest not in ("", batches.digest):
            why = "another reading, for another checkpoint, gave other batches, or gave them in another order"
            raise BadInput(ASKED, "queries", why, "read them without shuffling, or give a list of batches")
        self._digest = batches.digest


def _require_fitting(checkpoints: Sequence[Checkpoint], stores: Sequence[Store]) -> None:
    """Refuse an empty list of checkpoints, rates that are no numbers, and stores of different samples."""
    if not checkpoints:
        why = "there is nothing to add up"
        raise BadInput(ASKED, "checkpoints", why, "give at least one packprop.Checkpoint")
    for place, (checkpoint, store) in enumerate(zip(checkpoints, stores, strict=True)):
        rate = checkpoint.rate
        if not isinstance(rate, Real) or isinstance(rate, bool) or not math.isfinite(rate):
            raise BadInput(
                ASKED, f"checkpoint {place}, rate={rate!r}", "it is no number", "give the learning rate"
            )
        if not torch.equal(store.identifiers, stores[0].identifiers):
            raise BadInput(
                ASKED,
                f"checkpoint {place}, with the store {str(store.folder)!r}",
                "its samples, or their order, are not those of the first checkpoint",
                "write all stores over the same data, without shuffling",
            )


def _load(model: nn.Module, state: Mapping[str, Any], place: int) -> None:
    """Load the values of a checkpoint into the model."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise BadInput(
            ASKED,
            f"checkpoint {place}, state",
            f"the model cannot take these values: {' '.join(str(error).split())}",
            "give what model.state_dict() was at that moment",
        ) from error
