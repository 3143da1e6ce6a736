"""Gradients of queries in the form of a store's gradients: of a loss that is summed, perhaps projected."""

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
from packprop.engine.tensors import accumulation_dtype
from packprop.errors import PackpropError
from packprop.extensions import BatchGrad, Projected
from packprop.store.reading import StoredArray
from packprop.types import GRADIENT, Extension, Row


class EntryOrders(Extension):
    """Return the order of the entries of each parameter's matrix."""

    savefield = "entry_order"
    rows = (Row(GRADIENT, entry_order_of, over_n=KEEP, over_v=KEEP, degree=0),)


class PassesApart:
    """Runs a pass over one batch after the other, and merges nothing; each begins as the first one did.

    Args:
        objective: The model and the loss.
        extensions: The quantities.
    """

    def __init__(self, objective: Objective, extensions: Sequence[Extension]) -> None:
        asked, model, loss = objective.asked, objective.model, objective.loss
        self._pass = BatchPass(asked, model, loss, MergedResults([]), extensions, None)
        self._pass.parts = readings_of(extensions)[0]
        self._objective, self._same = objective, SameForEachPass(objective.modules)

    def __call__(self, batch: tuple[Any, Any]) -> Found:
        """Return the results of a batch.

        Raises:
            PackpropError: If the weights of its terms, behind the loss function, are others than before.
        """
        each, device = self._pass, self._objective.device
        inputs, targets = self._objective.moved(batch)
        step = step_over_data(each.model, each.loss, batch, each.extensions, device)
        each.chunk_sizes = chunk_sizes_over_data(step, None)
        with self._same.around():
            return each.run_alone(inputs, targets)


