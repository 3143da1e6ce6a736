"""Gradients of queries, as a store holds gradients of samples: of a loss that is summed, perhaps projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.applications.dataset.batch_pass import BatchPass, Found
from packprop.applications.dataset.given import Objective
from packprop.applications.dataset.parts import readings_of
from packprop.applications.dataset.state import MergedResults
from packprop.applications.dataset.stored import of_summed_loss
from packprop.applications.dataset.stream import is_empty
from packprop.applications.queries.preconditioning import Preconditioner, together
from packprop.engine.algebra import KEEP, Dense, EntryOrder, Projection, entry_order_of, projected
from packprop.engine.memory import chunk_sizes_over_data, step_over_data
from packprop.engine.recording import SameForEachPass
from packprop.engine.tensors import accumulation_dtype, moved, outside_autocast
from packprop.errors import BadInput, PackpropError
from packprop.extensions import BatchGrad, Projected
from packprop.store.reading import StoredArray
from packprop.types import GRADIENT, Extension, Row


class EntryOrders(Extension):
    """The order of the entries of each parameter's matrix."""

    savefield = "entry_order"
    rows = (Row(GRADIENT, entry_order_of, over_n=KEEP, over_v=KEEP, degree=0),)


class PassesApart:
    """Runs a pass over one batch after the other without merging results; each begins as the first one did.

    Args:
        objective: The model and the loss.
        extensions: The quantities.
    """

    def __init__(self, objective: Objective, extensions: Sequence[Extension]) -> None:
        asked, model, loss = objective.asked, objective.model, objective.loss
        parts = readings_of(extensions)[0]
        self._pass = BatchPass(asked, model, loss, MergedResults([]), extensions, None, parts)
        self._device, self._same = objective.device, SameForEachPass(objective.modules)
        self._trained = objective.trained

    def __call__(self, batch: tuple[Any, Any]) -> Found:
        """Return the results of a batch.

        Raises:
            BadInput: For a trained parameter that is not the model's.
            PackpropError: If terms have other weights than in earlier batches, by a factor behind the loss.
        """
        each, device = self._pass, self._device
        inputs, targets = moved(batch, device)
        step = step_over_data(each.model, each.loss, batch, each.extensions, device)
        each.chunk_sizes = chunk_sizes_over_data(step, None)
        with self._same.around():
            found = each.run_alone(inputs, targets)
        each.merged.weights.require_any_size()  # all queries may be in one batch
        for name in found.rows.keys() - self._trained.keys():
            raise BadInput(
                each.asked,
                f"parameter {name!r}, which the loss depends on",
                "it is not the model's, and inner products are those of gradients in the model's parameters",
                "set requires_grad=False on it, or give a model that holds it and computes the loss, loss=None",
            )
        return found


