"""Quantities over a whole data set: batches are streamed, and their unscaled results are merged."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from packprop.context import check_extensions
from packprop.dataset.batches import Batches, Data
from packprop.dataset.result import Result
from packprop.dataset.state import MergedResults
from packprop.dataset.stored import StoredResults, stored_results
from packprop.engine.backward_pass import BackwardPass, long_work_of
from packprop.engine.chunks import ChunkSizes
from packprop.engine.request import Request, settle_loss_inputs
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.functions.losses.description import describe
from packprop.graph.graph import Graph
from packprop.graph.samples import check_graph
from packprop.graph.walk import walk
from packprop.memory.planning import chunk_sizes_over_data
from packprop.recording.switch import extended, record
from packprop.store.writing import StoreWriter
from packprop.tensors.calling import LossFunction, outputs_and_loss
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.types import Extension

ASKED = "compute(...) was called."


def compute(
    model: nn.Module,
    loss: LossFunction | None,
    data: Data | Batches,
    extensions: Sequence[Extension],
    *,
    batch_size: int | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    store: StoreWriter | str | Path | None = None,
) -> Result:
    """The quantities of ``extensions`` for the loss over a whole data set, batch by batch.

    The values are those of one loss over all samples: under a mean loss the scale is 1 over the number
    of all terms, whatever the sizes of the batches; under a sum it is 1. ``.grad`` is left alone and
    gradients of weights are not computed.

    Args:
        model: The model, in the mode (train or eval) that it shall be used in; need not be
            extended.
        loss: ``loss(model(inputs), targets)``, a loss module or function of torch that reduces by
            mean or sum. ``None`` where the model computes such a loss itself, from the whole batch, and
            returns it: as entry or attribute ``loss``, first in a tuple, or alone.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)`` such as a ``DataLoader``; inputs of a batch may be a tuple
            or a mapping of arguments. A batch may also be one mapping, as Hugging Face's loaders give it:
            its ``labels`` are the targets, the rest goes into the model by name. Without ``loss`` all of a
            batch goes into the model: a tensor, a tuple or a mapping of arguments.
        extensions: What to compute.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches.
        progress: Show a progress bar on standard error.
        device: Where batches are moved to; by default where the model's parameters are.
        memory: The most bytes of tensor storage that may be alive at once (``"600MiB"``, a number), with
            parameters, activations of a batch and results. A plan is made for the first batch, and again for
            each batch that is larger than those before.
        store: Where values of single samples go as they come, instead of into the result: a folder, which is
            made, or a ``StoreWriter``, which is left open. Rows there are those of the loss summed over its
            terms.

    Raises:
        BadInput: For extensions that need all samples in one batch, no data, or no loss; for a store that
            nothing would go to, or that cannot be written.
        PackpropError: For a loss whose number of terms is not known, or a parameter that some
            batches do not use.
    """
    chosen = check_extensions(ASKED, list(extensions))
    _require_mergeable(chosen)
    batches = data if isinstance(data, Batches) else Batches(ASKED, data, batch_size, whole=loss is None)
    place = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    chunk_sizes = _ChunkSizesByBatch(
        lambda batch: chunk_sizes_over_data(model, loss, batch, chosen, memory, place)
    )
    chunk_sizes.of(batches.first())  # a budget that nothing fits is refused before any work
    stored = stored_results(ASKED, store, model, chosen)
    kept = [extension for extension in chosen if stored is None or extension not in stored.extensions]
    stream = _BatchStream(model, loss, place, MergedResults(kept), chosen, stored)
    own = stored.writer if stored is not None and stored.writer is not store else contextlib.nullcontext()
    with own, extended(model):
        console = Console(stderr=True)
        hidden = not (progress and console.is_terminal)
        with batches.explained(), long_work_of(chosen, bar=False):
            for batch in track(batches, "packprop", console=console, transient=True, disable=hidden):
                stream.add(batch, chunk_sizes.of(batch))
    return stream.results.result()


def _require_mergeable(extensions: Sequence[Extension]) -> None:
    """Refuse extensions whose values over batches cannot be merged.

    Raises:
        BadInput: With the first of them.
    """
    for extension in extensions:
        if any(row.after is not None for row in extension.rows):
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                "it goes over the samples twice, and data are read once",
                "use it in `with backpack(...)` on one batch, or ask for KFAC or KFLR",
            )
        if any(row.whole for row in extension.rows) or extension.subsampling is not None:
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                "it relates samples of one batch to each other or by their index in it",
                "use it in `with backpack(...)` on one batch",
            )
    fields = [extension.savefield for extension in extensions]
    for extension in extensions:
        if fields.count(extension.savefield) > 1:
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                f"another one that is saved as {extension.savefield!r} is there, too",
                "compute one after the other",
            )


class _ChunkSizesByBatch:
    """Chunk sizes for batches of different sizes: those of one batch are good for all that are no larger."""

    def __init__(self, plan: Callable[[tuple[Any, Any]], ChunkSizes]) -> None:
        self._plan = plan
        self._planned: list[tuple[list[tuple[int, ...]], ChunkSizes]] = []

    def of(self, batch: tuple[Any, Any]) -> ChunkSizes:
        """Planned only where no batch before was as large in every axis of every tensor."""
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        for known, chunk_sizes in reversed(self._planned):
            if [*map(len, known)] == [*map(len, shapes)] and all(
                size <= most
                for shape, largest in zip(shapes, known, strict=True)
                for size, most in zip(shape, largest, strict=True)
            ):
                return chunk_sizes
        self._planned.append((shapes, self._plan(batch)))
        return self._planned[-1][1]


class _BatchStream:
    """Runs batches through the model and the loss, and merges their results.

    Args:
        model: The model, extended while batches are added.
        loss: Called as ``loss(outputs, targets)``; ``None`` if the model computes it.
        device: Where batches are moved to.
        results: What the results of batches are merged into.
        extensions: What is computed.
        stored: Takes those of them that go to a store.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        device: torch.device | str,
        results: MergedResults,
        extensions: Sequence[Extension],
        stored: StoredResults | None = None,
    ) -> None:
        self.results, self._extensions, self._stored = results, extensions, stored
        self._model, self._loss, self._device = model, loss, device
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def add(self, batch: tuple[Any, Any], chunk_sizes: ChunkSizes) -> None:
        """Add the results of one batch."""
        inputs, targets = map_tensors(lambda tensor: tensor.to(self._device), batch)
        with torch.enable_grad(), record():
            _, value = outputs_and_loss(ASKED, self._model, self._loss, inputs, targets)
        graph = walk([value], [None], None)
        settle_loss_inputs(graph, self._extensions)
        check_graph(graph)
        reduction, divisor = _loss_terms(graph)
        terms = float(divisor)

        def done(leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
            name = self._names.get(id(leaf)) or graph.name(leaf)
            if self._stored is not None:
                results = self._stored.take(name, leaf.dtype, graph.samples, terms, results)
            self.results.add(name, leaf.dtype, graph.samples, terms, results)

        with warnings.catch_warnings():
            if not terms:
                warnings.simplefilter("ignore", PackpropWarning)
            BackwardPass(Request(graph, self._extensions, chunk_sizes), done).run(None)
        graph.release(keep=False)
        if self._stored is not None:
            self._stored.end_batch(batch, graph.samples, terms)
        self.results.count(graph.samples, terms, value.detach(), reduction)


def _loss_terms(graph: Graph) -> tuple[str, Tensor | float]:
    """How the batch's loss is reduced (``"mean"`` or ``"sum"``), and what it is divided by."""
    calls = [loss.call for loss in graph.losses]
    if len(calls) == 1 and not graph.without_loss:
        (call,) = calls
        divisor = describe(call.function, call.args, call.kwargs).divisor
        given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
        given.apply_defaults()
        deprecated = [given.arguments.get(flag) for flag in ("size_average", "reduce")]
        reduction = given.arguments.get("reduction", "mean")
        # without the argument, a divisor of 1 may come from a sum or from a mean over one term
        known = divisor is not None and ("reduction" in given.arguments or divisor != 1)
        if known and deprecated == [None, None] and reduction in ("mean", "sum"):
            assert divisor is not None
            return reduction, divisor
    raise PackpropError(
        "Quantities of a loss over several batches were asked for.",
        f"the loss of a batch, made of {len(calls)} recorded loss functions",
        "what it is divided by is not known, so that batches cannot be given their weight",
        "use one loss function of torch with reduction='mean' or reduction='sum'",
    )
