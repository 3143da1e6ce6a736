"""Inner products of gradients of single tokens with those of queries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import Data
from packprop.applications.dataset.given import Objective, objective_of
from packprop.applications.dataset.messages import no_samples
from packprop.applications.dataset.result import Result
from packprop.applications.queries.candidates import products_of
from packprop.applications.queries.checks import queries_without_gradient, warn_of_empty
from packprop.applications.queries.refining import Refinement
from packprop.applications.queries.vectors import Inverse, joined, rows_like, vectors_of
from packprop.engine.algebra import ADD_IN_PLACE, CAT, token_along
from packprop.engine.memory import budget_of, byte_text
from packprop.engine.recording import extended
from packprop.engine.tensors import LossFunction
from packprop.errors import BadInput
from packprop.types import GRADIENT_BY_TOKEN, Extension, Row

ASKED = "token_influence(...) was called."


class AlongQueries(Extension):
    """Inner products of gradients of tokens with vectors of queries, ``along_queries``: ``[n, t, q]``.

    Args:
        vectors: The vectors of the queries ``[q, *p]`` by parameter.
    """

    savefield = "along_queries"
    rows: tuple[Row, ...] = ()

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        statistic = functools.partial(token_along, directions=vectors)
        row = Row(GRADIENT_BY_TOKEN, statistic, CAT[1], ADD_IN_PLACE, of_parameter=True, condenses=True)
        self.rows = (row,)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        """Move samples before tokens."""
        products: Tensor = values[0]
        return products.transpose(0, 1)


def token_influence(
    model: nn.Module,
    loss: LossFunction | None,
    data: Data,
    queries: Data,
    *,
    curvature: Result | Mapping[str, Any] | str | Path | None = None,
    damping: float | None = None,
    factored: bool = False,
    refine: Data | Refinement | None = None,
    memory: int | str | None = "500MiB",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Split the products of ``influence`` by the tokens of each sample ``[q, n, t]``.

    Entry ``[q, n, t]`` is ``<g_nt, g_q>``, or ``<g_nt, (F + damping I)^-1 g_q>``, with the gradient ``g_nt`` of
    the loss of token t of sample n through the whole model, attention to earlier tokens included. Sums over t
    are the products of ``influence``. So a large entry is a token that teaches the model what the query asks
    for. Tokens that do not count in the loss (``ignore_index``, padding) have zeros.

    ``token_influence`` reads no store. Pass it the few samples that ``influence`` found: it takes as many
    backward passes as a sample has tokens.

    Args:
        model: As for ``influence``.
        loss: As for ``influence``; it has a term for each token, as for ``BatchGrad(per="token")``.
        data: The samples to split, all of one length, in any form that ``compute`` takes.
        queries: As for ``influence``.
        curvature: As for ``influence``.
        damping: As for ``influence``.
        factored: As for ``influence``.
        refine: As for ``influence``.
        memory: Bytes for the vectors of all queries at once; ``None`` for no limit. It does not count the
            model, its activations and the curvature with its inverse.
        batch_size: Samples, and queries, in a batch; 128 by default. Not for data that come in batches.
        device: The device of batches; by default that of the model's parameters.

    Raises:
        BadInput: As ``influence`` does; for samples of different lengths.
        PackpropError: As ``influence`` does; for a loss without tokens.
    """
    objective = objective_of(ASKED, model, loss, device)
    inverse = Inverse(curvature, damping, factored, refine)
    vectors = _vectors(objective, queries, inverse, memory, batch_size)
    extension = AlongQueries({name: each.to(objective.device) for name, each in vectors.items()})
    batches = objective.batches(data, batch_size)
    with extended(*objective.modules):
        found = [products for products, _ in products_of(objective, batches, extension)]
    if not found:
        raise no_samples(ASKED, "data")
    lengths = sorted({each.shape[2] for each in found})
    if len(lengths) > 1:
        raise BadInput(
            ASKED,
            "data",
            f"its samples have {', '.join(map(str, lengths))} tokens",
            "give samples of one length: pad them with targets that the loss ignores (ignore_index)",
        )
    return torch.cat(found, 1).contiguous()


def _vectors(
    objective: Objective, queries: Data, inverse: Inverse, memory: int | str | None, batch_size: int | None
) -> dict[str, Tensor]:
    """Return the vectors of all queries ``[q, *p]`` by parameter, on the CPU."""
    if isinstance(inverse.refine, Refinement) and inverse.refine.checkpoint is not None:
        raise BadInput(
            ASKED,
            "refine=Refinement(..., checkpoint=...)",
            "the folder belongs to a search in a store",
            "leave checkpoint out",
        )
    budget = budget_of(memory) or sys.maxsize
    gradients, refiner = vectors_of(objective, rows_like(objective), inverse, budget)
    query = gradients.kept_bytes if refiner is None else refiner.query_bytes
    batches = objective.batches(queries, batch_size)
    parts: list[dict[str, Tensor]] = []
    count = 0
    with extended(*objective.modules):
        for batch in batches:
            with batches.explained():
                number, rows = gradients.of(batch)
            count += number
            if count * query > budget:
                raise BadInput(
                    ASKED,
                    f"memory={memory!r}, and {count} queries or more",
                    f"the vectors of a query take {byte_text(query)}, and all are held at once",
                    "give fewer queries, or more memory",
                )
            parts += [rows] if number else []
        if not parts:
            raise no_samples(ASKED, "queries")
        vectors = joined(parts)
        warn_of_empty(ASKED, queries_without_gradient(vectors), count)
        if refiner is None:
            return vectors
        return refiner(vectors, gradients.orders, None, budget // query, lambda iterations: None)
