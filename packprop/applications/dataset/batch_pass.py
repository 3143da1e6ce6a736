"""The pass over one batch of a data set; packprop may replay a traced graph in place of it.

# NOTE [Sharded passes]
If ``fully_shard`` has sharded the model, all ranks run every pass together, because they make parameters whole
together or not at all. Before each unit of the forward pass, and after it, ranks tell each other whether all
can continue: see NOTE [In step]. A rank without a batch runs an earlier batch, its own or that of another rank,
and drops the results. Sweeps may differ between ranks: see NOTE [Rounds].
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packprop.applications.compiled.passes import Outcome
from packprop.applications.dataset.loss_terms import (
    counted_terms,
    is_scaled,
    loss_terms,
    number_of_terms,
)
from packprop.applications.dataset.parts import Part, drawn_in_each_reading
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.state import MergedResults
from packprop.applications.dataset.stored import StoredResults
from packprop.engine.curvature import sample_losses
from packprop.engine.distributed import require_sharded, swept
from packprop.engine.graph import Graph, walk
from packprop.engine.passes import BackwardPass, ChunkSizes, Log, Request, settle_loss_inputs
from packprop.engine.recording import record
from packprop.engine.samples import check_graph
from packprop.engine.tensors import (
    LossFunction,
    abandon_forward,
    coming_to_units,
    is_traced,
    map_tensors,
    named_parameters,
    outputs_and_loss,
    reshard,
)
from packprop.errors import PackpropError, PackpropWarning
from packprop.types import Extension

Take = Callable[[str, torch.dtype, dict[Part, list[Any]]], None]
"""A function that takes results of a parameter: its name, its precision, the values."""

FOUND = (0, "what a batch brought")
"""The key of a batch's results in an ``Outcome``."""


class Found(NamedTuple):
    """The results of a batch, apart from its loss.

    Args:
        samples: The number of samples in the batch.
        reduction: The reduction of its loss.
        terms: The divisor of its loss.
        weights: The weights of its terms.
        rows: The precision and the results of each parameter, by its name.
    """

    samples: int
    reduction: str
    terms: Tensor | float
    weights: dict[str, Tensor]
    rows: dict[str, tuple[torch.dtype, dict[Part, list[Any]]]]

    def take(self, name: str, dtype: torch.dtype, results: dict[Part, list[Any]]) -> None:
        """Keep the results of a parameter."""
        self.rows[name] = dtype, results


