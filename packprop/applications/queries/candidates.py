"""The samples that queries are compared with: rows of a store, or data whose gradients are computed anew.

# NOTE [Samples without a store]
A store of gradients is as large as the data times the parameters. Without one, packprop computes the gradients
of the samples while it reads the data, multiplies them with the vectors of the current queries, and keeps the
products alone. It reads the data once for each group of queries, so its time grows with the number of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.code import package_of
from packprop.applications.dataset.digests import digest
from packprop.applications.dataset.given import Objective
from packprop.applications.dataset.identity import BATCHES, identity_of, keep_generators
from packprop.applications.dataset.messages import described, no_samples
from packprop.applications.dataset.sources import samplers_of
from packprop.applications.dataset.stored import of_summed_loss
from packprop.applications.dataset.stream import is_empty
from packprop.applications.queries.checks import gradients_in, numbers_of_groups, require_same_model
from packprop.applications.queries.gradients import PassesApart
from packprop.applications.queries.vectors import rows_like
from packprop.engine.algebra import CAT, along_each
from packprop.engine.memory import byte_text
from packprop.engine.tensors import random_numbers_from, random_states, tensor_of
from packprop.errors import BadInput, PackpropError
from packprop.store.reading import BLOCK, Store
from packprop.store.schema import checksum_of
from packprop.store.search import Found, bytes_of_a_row, extremes_and_sums, products_of_rows
from packprop.types import GRADIENT, Extension, Row

SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that change the order of the samples, as do their subclasses."""


class Ends(NamedTuple):
    """The result of a search.

    Args:
        largest: Samples with the largest products.
        smallest: Samples with the smallest products.
        groups: Products added up over groups ``[q, g]``, if ``Wanted.groups`` asks for them.
        samples: The number of all samples.
        terms: The sum of the divisors of their batches' losses.
    """

    largest: Found
    smallest: Found
    groups: Tensor | None
    samples: int
    terms: float


class Wanted(NamedTuple):
    """The search for each query.

    Args:
        k: The number of samples at each end.
        groups: The group of each sample; ``None`` for no sums over groups.
    """

    k: int
    groups: Any = None

    def facts(self) -> list[Any]:
        """Return this as a value of JSON."""
        return [self.k, None if self.groups is None else tensor_of(self.groups).tolist()]


