"""One batch after the other through the model and the loss; what comes out is merged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.dataset.parts import Part, drawn_as_before
from packprop.dataset.state import MergedResults
from packprop.dataset.stored import StoredResults
from packprop.engine.backward_pass import BackwardPass
from packprop.engine.chunks import ChunkSizes
from packprop.engine.loss_terms import reduction_and_divisor
from packprop.engine.request import Request, settle_loss_inputs
from packprop.errors import PackpropError, PackpropWarning
from packprop.graph.graph import Graph
from packprop.graph.samples import check_graph
from packprop.graph.walk import walk
from packprop.recording.switch import record
from packprop.tensors.calling import LossFunction, outputs_and_loss
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.types import Extension


class BatchStream:
    """Runs batches through the model and the loss, and merges their results.

    Args:
        asked: What the user asked for, for messages.
        model: The model, extended while batches are added.
        loss: Called as ``loss(outputs, targets)``; ``None`` if the model computes it.
        device: Where batches are moved to.
        results: What the results of batches are merged into.
        extensions: What is computed.
        stored: Takes those of them that go to a store.
    """

    def __init__(
        self,
        asked: str,
        model: nn.Module,
        loss: LossFunction | None,
        device: torch.device | str,
        results: MergedResults,
        extensions: Sequence[Extension],
        stored: StoredResults | None = None,
    ) -> None:
        self.results, self.extensions, self.stored = results, extensions, stored
        self._asked, self._model, self._loss, self._device = asked, model, loss, device
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def add(
        self,
        batch: tuple[Any, Any],
        chunk_sizes: ChunkSizes,
        parts: Sequence[Part],
        second: bool,
        number: int,
    ) -> None:
        """Add the results of one batch: of the parts that the first or ``second`` reading asks for.

        ``number``: that of the batch among those of all ranks.
        """
        if _is_empty(batch):
            return
        inputs, targets = map_tensors(lambda tensor: tensor.to(self._device), batch)
        with torch.enable_grad(), record():
            _, value = outputs_and_loss(self._asked, self._model, self._loss, inputs, targets)
        graph = walk([value], [None], None)
        settle_loss_inputs(graph, parts)
        check_graph(graph)
        reduction, divisor = loss_terms(graph)
        terms = float(divisor)

        def name_of(leaf: Tensor) -> str:
            return self._names.get(id(leaf)) or graph.name(leaf)

        def known(leaf: Tensor, extension: Extension) -> list[Any]:
            assert isinstance(extension, Part)
            return self.results.known(name_of(leaf), extension.whole)

        def done(leaf: Tensor, found: dict[Extension, list[Any]]) -> None:
            kept = {part: found[part] for part in parts if part in found and not (second and part.is_whole)}
            if self.stored is not None and not second:
                kept = self.stored.take(name_of(leaf), leaf.dtype, graph.samples, terms, kept)
            self.results.add(name_of(leaf), leaf.dtype, 0 if second else graph.samples, terms, kept)

        drawn = drawn_as_before(graph, self.extensions) if second else {}
        request = Request(graph, parts, chunk_sizes, drawn=drawn, known=known if second else None)
        with warnings.catch_warnings():
            if not terms:
                warnings.simplefilter("ignore", PackpropWarning)
            BackwardPass(request, done).run(None)
        graph.release(keep=False)
        if self.stored is not None and not second:
            self.stored.end_batch(batch, graph.samples, terms)
        if second:
            self.results.count_again(graph.samples, terms)
        else:
            self.results.count(number, graph.samples, terms, value.detach(), reduction)


def loss_terms(graph: Graph) -> tuple[str, Tensor | float]:
    """How the batch's loss is reduced (``"mean"`` or ``"sum"``), and what it is divided by."""
    calls = [loss.call for loss in graph.losses]
    if len(calls) == 1 and not graph.without_loss and (known := reduction_and_divisor(calls[0])) is not None:
        return known
    raise PackpropError(
        "Quantities of a loss over several batches were asked for.",
        f"the loss of a batch, made of {len(calls)} recorded loss functions",
        "what it is divided by is not known, so that batches cannot be given their weight",
        "use one loss function of torch with reduction='mean' or reduction='sum'",
    )


def _is_empty(batch: tuple[Any, Any]) -> bool:
    """Whether no tensor of the inputs has an entry: there is no sample in the batch."""
    tensors = [*tensors_in(batch[0])]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)