class QueryGradients:
    """Computes gradients of batches of queries, preconditions them, and then projects them as the store does.

    Projection of ``h = F^-1 g`` comes last: inner products with projected rows are then those of ``h`` with the
    rows, in expectation. (The inverse of a projected F would be another matrix.)

    Args:
        objective: The model and the loss.
        arrays: Stored rows, or empty tensors like them, by parameter; under ``""`` if they join all parameters.
        preconditioner: The preconditioner of gradients, if there is one.
        raw: Neither precondition nor project gradients: refining comes first, then ``projected_rows``.

    Attributes:
        orders: The order of entries of each parameter so far, as far as it is known.
    """

    def __init__(
        self,
        objective: Objective,
        arrays: Mapping[str, StoredArray | Tensor],
        preconditioner: Preconditioner | None,
        raw: bool = False,
    ) -> None:
        self._raw, self.orders = raw, dict[str, EntryOrder | None]()
        self._asked, self._arrays, self._preconditioner = objective.asked, arrays, preconditioner
        self._trained = objective.trained
        whole = arrays.get("")  # of a store: all parameters together
        options = whole.header.projection if isinstance(whole, StoredArray) else None
        self._projection = None if options is None else Projection(**options)
        lists = together(None if raw else preconditioner, self._trained)
        self._together = {name: names for names in lists for name in names}
        self._extension: Extension = BatchGrad()
        if options is not None and preconditioner is None and not raw:
            self._extension = Projected(BatchGrad(), **options)
        extensions: list[Extension] = [self._extension]
        if preconditioner is not None and preconditioner.as_factors:
            extensions.append(EntryOrders())
        self._run = PassesApart(objective, extensions)

    @property
    def curvature(self) -> str | None:
        """The name of the preconditioner, if there is one."""
        return None if self._preconditioner is None else self._preconditioner.name

    @property
    def kept_bytes(self) -> int:
        """Bytes of a query that is ready for the search."""
        rows = *self._arrays.values(), *self._trained.values()
        width = max(accumulation_dtype(each.dtype).itemsize for each in rows)
        return width * sum(max(1, array.shape[1:].numel()) for array in self._arrays.values())

    @property
    def passing_bytes(self) -> int:
        """Bytes of a query's gradients while it is computed, without the model and its activations."""
        sizes = [p.numel() * accumulation_dtype(p.dtype).itemsize for p in self._trained.values()]
        if self._extension.savefield == Projected.savefield:
            return 2 * len(sizes) * self._projection_bytes
        copies = 0 if self._preconditioner is None else 4 * max(sizes)
        return 2 * sum(sizes) + copies + self._projection_bytes

    @property
    def _projection_bytes(self) -> int:
        return 8 * self._projection.dimension if self._projection is not None else 0

    def of(self, batch: tuple[Any, Any]) -> tuple[int, dict[str, Tensor]]:
        """Return the number of queries in a batch, and their rows ``[q, ...]``, on the CPU, by array.

        Raises:
            PackpropError: For a gradient that is not finite.
        """
        if is_empty(batch):
            return 0, {}
        found = self._run(batch)
        rows: dict[str, Tensor] = {}
        while found.rows:
            names = self._together[next(iter(found.rows))]
            gradients = {name: self._taken(found, name) for name in names if name in found.rows}
            self._require_finite(gradients)
            gradients = {name: each for name, each in gradients.items() if self._counts(name)}
            if not gradients:
                continue  # no sample of the store depends on them: rows are zero there
            zeros = next(iter(gradients.values())).new_zeros(())
            for name in names:  # the batch may use only one of them
                gradients.setdefault(name, zeros.expand(found.samples, *self._trained[name].shape))
            self._put(rows, {name: gradients.pop(name) for name in names})
        for name, shape in self._expected.items():  # the batch does not use the parameter
            if name not in rows:
                dtype = (self._trained if self._raw else self._arrays)[name].dtype
                rows[name] = torch.zeros(found.samples, *shape, dtype=dtype, device="cpu")
        return found.samples, {name: rows[name] for name in self._expected}

    def _taken(self, found: Found, name: str) -> Tensor:
        """Take the gradients of a parameter from the results of a batch; keep the order of its entries."""
        dtype, results = found.rows.pop(name)
        by_extension = {part.whole: values for part, values in results.items()}
        values = by_extension.pop(self._extension)
        self.orders[name] = next((order for (order,) in by_extension.values()), None)
        return of_summed_loss(self._extension, values, dtype, found.samples, float(found.terms))

    @property
    def names(self) -> list[str]:
        """The parameters whose gradients count: those of the store, unless rows are raw or projected."""
        return [name for name in self._trained if self._counts(name)]

    def _counts(self, name: str) -> bool:
        return self._raw or self._projection is not None or name in self._arrays

    @property
    def _expected(self) -> dict[str, torch.Size]:
        """Shapes of the rows of a query, by parameter or array."""
        if self._raw:
            return {name: self._trained[name].shape for name in self.names}
        return {name: torch.Size(array.shape[1:]) for name, array in self._arrays.items()}

    @outside_autocast
    def projected_rows(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Project rows of queries by parameter and release them, or return them if there is no projection."""
        if self._projection is None:
            return rows
        found: dict[str, Tensor] = {}
        for name in [*rows]:
            _add(found, "", self._projected(name, rows.pop(name)))
        return found

    def _projected(self, name: str, rows: Tensor) -> Tensor:
        """Project rows of a parameter, if rows of the store are projected."""
        if self._projection is None:
            return rows
        return projected(Dense(rows[None]), self._projection, name, rows.shape[1:])

    @outside_autocast
    def _put(self, rows: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Precondition and project gradients of parameters that share a block, and put them into the rows."""
        if self._raw or self._preconditioner is not None:
            gradients = {name: each.to(accumulation_dtype(each.dtype)) for name, each in gradients.items()}
        if self._preconditioner is not None and not self._raw:
            gradients = self._preconditioner(self._asked, gradients, self.orders)
            self._require_finite(gradients)
        for name in [*gradients]:
            part = gradients.pop(name)
            if self._preconditioner is not None and not self._raw:
                part = self._projected(name, part)
            _add(rows, name if self._raw or self._projection is None else "", part.cpu())

    def _require_finite(self, gradients: Mapping[str, Tensor]) -> None:
        for name, each in gradients.items():
            if not each.isfinite().all():
                raise PackpropError(
                    self._asked,
                    f"parameter {name!r}",
                    "the gradient of a query is not finite there",
                    "look at the loss of each query, and leave out those that are not finite",
                )


def _add(rows: dict[str, Tensor], array: str, part: Tensor) -> None:
    """Add rows of a parameter to those of an array."""
    rows[array] = rows[array] + part if array in rows else part