class StoredSamples:
    """Samples whose gradients are in a store.

    Args:
        asked: The call of the user, for messages.
        store: The store.
        model: The model of the queries.
        quantity: The gradients of the store; ``None`` for the first.
        wanted: What to find.
        budget: Bytes for current rows and vectors.
    """

    def __init__(
        self, asked: str, store: Store, model: nn.Module, quantity: str | None, wanted: Wanted, budget: int
    ) -> None:
        self._asked, self._store, self._wanted = asked, store, wanted
        self.quantity = gradients_in(asked, store, quantity)
        self.arrays = store.arrays(self.quantity)
        require_same_model(asked, store, model)
        groups = wanted.groups
        self._numbers = None if groups is None else numbers_of_groups(asked, groups, store.samples)
        self._at_once = min(BLOCK // 2, budget // 2)

    def room(self, budget: int) -> int:
        """Return the bytes for vectors of queries: a quarter of the budget.

        Another quarter is for the work on a batch of queries, and half is for current rows.

        Raises:
            BadInput: If a row does not fit into half of the budget.
        """
        row = bytes_of_a_row(self.arrays, 1)
        if row > budget // 2:
            takes = f"it takes {byte_text(row)}"
            raise too_large(self._asked, "a row of the store", takes, "half of it", 2 * row)
        return budget // 4

    def facts(self) -> dict[str, Any]:
        """Describe the search, as a value of JSON."""
        return {
            "quantity": self.quantity,
            "samples": self._store.samples,
            "identifiers": digest(self._store.identifiers),
            "rows": checksum_of([array.checksums() for array in self.arrays.values()]),
            "asked for": self._wanted.facts(),
        }

    def find(self, rows: dict[str, Tensor]) -> Ends:
        """Search the store for some queries, given their vectors ``[q, ...]`` by array."""
        store = self._store
        blocks = products_of_rows(self._asked, self.arrays, rows, self._at_once)
        found, sums = extremes_and_sums(blocks, self._wanted.k, groups=self._numbers)
        largest, smallest = store.identified(found)
        return Ends(largest, smallest, sums, store.samples, store.terms)


class AlongVectors(Extension):
    """Inner products of gradients of samples with some vectors, ``along_vectors``: ``[n, q]``.

    Args:
        vectors: The vectors ``[q, *p]`` by parameter.
    """

    savefield = "along_vectors"
    rows: tuple[Row, ...] = ()

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        statistic = functools.partial(along_each, directions=vectors)
        self.rows = (Row(GRADIENT, statistic, over_n=CAT[0], of_parameter=True, condenses=True),)


class ReadSamples:
    """Samples of data, whose gradients are computed anew in each search; see NOTE [Samples without a store].

    Args:
        objective: The model and the loss.
        batches: The data.
        wanted: What to find.

    Raises:
        BadInput: For a loader that shuffles, or groups that are no whole numbers from 0 on.
    """

    quantity = "gradients"

    def __init__(self, objective: Objective, batches: Batches, wanted: Wanted) -> None:
        self._objective, self._batches, self._wanted = objective, batches, wanted
        self._asked, self.arrays = objective.asked, rows_like(objective)
        self._readings, self._first, self._draws = 0, (0, ""), random_states()
        self._numbers = None
        if wanted.groups is not None:
            size = tensor_of(wanted.groups).numel()  # the data tell later how many samples there are
            self._numbers = numbers_of_groups(self._asked, wanted.groups, size, "they are for")
        batches.watched = True
        keep_generators(objective.model, objective.loss, batches)
        _require_order(self._asked, batches.source.data)

    def room(self, budget: int) -> int:
        """Return the bytes for vectors of queries: a third of the budget.

        Another third is for the work on a batch of queries, and the last for copies of vectors on the device.
        """
        return budget // 3

    def facts(self) -> dict[str, Any]:
        """Describe the search, as a value of JSON."""
        known = identity_of(self._objective.model, self._objective.loss, [], self._batches)
        return {"data": known["data"], BATCHES: known[BATCHES], "asked for": self._wanted.facts()}

    def find(self, rows: dict[str, Tensor]) -> Ends:
        """Read the data once, and search them for some queries, given their vectors ``[q, *p]`` by parameter.

        Raises:
            BadInput: If the data hold no sample, or not one for each entry of ``groups``; if packprop cannot
                read them again, or if they differ in a later reading.
            PackpropError: If a product is not finite.
        """
        samples, terms = 0, 0.0

        def blocks() -> Iterator[tuple[int, Tensor]]:
            nonlocal samples, terms
            for products, of_batch in self._products(rows):
                yield samples, products
                samples += products.shape[1]
                terms += of_batch

        found, sums = extremes_and_sums(blocks(), self._wanted.k, groups=self._numbers)
        self._end_reading(samples)
        if self._numbers is not None:
            numbers_of_groups(self._asked, self._numbers, samples, "there are")
        largest, smallest = (Found(products, places, places) for places, products in found)
        return Ends(largest, smallest, sums, samples, terms)

    def _products(self, rows: dict[str, Tensor]) -> Iterator[tuple[Tensor, float]]:
        """Yield the products ``[q, n]`` of each batch, and the divisor of its loss."""
        batches, device = self._batches, self._objective.device
        extension = AlongVectors({name: each.to(device) for name, each in rows.items()})
        with random_numbers_from(self._draws), batches.drawing_apart():  # the same in each reading
            if self._readings:
                why = "the queries do not fit into memory together, so data are read again"
                instead = "give more memory, fewer queries, or a data loader, a Dataset or a pair of tensors"
                batches.require_rereadable("data", why, instead)
                batches.begin_again()
            yield from products_of(self._objective, batches, extension)

    def _end_reading(self, samples: int) -> None:
        """Refuse data without samples, and data that differ from those of the first reading."""
        if not samples:
            raise no_samples(self._asked, "data")
        read = samples, self._batches.digest
        self._readings += 1
        if self._readings == 1:
            self._first = read
        elif read != self._first:
            raise BadInput(
                self._asked,
                f"the data, which were read {self._readings} times",
                "their batches differ from those of the first reading, or come in another order",
                "read them without shuffling, or give more memory, so that one reading is enough",
            )


Candidates = StoredSamples | ReadSamples
"""Samples that queries are compared with."""


def _require_order(asked: str, data: Any) -> None:
    """Refuse a loader with a sampler of a package, or a subclass of PyTorch's, that may change the order.

    Raises:
        BadInput: With the name of the sampler.
    """
    for sampler in samplers_of(data):
        kept = getattr(sampler, "shuffle", True) is False or isinstance(
            sampler, (SequentialSampler, BatchSampler)
        )
        is_known = isinstance(sampler, SHUFFLING) or package_of(type(sampler)) is not None
        if isinstance(sampler, Sampler) and is_known and not kept:
            raise BadInput(
                asked,
                f"data {described(data)}, which shuffle: {type(sampler).__name__}",
                "packprop names samples by their place in the data, and this sampler changes the places",
                "give a loader with shuffle=False, or the data set itself",
            )


def products_of(objective: Objective, batches: Batches, extension: Extension) -> Iterator[tuple[Tensor, float]]:
    """Yield the products ``[q, n, ...]`` of each batch that has samples, and the divisor of its loss.

    Products are summed over parameters. They have the scale of a loss that is summed over its terms.

    Args:
        objective: The model and the loss.
        batches: The data.
        extension: The extension of the products ``[n, ..., q]``.

    Raises:
        PackpropError: If a product is not finite.
    """
    run, done = PassesApart(objective, [extension]), 0
    for batch in batches:
        if is_empty(batch):
            continue
        with batches.explained():
            found = run(batch)
            terms = float(found.terms)
            products = [
                of_summed_loss(extension, values, dtype, found.samples, terms)
                for dtype, results in found.rows.values()
                for values in results.values()
            ]
            total = torch.stack([each.to("cpu", torch.float64) for each in products]).sum(0)
        wrong = (~total.isfinite()).nonzero().tolist()
        if wrong:
            raise PackpropError(
                objective.asked,
                f"query {wrong[0][-1]} and sample {done + wrong[0][0]} of the data",
                f"the inner product of their gradients is {total[tuple(wrong[0])].item()}",
                "look at the loss of each sample, and leave out those that are not finite",
            )
        yield total.movedim(-1, 0), terms
        done += found.samples


def too_small(asked: str, where: str, why: str, instead: str) -> PackpropError:
    """Return the error for a budget that is too small for some part of the work."""
    return BadInput(asked, f"the budget of memory, and {where}", why, instead)


def too_large(asked: str, where: str, takes: str, part: str, enough: int) -> PackpropError:
    """Return the error for something that takes more than its part of the budget; ``enough`` bytes suffice."""
    return too_small(asked, where, f"{takes}, which is more than {part}", f"give at least {byte_text(enough)}")
