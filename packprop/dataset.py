"""Quantities over a whole data set: batches are streamed, their unscaled results merged."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from packprop.bites import Bites
from packprop.context import check_extensions
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.graph import Graph, walk
from packprop.losses import describe
from packprop.monoid import SUM, Moments, lift, rescale
from packprop.observe import Observation
from packprop.plan import bites_over_data
from packprop.samples import check_graph
from packprop.tape import extend, is_extended, record, restore
from packprop.types import Extension, map_tensors, tensors_in

Value = Tensor | list[Tensor]
Data = Dataset[Any] | tuple[Tensor, Tensor] | Iterable[tuple[Any, Any]]
ASKED = "compute(...) was called."
BATCH_SIZE = 128
"""Samples in a batch where the data come sample by sample."""


class Batches:
    """One pass over data of any form, which knows the batch that is being worked on.

    Args:
        asked: What the user asked for, for messages.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)`` such as a ``DataLoader``.
        batch_size: Samples in a batch, 128 if ``None``; only for data that come sample by sample.

    Raises:
        BadInput: For data of another form; while iterating, for a batch of another form.
    """

    def __init__(self, asked: str, data: Any, batch_size: int | None = None) -> None:
        self.asked, self.count = asked, 0
        self._current: Any = None
        self._first: list[tuple[Any, Any]] = []
        if isinstance(data, (tuple, list)) and data and all(isinstance(x, Tensor) for x in data):
            sizes = {len(x) if x.dim() else 0 for x in data}
            if len(data) != 2 or len(sizes) != 1:
                raise BadInput(
                    asked,
                    f"data, tensors {shapes(data)}",
                    "they are not a pair whose first axes hold the same number of samples",
                    "give a tensor of inputs [n, ...] and a tensor of targets [n, ...]",
                )
            data = TensorDataset(*data)
        if isinstance(data, TensorDataset) and len(data.tensors) == 2:
            step = batch_size or BATCH_SIZE
            data = list(zip(*(tensor.split(step) for tensor in data.tensors), strict=True))
        elif isinstance(data, Dataset):
            data = DataLoader(data, batch_size or BATCH_SIZE)
        elif not isinstance(data, Iterable):
            raise BadInput(
                asked,
                f"data {described(data)}",
                "it is neither a data set nor can it be iterated over",
                "give a Dataset, a pair of tensors, or batches (inputs, targets)",
            )
        elif batch_size is not None:
            raise BadInput(
                asked,
                f"batch_size={batch_size} with data {described(data)}",
                "these data come in batches already",
                "leave the batch size out, or give a Dataset or a pair of tensors",
            )
        self._hint = len(data) if isinstance(data, Sized) else 0
        self._rest = iter(data)

    def __length_hint__(self) -> int:
        return self._hint

    def first(self) -> tuple[Any, Any]:
        """The first batch, which iteration will give again."""
        if not self._first:
            batch = next(self._rest, None)
            if batch is None:
                raise BadInput(self.asked, "data", "it held no batch", "give at least one batch")
            self._first.append(self._checked(batch))
        return self._first[0]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in itertools.chain([self.first()], self._rest):
            self.count += 1
            yield self._checked(batch)
            self._current = None

    def _checked(self, batch: Any) -> tuple[Any, Any]:
        self._current = batch
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and _has_tensors(batch[0]):
            return batch[0], batch[1]
        raise BadInput(
            self.asked,
            f"batch {max(self.count, 1)} of the data, {described(batch)}",
            "it is not a pair (inputs, targets) with tensors as inputs",
            "let the data yield such pairs; inputs may be a tuple or a dictionary of arguments",
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say of an exception from inside which batch it came with.

        Raises:
            BadInput: From any exception that is not packprop's own.
        """
        try:
            yield
        except PackpropError:
            raise
        except Exception as error:
            where = f"batch {max(self.count, 1)} of the data, {described(self._current)}"
            instead = "see that loss(model(inputs), targets) works for every batch"
            if self._current is None:
                where = f"the data, after {self.count} batches"
                instead = "see that the data can be iterated over on their own"
            elif isinstance(error, torch.OutOfMemoryError):
                instead = "use smaller batches"
            raise BadInput(self.asked, where, explanation(error), instead) from error


