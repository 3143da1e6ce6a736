"""Inner products of gradients of samples with those of queries, for groups of queries that fit into memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import Batches, Data
from packprop.applications.dataset.given import Objective, objective_of
from packprop.applications.dataset.messages import no_samples
from packprop.applications.dataset.result import Result
from packprop.applications.dataset.sources import BATCH_SIZE, Samples
from packprop.applications.queries.candidates import (
    Candidates,
    Ends,
    ReadSamples,
    StoredSamples,
    Wanted,
    too_large,
    too_small,
)
from packprop.applications.queries.checks import queries_without_gradient, warn_of_empty
from packprop.applications.queries.gradients import QueryGradients
from packprop.applications.queries.refined_search import RefinedSearch
from packprop.applications.queries.refining import Refinement, Refiner
from packprop.applications.queries.result import Influence
from packprop.applications.queries.vectors import Inverse, joined, vectors_of
from packprop.engine.memory import budget_of, byte_text
from packprop.engine.recording import extended
from packprop.engine.tensors import LossFunction
from packprop.errors import BadInput, require_number
from packprop.store.reading import Store
from packprop.store.search import Found

ASKED = "influence(...) was called."


def influence(
    store: Store | str | Path | Data,
    model: nn.Module,
    loss: LossFunction | None,
    queries: Data,
    *,
    curvature: Result | Mapping[str, Any] | str | Path | None = None,
    damping: float | None = None,
    factored: bool = False,
    refine: Data | Refinement | None = None,
    k: int = 10,
    groups: Tensor | Sequence[int] | None = None,
    quantity: str | None = None,
    memory: int | str | None = "500MiB",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> Influence:
    """Find the samples whose gradients have extreme inner products with each query's.

    The product of a sample z and a query q is ``<g_z, g_q>``, or ``<g_z, (F + damping I)^-1 g_q>`` with
    ``curvature`` (influence functions: Koh and Liang 2017; with EKFAC: Grosse et al. 2023). All g are gradients
    of losses that are **summed** over their terms: under cross entropy, of each sample's own loss. F has the
    scale of the loss that you computed it for. Suppose that you train again without sample z. To first order,
    the loss of q then grows by ``product / N`` if F belongs to a mean over all N samples; take ``product /
    store.terms`` if samples have several terms. If F belongs to a sum, it grows by ``product``. So samples with
    large products help the query, and those with negative products harm it.

    A store does not know the values of the model's parameters: pass the model as it was when you wrote the
    store. ``influence`` does not change the store. Each process searches by itself.

    Args:
        store: A store of ``BatchGrad`` or ``Projected(BatchGrad(), d)``, or its folder. Queries of a projected
            store are preconditioned first and then projected, so that inner products are right in expectation.
            Or the data themselves, in any form that ``compute`` takes: packprop then computes the gradients of
            the samples for each group of queries, and keeps none.
        model: The model, in the mode (train or eval) that you want; you need not extend it.
        loss: As for ``compute``: ``loss(model(inputs), targets)``, or ``None`` if the model computes it. It may
            train no parameters of its own.
        queries: Data of any form that ``compute`` takes: a pair of tensors, a ``Dataset``, batches.
        curvature: The preconditioner of the queries' gradients: a ``Result`` of ``compute`` that holds one
            curvature, the file of one, or an entry of a ``Result``, ``result["ekfac"]``: a block for each
            parameter, which is a diagonal ``[*p]``, a list of Kronecker factors or a ``kronecker.Eigen``.
        damping: Added to each block, in units of the curvature; required with ``curvature``. Inverses are
            exact: see NOTE [Which inverse] (``applications/queries/preconditioning.py``).
        factored: Lets two factors share the damping, as in Martens and Grosse (2015), 6.3.
        refine: The data that you trained the model on, or a ``packprop.Refinement`` with them and with options.
            It multiplies queries by the inverse of the damped GGN of all parameters together, by conjugate
            gradients, with ``curvature`` as the preconditioner, if you give it; all queries of a group at once.
            Each step reads the data once. ``damping`` is required.
        k: The number of samples at each end; fewer if there are no more.
        groups: The group of each sample ``[n]``, a whole number from 0 on: its class, document or source.
            packprop then also sums the products of a query over each group, ``Influence.groups`` ``[q, g]``: to
            first order, the effect of leaving the whole group out.
        quantity: The gradients of a store, if it has ``"grad_batch"`` and ``"grad_batch_projected"``; the
            first by default.
        memory: Bytes for current rows and gradients of queries; ``None`` for no limit. If they do not fit
            together, packprop takes queries in groups, and reads the store or the data once for each. The limit
            does not count the model, its activations and the curvature with its inverse, nor, if rows are
            projected, the current block of a random matrix, of about 20 MiB.
        batch_size: Queries, and samples of data, in a batch, 128 by default; packprop takes fewer queries if
            ``memory`` holds fewer. Not for data that come in batches.
        device: The device of batches; by default that of the model's parameters.

    Raises:
        BadInput: For a store without gradients or of another model, curvature that lacks a parameter, does not
            fit or is not positive, missing damping, a budget that is too small, queries without any gradient,
            data that packprop cannot read again, or that differ in a later reading, a checkpoint of another
            call.
        PackpropError: For gradients that are not finite; for a Hessian to refine by that is indefinite.
    """
    require_number(ASKED, "k", k, "number of samples")
    objective = objective_of(ASKED, model, loss, device)
    inverse = Inverse(curvature, damping, factored, refine)
    budget = budget_of(memory) or sys.maxsize
    candidates = _candidates(objective, store, Wanted(k, groups), quantity, budget, batch_size)
    gradients, refiner = vectors_of(objective, candidates.arrays, inverse, budget)
    most = _most_queries(gradients, candidates, budget, refiner)
    batches = objective.batches(queries, batch_size)
    if isinstance(batches.source, Samples) and most < (batch_size or BATCH_SIZE):
        batches = objective.batches(queries, most)
    found: list[Ends] = []
    empty: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(extended(*objective.modules))
        refined = None
        if refiner is not None:
            refined = RefinedSearch(objective, candidates, gradients, refiner, most)
            stack.enter_context(refined.kept())
        for rows in _groups(batches, gradients, most):
            done = sum(len(each.largest.products) for each in found)
            empty += [done + place for place in queries_without_gradient(rows)]
            found.append(candidates.find(rows) if refined is None else refined(rows))
    if not found:
        raise no_samples(ASKED, "queries")
    warn_of_empty(ASKED, empty, sum(len(each.largest.products) for each in found))
    largest, smallest = (
        Found(*(torch.cat(parts) for parts in zip(*side, strict=True)))
        for side in zip(*((ends.largest, ends.smallest) for ends in found), strict=True)
    )
    sums = [ends.groups for ends in found if ends.groups is not None]
    return Influence(
        largest,
        smallest,
        samples=found[0].samples,
        terms=found[0].terms,
        quantity=candidates.quantity,
        curvature=gradients.curvature,
        damping=damping,
        readings=len(found),
        refined_by=None if refiner is None else refiner.matrix,
        residuals=None if refiner is None else torch.cat(refiner.residuals),
        groups=torch.cat(sums) if sums else None,
        data_readings=0 if refined is None else refined.readings,
    )


def _candidates(
    objective: Objective, given: Any, wanted: Wanted, quantity: str | None, budget: int, batch_size: int | None
) -> Candidates:
    """Return the samples that queries are compared with: those of a store, or of data."""
    if isinstance(given, (Store, str, Path)):
        store = given if isinstance(given, Store) else Store(given)
        return StoredSamples(ASKED, store, objective.model, quantity, wanted, budget)
    if quantity is not None:
        why = "only a store has several kinds of gradients"
        raise BadInput(ASKED, f"quantity={quantity!r} with data", why, "leave it out, or give a store")
    return ReadSamples(objective, objective.batches(given, batch_size), wanted)


def _groups(batches: Batches, gradients: QueryGradients, most: int) -> Iterator[dict[str, Tensor]]:
    """Yield groups of queries, each of as many batches as fit: rows ``[q, ...]`` by array."""
    waiting: list[dict[str, Tensor]] = []
    number = 0
    for batch in batches:
        with batches.explained():
            count, rows = gradients.of(batch)
        if count > most:
            what = f"a batch of {count} queries"
            raise too_small(ASKED, what, f"{most} fit at once", f"give more, or batches of at most {most}")
        if number and number + count > most:
            yield joined(waiting)
            waiting, number = [], 0
        if count:
            waiting.append(rows)
            number += count
    if waiting:
        yield joined(waiting)


def _most_queries(
    gradients: QueryGradients, candidates: Candidates, budget: int, refiner: Refiner | None
) -> int:
    """Return the number of queries that fit into their part of the budget; another part is for computing them.

    Refining is over before the search, so it takes three quarters; the last is for vectors in a batch of data.

    Raises:
        BadInput: If no query fits, or no row of a store.
    """
    room = candidates.room(budget)
    query = max(gradients.kept_bytes, gradients.passing_bytes)
    if query > room:
        takes, part = f"its computation takes {byte_text(query)}", f"its part, {byte_text(room)}"
        raise too_large(ASKED, "the gradient of one query", takes, part, -(-query * budget // room))
    if refiner is None:
        return room // query
    if refiner.query_bytes > budget // 4 * 3:
        takes, enough = f"it takes {byte_text(refiner.query_bytes)}", -(-refiner.query_bytes // 3) * 4
        raise too_large(ASKED, "one query that is refined", takes, "three quarters of it", enough)
    return min(room // query, budget // 4 * 3 // refiner.query_bytes)
