"""The result of ``influence``: a value that prints, and converts to plain numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor

from packprop.engine.tensors import plain_text
from packprop.store.search import Found

WIDTH = 100
"""Columns of a terminal that printed tables have."""


@dataclass(frozen=True, eq=False)
class Influence:
    """The result of ``influence``: for each query, the samples at both ends.

    Args:
        largest: Samples with the largest inner products, ``products``, ``identifiers`` and ``rows``, each
            ``[q, k]``, largest first: those that help the query most.
        smallest: Samples with the smallest inner products, smallest first: they harm the query if products are
            negative.
        samples: The number of samples in the store, or in the data.
        terms: The sum of the divisors of their batches' losses.
        quantity: The attribute of the gradients in the store; ``"gradients"`` if you gave data.
        curvature: The preconditioner of queries' gradients; ``None`` if there was none.
        damping: Its damping.
        readings: The number of groups of queries: packprop searched the store, or the data, once for each.
        refined_by: ``"ggn"`` or ``"hessian"``, the matrix that refined the queries, or ``None``.
        residuals: The residual ``|b - A x| / |b|`` of each refined query ``[q]``.
        groups: Products added up over groups of samples ``[q, g]``, if you gave ``groups``.
        data_readings: The number of readings of the data that refined the queries.
        checkpoints: The number of checkpoints over which products are added up.
    """

    largest: Found
    smallest: Found
    samples: int
    terms: float
    quantity: str
    curvature: str | None = None
    damping: float | None = None
    readings: int = 1
    refined_by: str | None = None
    residuals: Tensor | None = None
    groups: Tensor | None = None
    data_readings: int = 0
    checkpoints: int = 1

    def __len__(self) -> int:
        """The number of queries."""
        return len(self.largest.products)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, texts, lists and dictionaries."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        sides = facts.pop("largest"), facts.pop("smallest")
        plain = {name: fact.tolist() if isinstance(fact, Tensor) else fact for name, fact in facts.items()}
        queries = [[_rows(side, query) for side in sides] for query in range(len(self))]
        return plain | {"queries": [{"largest": most, "smallest": least} for most, least in queries]}

    def to_json(self) -> str:
        """Return ``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return plain_text(self, width=WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for query in range(len(self)):
            yield Text(f"query {query}")
            yield _table(_rows(self.largest, query), _rows(self.smallest, query))
            yield Text()
        yield Text(f"inner products with {self.quantity} of {self.samples:,} samples, for a summed loss")
        if self.checkpoints > 1:
            yield Text(f"added up over {self.checkpoints} checkpoints")
        if self.residuals is not None:
            yield Text(
                f"gradients of queries times (A + {self.damping:g} I)^-1, A: the {self.refined_by} of the "
                f"data, read {self.data_readings} times; largest residual {float(self.residuals.max()):.2g}"
            )
        elif self.curvature is not None:
            yield Text(f"gradients of queries times (F + {self.damping:g} I)^-1, F: {self.curvature}")


def _rows(found: Found, query: int) -> list[dict[str, Any]]:
    """Return identifier, row and product of each sample of a query."""
    columns = zip(*(column[query].tolist() for column in found), strict=True)
    return [{"identifier": each, "row": row, "product": product} for product, each, row in columns]


def _table(largest: list[dict[str, Any]], smallest: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("", "largest", "sample", "row", "smallest", "sample", "row"):
        table.add_column(title, justify="right")
    for place, (most, least) in enumerate(zip(largest, smallest, strict=True), 1):
        sides = [
            cell
            for each in (most, least)
            for cell in (f"{each['product']:.4g}", str(each["identifier"]), str(each["row"]))
        ]
        table.add_row(str(place), *sides)
    return table