def explanation(error: BaseException) -> str:
    """Type and message of an exception, and the last place it came through outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    own = [frame for frame in frames if not frame.filename.startswith(packages)]
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not own or isinstance(error, SyntaxError):  # which says itself where
        return message
    return f"{message} ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})"


def described(value: Any) -> str:
    """What a value is, for messages: its type, and shapes where it holds tensors."""
    if isinstance(value, Tensor):
        return f"a tensor {shapes(value)}"
    if isinstance(value, (tuple, list)) and len(value) == 2 and _has_tensors(value):
        return f"inputs {shapes(value[0])}, targets {shapes(value[1])}"
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return f"{kind} of tensors {shapes(value)}" if _has_tensors(value) else kind


def shapes(value: Any) -> str:
    """Shapes and types of the tensors in nested tuples, lists and dictionaries."""
    found = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    return " and ".join(found) if found else f"of type {type(value).__name__}"


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


@dataclass
class Result(Mapping[Any, dict[str, Value]]):
    """Values by extension (or the name of the attribute that it saves) and parameter name.

    Args:
        tables: ``savefield -> parameter name -> value``.
        samples: Samples that they were computed from.
        loss: The loss over the whole data set, as the loss reduces it.
        reduction: How it does: ``"mean"`` or ``"sum"``.
    """

    tables: dict[str, dict[str, Value]]
    samples: int
    loss: float
    reduction: str = "mean"

    def __getitem__(self, key: Extension | str) -> dict[str, Value]:
        return self.tables[key if isinstance(key, str) else key.savefield]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def save(self, path: str | Path) -> None:
        """Write all tensors to one ``.safetensors`` file."""
        flat = {
            f"{savefield}/{name}/{index}": tensor.detach().contiguous().cpu()
            for savefield, by_name in self.tables.items()
            for name, value in by_name.items()
            for index, tensor in enumerate(tensors_in(value))
        }
        lists = [
            f"{savefield}/{name}"
            for savefield, by_name in self.tables.items()
            for name, value in by_name.items()
            if isinstance(value, list)
        ]
        notes = {
            "samples": str(self.samples),
            "loss": repr(self.loss),
            "reduction": self.reduction,
            "lists": "\n".join(lists),
        }
        safetensors.torch.save_file(flat, path, metadata=notes)

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read what ``save`` wrote."""
        values: dict[str, dict[str, Value]] = {}
        with safetensors.safe_open(path, framework="pt") as file:
            notes = file.metadata()
            lists = set(notes["lists"].splitlines())
            for key in sorted(file.keys(), key=lambda key: (*key.split("/")[:2], int(key.split("/")[2]))):
                savefield, name, _ = key.split("/")
                by_name, tensor = values.setdefault(savefield, {}), file.get_tensor(key)
                if f"{savefield}/{name}" in lists:
                    pieces = by_name.setdefault(name, [])
                    assert isinstance(pieces, list)
                    pieces.append(tensor)
                else:
                    by_name[name] = tensor
        return cls(values, int(notes["samples"]), float(notes["loss"]), notes["reduction"])


@dataclass
class _State:
    """Merged partial results of the batches so far, as if the loss were a sum over terms."""

    extensions: Sequence[Extension]
    partial: dict[tuple[int, int, str], Any] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    terms: float = 0.0
    loss: Tensor | float = 0.0
    reduction: str = ""

    def count(self, samples: int, terms: float, loss: Tensor, reduction: str) -> None:
        """Note a batch whose results were added; each parameter must have been in all of them."""
        if self.reduction not in ("", reduction):
            raise PackpropError(
                "Quantities of a loss over several batches were asked for.",
                f"a loss that reduces by {self.reduction}, then by {reduction}",
                "there is no one loss over all samples that they are parts of",
                "use the same loss for every batch",
            )
        self.reduction = reduction
        self.samples += samples
        self.terms = self.terms + terms if reduction == "mean" else terms
        if terms:
            self.loss = self.loss + loss * terms
        whole = [e.name for e in self.extensions if any(row.over_n is not SUM for row in e.rows)]
        for name, reached in self.reached.items():
            if whole and reached != self.samples:
                raise PackpropError(
                    f"{whole[0]} over several batches was asked for.",
                    f"parameter {name!r}",
                    f"the loss depends on it for {reached} of the first {self.samples} samples "
                    "only: which of its rows belongs to which sample is not known",
                    "give data for which the model uses the same parameters in every batch, or "
                    "set requires_grad=False on this one",
                )

    def add(self, name: str, samples: int, terms: float, results: dict[Extension, list[Any]]) -> None:
        if results:
            self.reached[name] = self.reached.get(name, 0) + samples
        for place, extension in enumerate(self.extensions):
            for index, (row, value) in enumerate(zip(extension.rows, results.get(extension, []), strict=False)):
                if value is None:
                    continue
                key = (place, index, name)
                if row.degree and not terms:  # a mean over nothing: NaN times 0 shall be 0
                    value = _nothing_like(value)
                partial = lift(row.over_n, rescale(value, terms, row.degree))
                before = self.partial.get(key)
                self.partial[key] = partial if before is None else row.over_n.merge(before, partial)

    def result(self) -> Result:
        values: dict[str, dict[str, Value]] = {}
        scale = 1 / self.terms if self.terms else math.nan
        names = list(dict.fromkeys(name for _, _, name in self.partial))
        for place, extension in enumerate(self.extensions):
            by_name = values.setdefault(extension.savefield, {})
            for name in names:
                rows = []
                for index, row in enumerate(extension.rows):
                    partial = self.partial.get((place, index, name))
                    value = None if partial is None else row.over_n.result(partial)
                    rows.append(rescale(value, scale, row.degree))
                if any(row is not None for row in rows):
                    by_name[name] = extension.finish(rows, self.samples)
        return Result(values, self.samples, float(self.loss) * scale, self.reduction)