@dataclass
class BatchPass:
    """Runs a batch through the model, the loss and a backward pass without ``.grad``; merges the results.

    Args:
        asked: The call of the user, for messages.
        model: The model, which is extended during the pass.
        loss: Called as ``loss(outputs, targets)``; ``None`` if the model computes it.
        merged: Merges the results of batches.
        extensions: The extensions of the pass.
        stored: Takes the results that go to a store; ``None`` without a store.
        parts: The parts of the extensions in this reading of the data.
        second: True in the second reading.
        chunk_sizes: The chunk sizes of the batch.
        batch: The batch as the data yielded it, for the store.
        number: The number of the batch among the batches of all ranks.
        sharded: The ranks, if ``fully_shard`` has sharded the model over them; see NOTE [Sharded passes].
        log: Called after each chunk of samples, as ``BackwardPass`` calls it.
    """

    asked: str
    model: nn.Module
    loss: LossFunction | None
    merged: MergedResults
    extensions: Sequence[Extension]
    stored: StoredResults | None
    parts: Sequence[Part] = ()
    second: bool = False
    chunk_sizes: ChunkSizes | None = None
    batch: Any = None
    number: int = 0
    sharded: Ranks | None = None
    log: Log | None = None

    def __post_init__(self) -> None:
        self._leaves: dict[str, Tensor] = dict(named_parameters(self.model))
        self._names = {id(parameter): name for name, parameter in self._leaves.items()}

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the pass."""
        return [each for each in (self.model, self.loss) if isinstance(each, nn.Module)]

    @property
    def budget(self) -> int | None:
        """``None``: packprop replays no graph under a budget."""
        return None

    def run(self, inputs: Any, targets: Any) -> Tensor:
        """Run the pass, and merge the results of each parameter as they come; return the loss."""
        return self._run(inputs, targets, merges=True)[0]

    def run_alone(self, inputs: Any, targets: Any) -> Found:
        """Run the pass with the checks of ``run``, and return its results instead of merging them."""
        return self._run(inputs, targets, merges=False)[1]

    def _run(self, inputs: Any, targets: Any, merges: bool) -> tuple[Tensor, Found]:
        outputs, loss, graph = self._recorded(inputs, targets)
        with self._put_together(graph):
            self._settle(graph)
            before = self.merged.weights
            reduction, terms, weights = counted_terms(graph, before, self.loss, outputs, targets)
            del outputs
            found = Found(graph.samples, reduction, terms, weights, {})
            with _quiet_without(terms):
                take = functools.partial(self._merge, graph.samples, terms) if merges else found.take
                self._backward(graph, take)
            self._count(graph.samples, reduction, terms, loss)  # inside: if it fails, other ranks are told
        return loss, found

    def take_part(self, inputs: Any, targets: Any) -> None:
        """Run the pass because other ranks need this one in it; merge nothing."""
        *_, graph = self._recorded(inputs, targets)
        with self._put_together(graph):
            settle_loss_inputs(graph, self.parts)
            check_graph(graph)
            with _quiet_without(number_of_terms(loss_terms(graph).divisor)):
                self._backward(graph, lambda *results: None)

    def run_apart(self, parameters: Sequence[Tensor], inputs: Any, targets: Any) -> Outcome:
        """Run the pass; return its loss and its results, and merge nothing."""
        _, loss, graph = self._recorded(inputs, targets)
        self._settle(graph)
        terms = loss_terms(graph)
        found = Found(graph.samples, *terms, {})
        with contextlib.nullcontext() if is_traced() else _quiet_without(float(terms.divisor)):
            self._backward(graph, found.take)
        return Outcome(loss, {}, {FOUND: found}, [])

    def deliver(self, parameters: Sequence[Tensor], outcome: Outcome) -> Tensor:
        """Merge the results of a pass, or of a replayed graph; return the loss."""
        found: Found = outcome.results[FOUND]
        terms = number_of_terms(found.terms)
        self.merged.weights.add(found.weights, terms)
        for name, (dtype, rows) in found.rows.items():
            self._merge(found.samples, terms, name, dtype, rows)
        self._count(found.samples, found.reduction, terms, outcome.loss)
        return outcome.loss

    def clear(self, parameters: Sequence[Tensor], outcome: Outcome) -> None:
        """Do nothing: the pass leaves nothing on parameters."""

    def _recorded(self, inputs: Any, targets: Any) -> tuple[Any, Tensor, Graph]:
        """Run the forward pass; return its outputs if they are needed, its loss, and its graph."""
        if self.sharded is None:
            return self._forward(inputs, targets)
        try:
            with coming_to_units(self.model, self.sharded.come_to):
                found = self._forward(inputs, targets)
            self.sharded.come_through()
        except BaseException:
            abandon_forward(self.model)
            raise
        return found

    def _forward(self, inputs: Any, targets: Any) -> tuple[Any, Tensor, Graph]:
        with torch.enable_grad(), record():
            outputs, value = outputs_and_loss(self.asked, self.model, self.loss, inputs, targets)
        graph = walk([value], [None], None, unshards=self.sharded is not None)
        if self.sharded is not None:
            require_sharded(graph, self.parts, self.sharded.all, create_graph=False, planned=False)
        if is_traced():
            graph.hooks.require_none()
        keeps = is_scaled(graph) and not self.merged.weights.own
        return map_tensors(Tensor.detach, outputs) if keeps else None, value.detach(), graph

    def _settle(self, graph: Graph) -> None:
        """Find the samples, and give their losses to the store if it takes them."""
        losses = self.stored is not None and self.stored.losses and not self.second
        settle_loss_inputs(graph, self.parts, kept=losses)
        check_graph(graph)
        if losses and self.stored is not None:
            self.stored.take_losses(sample_losses(graph))
            settle_loss_inputs(graph, self.parts)

    @contextlib.contextmanager
    def _put_together(self, graph: Graph) -> Iterator[None]:
        """Make sharded parameters whole when sweeps in the block need them, on all ranks at once."""
        if self.sharded is None:
            yield
            return
        try:
            with swept(graph, self.parts, self.sharded.all):
                yield
        finally:
            reshard(self.model)  # the outermost unit stays whole after a forward pass, for a backward pass

    def _backward(self, graph: Graph, take: Take) -> None:
        """Run the backward pass; in a second reading, drop results that the first one has computed."""

        def done(leaf: Tensor, found: dict[Extension, list[Any]]) -> None:
            parts = [part for part in self.parts if part in found and not (self.second and part.is_whole)]
            take(self._name_of(graph, leaf), graph.home(leaf).dtype, {part: found[part] for part in parts})

        def known(leaf: Tensor, extension: Extension) -> list[Any]:
            assert isinstance(extension, Part)
            return self.merged.known(self._name_of(graph, leaf), extension.whole)

        assert self.chunk_sizes is not None
        draws = drawn_in_each_reading(self.extensions)
        request = Request(
            graph, self.parts, self.chunk_sizes, draws=draws, known=known if self.second else None
        )
        BackwardPass(request, done, self.log).run(None)
        graph.release(keep=False)

    def _name_of(self, graph: Graph, leaf: Tensor) -> str:
        """Return the name under which results of a leaf merge, in all batches.

        Raises:
            PackpropError: If another leaf has this name.
        """
        home = graph.home(leaf)
        name = self._names.get(id(home)) or graph.name(leaf)
        if self._leaves.setdefault(name, home) is not home:
            raise PackpropError(
                self.asked,
                f"parameter {name!r}, of which there are several",
                "values belong to a parameter by its name, in the model or in the loss",
                "give model and loss as modules that hold them under names of their own, such as one model "
                "that computes its loss, with loss=None",
            )
        return name

    def _merge(
        self, samples: int, terms: float, name: str, dtype: torch.dtype, rows: dict[Part, list[Any]]
    ) -> None:
        if self.stored is not None and not self.second:
            rows = self.stored.take(name, dtype, samples, terms, rows)
        self.merged.add(name, dtype, 0 if self.second else samples, terms, rows)

    def _count(self, samples: int, reduction: str, terms: float, loss: Tensor) -> None:
        if self.second:
            self.merged.count_again(samples, terms)
            return
        if self.stored is not None:
            self.stored.end_batch(self.batch, self.number, samples, terms)
        self.merged.count(self.number, samples, terms, loss, reduction)
        if self.merged.samples > samples:
            self.merged.settle_penalties()


@contextlib.contextmanager
def _quiet_without(terms: float) -> Iterator[None]:
    """Silence packprop's warnings in the block if the loss is a mean over no terms: its NaN adds nothing."""
    with warnings.catch_warnings():
        if not terms:
            warnings.simplefilter("ignore", PackpropWarning)
        yield
