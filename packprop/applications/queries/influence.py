"""Inner products of stored gradients with those of queries: within a budget, one reading for each group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import BATCH_SIZE, Batches, Data
from packprop.applications.dataset.given import require_model_and_loss
from packprop.applications.dataset.result import Result
from packprop.applications.dataset.sharded import require_whole_parameters
from packprop.applications.dataset.sources import Samples
from packprop.applications.queries.checks import (
    gradients_in,
    numbers_of_groups,
    queries_without_gradient,
    require_same_model,
    warn_of_empty,
)
from packprop.applications.queries.gradients import QueryGradients
from packprop.applications.queries.refined_search import Ends, RefinedSearch
from packprop.applications.queries.refining import Refinement, Refiner
from packprop.applications.queries.result import Influence
from packprop.applications.queries.vectors import Inverse, joined, vectors_of
from packprop.engine.memory import budget_of, byte_text
from packprop.engine.recording import extended
from packprop.engine.tensors import LossFunction
from packprop.errors import BadInput, PackpropError
from packprop.store.reading import BLOCK, Store
from packprop.store.search import Found, bytes_of_a_row, require_number, summed_products

ASKED = "influence(...) was called."


def influence(
    store: Store | str | Path,
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
    """Find the stored samples whose gradients have extreme inner products with each query's.

    For a stored sample z and a query q these are ``<g_z, g_q>``, or ``<g_z, (F + damping I)^-1 g_q>`` with
    ``curvature`` (influence functions: Koh and Liang 2017; with EKFAC: Grosse et al. 2023). All g are gradients
    of losses that are **summed** over their terms: under cross entropy, of each sample's own loss. F has the
    scale of the loss that you computed it for. If that is a mean over the N samples of the store, ``product /
    N`` (``product / store.terms``, if samples have several terms) is to first order the growth of the loss of q
    if you train again without z. If it is a sum, the product itself is. So samples with large products help the
    query, and those with negative ones harm it.

    A store does not know the values of the model's parameters: pass the model as it was when you wrote the
    store. ``influence`` changes nothing in it. Every process searches for itself.

    Args:
        store: A store of ``BatchGrad`` or ``Projected(BatchGrad(), d)``, or its folder. Queries of a projected
            store are preconditioned first and then projected, so that inner products are right in expectation.
        model: The model, in the mode (train or eval) that you want; you need not extend it.
        loss: As for ``compute``: ``loss(model(inputs), targets)``, or ``None`` if the model computes it.
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
        groups: The group of each row of the store ``[n]``, from 0 on: its class, document or source. The
            products of a query then also add up over each group, ``Influence.groups`` ``[q, g]``: to first
            order, the effect of leaving the whole group out. This reads the store once more.
        quantity: The gradients of the store, if it has ``"grad_batch"`` and ``"grad_batch_projected"``; the
            first by default.
        memory: Bytes for current rows and gradients of queries; ``None``: any number. If they do not fit
            together, packprop takes queries in groups, and reads the store once for each. It does not count the
            model, its activations and the curvature with its inverse, nor, if rows are projected, the current
            block of a random matrix, of about 20 MiB.
        batch_size: Queries in a batch; by default 128, or what fits. Not for data that come in batches.
        device: The device of batches; by default that of the model's parameters.

    Raises:
        BadInput: For a store without gradients or of another model, curvature that lacks a parameter, does not
            fit or is not positive, missing damping, a budget that is too small, queries without any gradient,
            data to refine by that packprop can read only once, a checkpoint of something else.
        PackpropError: For gradients that are not finite; for a Hessian to refine by that is indefinite.
    """
    require_number(ASKED, k)
    require_model_and_loss(ASKED, model, loss, "multiplied")
    require_whole_parameters(ASKED, model)
    opened = store if isinstance(store, Store) else Store(store)
    name = gradients_in(ASKED, opened, quantity)
    arrays = opened.arrays(name)
    require_same_model(ASKED, opened, model)
    _require_real(arrays)
    inverse = Inverse(curvature, damping, factored, refine)
    budget = budget_of(memory) or sys.maxsize
    place = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    gradients, refiner = vectors_of(ASKED, model, loss, arrays, inverse, budget, place)
    most = _most_queries(gradients, arrays, budget, refiner)
    batches = Batches(ASKED, queries, batch_size, whole=loss is None)
    if batch_size is None and isinstance(batches.source, Samples) and most < BATCH_SIZE:
        batches = Batches(ASKED, queries, most, whole=loss is None)
    numbers = None if groups is None else numbers_of_groups(ASKED, groups, opened.samples)
    found: list[Ends] = []
    empty: list[int] = []
    at_once = min(BLOCK // 2, budget // 2)

    def find(rows: dict[str, Tensor]) -> Ends:
        largest, smallest = opened.extremes(name, rows, k, memory=at_once)
        sums = None if numbers is None else summed_products(ASKED, arrays, rows, numbers, at_once)
        return largest, smallest, sums

    with contextlib.ExitStack() as stack:
        for module in gradients.modules:
            stack.enter_context(extended(module))
        refined = None
        if refiner is not None:
            asks = [k, None if numbers is None else numbers.tolist()]
            refined = RefinedSearch(ASKED, opened, name, find, asks, gradients, refiner, most)
            stack.enter_context(refined.kept(model, loss))
        for rows in _groups(batches, gradients, most):
            done = sum(len(each[0].products) for each in found)
            empty += [done + place for place in queries_without_gradient(rows)]
            found.append(find(rows) if refined is None else refined(rows))
    if not found:
        raise BadInput(ASKED, "queries", "no samples were in any batch", "give at least one query")
    warn_of_empty(ASKED, empty, sum(len(each[0].products) for each in found))
    largest, smallest = (
        Found(*(torch.cat(parts) for parts in zip(*side, strict=True)))
        for side in zip(*(ends[:2] for ends in found), strict=True)
    )
    sums = [ends[2] for ends in found if ends[2] is not None]
    return Influence(
        largest,
        smallest,
        samples=opened.samples,
        terms=opened.terms,
        quantity=name,
        curvature=gradients.curvature,
        damping=damping,
        readings=len(found),
        refined_by=None if refiner is None else refiner.matrix,
        residuals=None if refiner is None else torch.cat(refiner.residuals),
        groups=torch.cat(sums) if sums else None,
        data_readings=0 if refined is None else refined.readings,
    )


def _groups(batches: Batches, gradients: QueryGradients, most: int) -> Iterator[dict[str, Tensor]]:
    """Return rows of queries ``[q, ...]`` by array, of as many batches as fit."""
    waiting: list[dict[str, Tensor]] = []
    number = 0
    for batch in batches:
        with batches.explained():
            count, rows = gradients.of(batch)
        if count > most:
            what = f"a batch of {count} queries"
            raise _too_small(what, f"{most} fit at once", f"give more, or batches of at most {most}")
        if number and number + count > most:
            yield joined(waiting)
            waiting, number = [], 0
        if count:
            waiting.append(rows)
            number += count
    if waiting:
        yield joined(waiting)


def _most_queries(
    gradients: QueryGradients, arrays: Mapping[str, Any], budget: int, refiner: Refiner | None
) -> int:
    """Return how many queries fit into a quarter of the budget, while they are made in another quarter.

    The second quarter serves to join them. The other half is for rows of the store. Refined queries have three
    quarters before rows are read; the last one is for vectors in a batch of data.

    Raises:
        BadInput: If it is none, or no row fits.
    """
    row = bytes_of_a_row(arrays, 1)
    if row > budget // 2:
        raise _too_small(
            "a row of the store",
            f"it takes {byte_text(row)}, which is more than half of it",
            f"give at least {byte_text(2 * row)}",
        )
    query = max(gradients.kept_bytes, gradients.passing_bytes)
    if query > budget // 4:
        raise _too_small(
            "the gradient of one query",
            f"while it is made it takes {byte_text(query)}, which is more than a quarter of it",
            f"give at least {byte_text(4 * query)}",
        )
    if refiner is None:
        return budget // 4 // query
    if refiner.query_bytes > budget // 4 * 3:
        raise _too_small(
            "one query that is refined",
            f"it takes {byte_text(refiner.query_bytes)}, which is more than three quarters of it",
            f"give at least {byte_text(-(-refiner.query_bytes // 3) * 4)}",
        )
    return min(budget // 4 // query, budget // 4 * 3 // refiner.query_bytes)


def _too_small(where: str, why: str, instead: str) -> PackpropError:
    return BadInput(ASKED, f"the budget of memory, and {where}", why, instead)


def _require_real(arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if array.dtype.is_complex:
            raise BadInput(
                ASKED,
                f"parameter {name!r}, whose rows are {array.dtype}",
                "inner products of complex rows have no order",
                "give a model with real parameters",
            )