def compute(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: Data | Batches,
    extensions: Sequence[Extension],
    *,
    batch_size: int | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
) -> Result:
    """The quantities of ``extensions`` for the loss over a whole data set, batch by batch.

    They are those of one loss over all samples: under a mean loss the scale is 1 over the number of
    all terms, whatever the sizes of the batches; under a sum it is 1. ``.grad`` is left alone and
    gradients of weights are not computed.

    Args:
        model: The model, in the mode (train or eval) that it shall be used in; need not be
            extended.
        loss: ``loss(model(inputs), targets)``, a loss module or function of torch that reduces by
            mean or sum.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)`` such as a ``DataLoader``; inputs of a batch may be a tuple
            or a dictionary of arguments.
        extensions: What to compute.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches.
        progress: Show a progress bar on standard error.
        device: Where batches are moved to; by default where the model's parameters are.
        memory: The most bytes of tensor storage that may be alive at once (``"600MiB"``, a number), with
            parameters, activations of a batch and results. Planned by the first batch, and again by each that
            is larger than those before.

    Raises:
        BadInput: For extensions that need all samples in one batch, or no data.
        PackpropError: For a loss whose number of terms is not known, or a parameter that some
            batches do not use.
    """
    chosen = check_extensions(ASKED, list(extensions))
    for extension in chosen:
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
    fields = [extension.savefield for extension in chosen]
    for extension in chosen:
        if fields.count(extension.savefield) > 1:
            raise BadInput(
                ASKED,
                f"extension {extension.name}",
                f"another one that is saved as {extension.savefield!r} is there, too",
                "compute one after the other",
            )
    batches = data if isinstance(data, Batches) else Batches(ASKED, data, batch_size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    where = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    state = _State(chosen)
    kept = [module for module in model.modules() if is_extended(module)]
    borrowed = [module for module in model.modules() if not is_extended(module)]
    bites = _BitesBySize(lambda batch: bites_over_data(model, loss, batch, chosen, memory, where))
    bites.of(batches.first())  # a budget that nothing fits is refused before any work
    extend(model)
    try:
        console = Console(stderr=True)
        hidden = not (progress and console.is_terminal)
        with batches.explained():
            for batch in track(batches, "packprop", console=console, transient=True, disable=hidden):
                _add_batch(state, model, loss, batch, where, names, bites.of(batch))
    finally:
        for module in borrowed:
            restore(module)
        for module in kept:  # restoring a module restores those in it
            if not is_extended(module):
                extend(module)
    return state.result()


class _BitesBySize:
    """Bites for batches of different sizes: those of one batch are good for all that are no larger."""

    def __init__(self, plan: Callable[[tuple[Any, Any]], Bites]) -> None:
        self._plan = plan
        self._planned: list[tuple[list[tuple[int, ...]], Bites]] = []

    def of(self, batch: tuple[Any, Any]) -> Bites:
        """Planned only where no batch before was as large in every axis of every tensor."""
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        for known, bites in reversed(self._planned):
            if [*map(len, known)] == [*map(len, shapes)] and all(
                size <= most
                for shape, largest in zip(shapes, known, strict=True)
                for size, most in zip(shape, largest, strict=True)
            ):
                return bites
        self._planned.append((shapes, self._plan(batch)))
        return self._planned[-1][1]


def _add_batch(
    state: _State,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    device: torch.device | str,
    names: dict[int, str],
    bites: Bites,
) -> None:
    inputs, targets = map_tensors(lambda tensor: tensor.to(device), batch)
    with torch.enable_grad(), record():
        if isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        value = loss(outputs, targets)
    graph = walk([value], [None], None)
    check_graph(graph)
    reduction, divisor = _terms(graph)
    terms = float(divisor)

    def done(leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        name = names.get(id(leaf)) or graph.name(leaf)
        state.add(name, graph.samples, terms, results)

    with warnings.catch_warnings():
        if not terms:
            warnings.simplefilter("ignore", PackpropWarning)
        Observation(graph, state.extensions, create_graph=False, done=done, bites=bites).run(None)
    graph.let_go(keep=False)
    state.count(graph.samples, terms, value.detach(), reduction)


def _nothing_like(value: Any) -> Any:
    if isinstance(value, Moments):
        return Moments(value.samples, torch.zeros_like(value.mean), torch.zeros_like(value.mean))
    return map_tensors(torch.zeros_like, value)


def _terms(graph: Graph) -> tuple[str, Tensor | float]:
    """How the batch's loss was reduced, and what it was divided by."""
    calls = [loss.call for loss in graph.losses]
    if len(calls) == 1 and not graph.unlosed:
        (call,) = calls
        divisor = describe(call.function, call.args, call.kwargs).divisor
        given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
        given.apply_defaults()
        deprecated = [given.arguments.get(flag) for flag in ("size_average", "reduce")]
        reduction = given.arguments.get("reduction", "mean")
        # without the argument, a divisor of 1 may be that of a sum or that of a mean over one term
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