class QueryGradients:
    """Gradients of batches of queries, preconditioned, then projected as those in the store.

    It projects a preconditioned gradient ``h = F^-1 g`` last: inner products with projected rows are then those
    of ``h`` with the rows, in expectation. (The inverse of a projected F would be another matrix.)

    Args:
        objective: The model and the loss.
        arrays: Stored rows, or empty tensors like them, by parameter; of all together by ``""``.
        preconditioner: The preconditioner of gradients, if there is one.
        raw: Leaves gradients as they are until ``projected_rows``: refining comes before that.

    Attributes:
        orders: The order of entries, for the parameters so far.
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
        self._shapes = {name: p.shape for name, p in objective.trained.items()}
        self._dtypes = {name: p.dtype for name, p in objective.trained.items()}
        whole = arrays.get("")  # of a store: all parameters together
        options = whole.header.projection if isinstance(whole, StoredArray) else None
        self._projection = None if options is None else Projection(**options)
        lists = together(None if raw else preconditioner, self._shapes)
        self._together = {name: names for names in lists for name in names}
        self._extension: Extension = BatchGrad()
        if self._projection is not None and preconditioner is None and not raw:
            dimension, kind = self._projection.dimension, self._projection.kind
            self._extension = Projected(BatchGrad(), dimension, kind=kind, seed=self._projection.seed)
        self._extensions: list[Extension] = [self._extension]
        if preconditioner is not None and preconditioner.as_factors:
            self._extensions.append(EntryOrders())
        self._run = PassesApart(objective, self._extensions)

    @property
    def curvature(self) -> str | None:
        """The name of the preconditioner, if there is one."""
        return None if self._preconditioner is None else self._preconditioner.name

    @property
    def kept_bytes(self) -> int:
        """Bytes of a query that is ready for the search."""
        width = max(accumulation_dtype(array.dtype).itemsize for array in self._arrays.values())
        width = max(width, *(accumulation_dtype(dtype).itemsize for dtype in self._dtypes.values()))
        return width * sum(max(1, array.shape[1:].numel()) for array in self._arrays.values())

    @property
    def passing_bytes(self) -> int:
        """Bytes of a query's gradients until it is ready, beside those of the model itself."""
        sizes = {name: shape.numel() * self._dtypes[name].itemsize for name, shape in self._shapes.items()}
        if self._extension.savefield == Projected.savefield:
            return 2 * len(sizes) * self._projection_bytes
        wide = {
            name: shape.numel() * accumulation_dtype(self._dtypes[name]).itemsize
            for name, shape in self._shapes.items()
        }
        copies = 0 if self._preconditioner is None else 4 * max(wide.values(), default=0)
        return 2 * sum(sizes.values()) + copies + self._projection_bytes

    @property
    def _projection_bytes(self) -> int:
        return 8 * self._projection.dimension if self._projection is not None else 0

    def of(self, batch: tuple[Any, Any]) -> tuple[int, dict[str, Tensor]]:
        """Return the number of queries in a batch, and their rows ``[q, ...]``, on the processor, by array.

        Raises:
            PackpropError: For a gradient that is not finite.
        """
        if is_empty(batch):
            return 0, {}
        found = self._run(batch)
        rows: dict[str, Tensor] = {}
        waiting: dict[str, Tensor] = {}
        for name in list(found.rows):
            dtype, results = found.rows.pop(name)
            by_extension = {part.whole: values for part, values in results.items()}
            gradients = of_summed_loss(
                self._extension, by_extension[self._extension], dtype, found.samples, float(found.terms)
            )
            del results
            order = by_extension[self._extensions[1]][0] if len(self._extensions) > 1 else None
            by_extension.clear()
            self.orders[name] = order
            self._require_finite(name, gradients)
            if self._projection is None and name not in self._arrays:
                continue  # no sample of the store depends on it: rows are zero there
            waiting[name] = gradients
            zeros = gradients.new_zeros(())
            del gradients
            names = self._together[name]
            if not any(each in found.rows for each in names):
                for each in names:  # the batch may use only one of them
                    waiting.setdefault(each, zeros.expand(found.samples, *self._shapes[each]))
                self._put(rows, {each: waiting.pop(each) for each in names})
        for name, shape in self._expected.items():  # the batch does not use the parameter
            if name not in rows:
                dtype = self._dtypes[name] if self._raw else self._arrays[name].dtype
                rows[name] = torch.zeros(found.samples, *shape, dtype=dtype, device="cpu")
        return found.samples, {name: rows[name] for name in self._expected}

    @property
    def names(self) -> list[str]:
        """The parameters whose gradients count: those of the store, if rows are not projected."""
        return [name for name in self._shapes if self._projection is not None or name in self._arrays]

    @property
    def _expected(self) -> dict[str, torch.Size]:
        """Shapes of the rows of a query, by parameter or array."""
        if self._raw:
            return {name: self._shapes[name] for name in self.names}
        return {name: torch.Size(array.shape[1:]) for name, array in self._arrays.items()}

    def projected_rows(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rows of queries by parameter as the store has them: projected, if its rows are."""
        if self._projection is None:
            return rows
        total: Tensor | None = None
        for name in [*rows]:
            piece = rows.pop(name)
            part = projected(Dense(piece[None]), self._projection, name, piece.shape[1:])
            total = part if total is None else total + part
        assert total is not None
        return {"": total}

    def _put(self, rows: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Put the results for gradients of parameters that share a block among the rows of a batch."""
        if self._raw or self._preconditioner is not None:
            gradients = {name: each.to(accumulation_dtype(each.dtype)) for name, each in gradients.items()}
        if self._preconditioner is not None and not self._raw:
            gradients = self._preconditioner(self._asked, gradients, self.orders)
            for name, each in gradients.items():
                self._require_finite(name, each)
        for name in [*gradients]:
            each = gradients.pop(name)
            if self._raw or self._projection is None:
                rows[name] = each.cpu()
                continue
            if self._preconditioner is not None:
                each = projected(Dense(each[None]), self._projection, name, each.shape[1:])
            part = each.cpu()
            rows[""] = part if "" not in rows else rows[""] + part

    def _require_finite(self, name: str, gradients: Tensor) -> None:
        if not gradients.isfinite().all():
            raise PackpropError(
                self._asked,
                f"parameter {name!r}",
                "the gradient of a query is not finite there",
                "look at the loss of each query, and leave out those that are not finite",
            )
