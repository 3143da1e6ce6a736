"""Products with a curvature matrix of a whole data set; each product reads the data once, batch by batch."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.given import Objective
from packprop.applications.dataset.identity import keep_generators
from packprop.applications.dataset.loss_terms import TermWeights, counted_terms, is_scaled
from packprop.applications.dataset.messages import described, no_samples
from packprop.applications.dataset.progress import progress_bar
from packprop.applications.dataset.row_products import row_product
from packprop.applications.dataset.state import MergedResults
from packprop.applications.dataset.stream import is_empty
from packprop.engine.curvature import Matrix, Vectors, graph_product, snapshots_of
from packprop.engine.graph import Graph, require_loss_inputs, walk
from packprop.engine.memory import LiveBytes, budget_of, byte_text
from packprop.engine.recording import SameForEachPass, extended, record
from packprop.engine.samples import check_graph
from packprop.engine.tensors import (
    accumulation_dtype,
    free_bytes,
    moved,
    named_buffers,
    named_parameters,
    outputs_and_loss,
    random_numbers_from,
    random_states,
    tensors_in,
)
from packprop.errors import BadInput, PackpropError

ROOM = 256 * 2**20
"""Bytes, without a budget, for the vectors that go through a batch at once, beside its graph."""


class DataProduct:
    """Products with the GGN or the Hessian of a loss over a data set, for vectors ``[v, *p]`` by parameter.

    The matrix belongs to one loss over all samples, as for ``compute``: a mean is over all terms. Every call
    reads the data once. The model's and the data's random draws are the same in each reading, and leave all
    generators as they are.

    Args:
        objective: The model and the loss.
        batches: The data.
        matrix: The name of the matrix.
        parameters: Leaves of the model.
        memory: The most bytes of tensor storage that may be alive at once, vectors and products included.
        room: Without ``memory``, bytes for the vectors that go through a batch at once.
        progress: Show a bar for each reading.

    Attributes:
        readings: The number of complete readings of the data.
        snapshots: Snapshots of the model's parameters, then of its buffers. Batches may write to buffers;
            packprop restores these, and takes their snapshots again after each reading.

    Raises:
        BadInput: For an unknown matrix, an unreadable ``memory``, or data that packprop can read only once.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Batches,
        matrix: Matrix,
        parameters: Sequence[Tensor],
        *,
        memory: int | str | None,
        room: int | None = None,
        progress: bool,
    ) -> None:
        asked, self._objective = objective.asked, objective
        if matrix not in ("ggn", "hessian"):
            raise BadInput(asked, f"matrix={matrix!r}", "there is no such matrix", "give 'ggn' or 'hessian'")
        batches.require_rereadable("data", "each product reads them")
        self._asked, self._batches = asked, batches
        self._matrix, self._parameters = matrix, [*parameters]
        self._budget, self._device, self._progress = budget_of(memory), torch.device(objective.device), progress
        keep_generators(objective.model, objective.loss, batches)  # they draw the same in each reading
        self._draws = random_states()
        self._room = room
        self._sizes: list[tuple[int, int]] = []
        self._may_have_rows = True
        self.readings = 0
        self._weights = TermWeights()
        own = [parameter for _, parameter in named_parameters(objective.model)]
        buffers = [buffer for _, buffer in named_buffers(objective.model)]
        self.snapshots = [*snapshots_of(own), *snapshots_of(buffers)]
        self._first_buffer = len(own)

    def __call__(self, vectors: Vectors) -> list[Tensor]:
        """Return products ``[v, *p]`` for each parameter, in at least float32.

        Raises:
            BadInput: If the loss, the model or a batch does not work, or a budget is too small.
            PackpropError: If something in the graph is not twice differentiable, samples meet in the model, or
                the number of terms of the loss is not known.
        """
        given = [vector.detach().to(self._device) for vector in vectors]
        sums = [torch.zeros_like(vector, dtype=accumulation_dtype(vector.dtype)) for vector in given]
        merged = MergedResults([], weights=self._weights)
        said = f"packprop, reading {self.readings + 1}"
        same = SameForEachPass(self._objective.modules)
        with contextlib.ExitStack() as stack:
            stack.enter_context(extended(*self._objective.modules))
            stack.enter_context(self._batches.explained())
            stack.enter_context(random_numbers_from(self._draws))
            stack.enter_context(self._batches.drawing_apart())
            stack.callback(self._renew)
            self._batches.begin_again()
            left = operator.length_hint(self._batches)
            bar = progress_bar(said, 0, left, self._budget, self._device, self._progress)
            advance = stack.enter_context(bar)
            for number, batch in enumerate(self._batches):
                if not is_empty(batch):
                    with same.around(), sdpa_kernel(SDPBackend.MATH):
                        self._add(sums, given, batch, number, merged)
                advance(merged.samples)
        if not merged.samples:
            raise no_samples(self._asked, "data")
        if not merged.terms:
            why, instead = "it is a mean over no terms", "give targets that it does not ignore"
            raise BadInput(self._asked, "the loss of all data", why, instead)
        self.readings += 1
        return [each.div_(merged.terms) for each in sums]

    def _renew(self) -> None:
        buffers = [each.tensor for each in self.snapshots[self._first_buffer :]]
        self.snapshots[self._first_buffer :] = snapshots_of(buffers)

    def _add(
        self, sums: list[Tensor], vectors: list[Tensor], batch: Any, number: int, merged: MergedResults
    ) -> None:
        """Add the products of a batch, times the terms of its loss."""
        size = _entries(batch)
        fitting = max((fits for known, fits in self._sizes if known >= size), default=0)
        live = None  # packprop measures the first batch, and each batch that is larger than those before
        if not fitting and self._budget is not None:
            live = self._counted(vectors, sums, batch)
        with live or contextlib.nullcontext():
            graph, terms = self._forward(batch, number, merged)
        if terms:  # a mean over no terms is NaN, and adds nothing
            by_rows = self._products_by_rows(vectors, graph)
            if by_rows is None and not fitting and live is None:
                live = self._counted(vectors, sums, batch)
            chunks = self._products_in_chunks(vectors, graph, batch, fitting, live)
            for chunk, parts in chunks if by_rows is None else [(slice(None), by_rows)]:
                for total, part in zip(sums, parts, strict=True):
                    total[chunk].add_(part, alpha=terms)
        graph.release(keep=False)

    def _counted(self, vectors: list[Tensor], sums: list[Tensor], batch: Any) -> LiveBytes:
        """Return a counter of bytes that includes the tensors that stay in memory throughout."""
        live = LiveBytes()
        fixed = [each.tensor.detach() for each in self.snapshots]
        live.own([*fixed, *vectors, *sums, *tensors_in(batch)], "")
        return live

    def _products_by_rows(self, vectors: list[Tensor], graph: Graph) -> list[Tensor] | None:
        """Return products of a batch by rows, if that is less work; see NOTE [Products by rows]."""
        if self._matrix != "ggn" or self._budget is not None or not self._may_have_rows:
            return None
        try:
            product = row_product(graph, self._parameters, len(vectors[0]), self._room_now())
            return None if product is None else product(self._given(vectors, slice(None)))
        except PackpropError:  # some function has no gradients of samples, which products do not need
            self._may_have_rows = False
            return None

    def _products_in_chunks(
        self, vectors: list[Tensor], graph: Graph, batch: Any, fitting: int, live: LiveBytes | None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield products of a batch by differentiating twice, for as many vectors at once as fit.

        ``fitting`` is their number; ``live`` counts bytes to find it, if it is not known.
        """
        with live or contextlib.nullcontext():
            product = graph_product(graph, self._matrix, self._parameters)
            if live is not None:
                before = live.now
                live.restart()
                product(self._given(vectors, slice(1)))  # measured and dropped: chunks stay the same
                fitting = self._fitting(before, live.peak - before, batch)
                self._sizes.append((_entries(batch), fitting))
        for start in range(0, len(vectors[0]), fitting):
            chunk = slice(start, start + fitting)
            yield chunk, product(self._given(vectors, chunk))

    def _forward(self, batch: Any, number: int, merged: MergedResults) -> tuple[Graph, float]:
        """Run the forward pass of a batch, and count it; return its graph, and the divisor of its loss."""
        (inputs, targets), loss = moved(batch, self._device), self._objective.loss
        with torch.enable_grad(), record():
            outputs, value = outputs_and_loss(self._asked, self._objective.model, loss, inputs, targets)
            graph = walk([value], [None], None)
            require_loss_inputs(graph)
            check_graph(graph)
        outputs = outputs if is_scaled(graph) else None
        reduction, terms, _ = counted_terms(graph, merged.weights, loss, outputs, targets)
        merged.count(number, graph.samples, terms, value.detach(), reduction)
        if merged.samples > graph.samples and self._matrix == "hessian":
            merged.weights.settle_penalties(reduction, of_hessian=True)
        return graph, terms

    def _given(self, vectors: list[Tensor], chunk: slice) -> list[Tensor]:
        """Return some of the vectors in the precision of their parameters."""
        return [v[chunk].to(p.dtype) for v, p in zip(vectors, self._parameters, strict=True)]

    def _room_now(self) -> int:
        """Return bytes for the vectors or rows that go through a batch at once, without a budget."""
        free = free_bytes(self._device)
        return self._room or (ROOM if free is None else max(ROOM, free // 4))

    def _fitting(self, before: int, each: int, batch: Any) -> int:
        """Return the number of vectors that fit at once into the rest of the budget.

        Args:
            before: Bytes of everything else in memory.
            each: Bytes that one vector takes in a product.
            batch: The batch, for messages.

        Raises:
            BadInput: If not even one fits.
        """
        if self._budget is None:
            return max(1, self._room_now() // max(1, each))
        if before + each > self._budget:
            raise BadInput(
                self._asked,
                f"memory={byte_text(self._budget)}, and a batch of {described(batch)}",
                f"a product with one vector takes {byte_text(before + each)}, of which vectors, products and "
                f"the model with its graph are {byte_text(before)}",
                f"give at least {byte_text(before + each)}, smaller batches, or fewer vectors at once",
            )
        return min(sys.maxsize, max(1, (self._budget - before) // max(1, each)))


def _entries(batch: Any) -> int:
    """Count the entries of the tensors in a batch."""
    return sum(tensor.numel() for tensor in tensors_in(batch))
