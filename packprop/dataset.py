"""Quantities over a whole data set: batches are streamed, their unscaled results merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from rich.progress import track
from torch import Tensor, nn

from packprop.context import check_extensions, check_graph
from packprop.errors import BadInput, PackpropError
from packprop.graph import Graph, walk
from packprop.losses import describe
from packprop.monoid import lift, rescale
from packprop.observe import Observation
from packprop.tape import extend, is_extended, record, restore
from packprop.types import Extension, map_tensors, tensors_in

Value = Tensor | list[Tensor]


@dataclass
class Result(Mapping[Any, dict[str, Value]]):
    """Values by extension (or the name of the attribute that it saves) and parameter name.

    Args:
        tables: ``savefield -> parameter name -> value``.
        samples: Samples that they were computed from.
        loss: Mean loss over all terms, as the loss reduces it.
    """

    tables: dict[str, dict[str, Value]]
    samples: int
    loss: float

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
        notes = {"samples": str(self.samples), "loss": repr(self.loss), "lists": "\n".join(lists)}
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
        return cls(values, int(notes["samples"]), float(notes["loss"]))


@dataclass
class _State:
    """Merged partial results of the batches so far, as if the loss were a sum over terms."""

    extensions: Sequence[Extension]
    partial: dict[tuple[int, int, str], Any] = field(default_factory=dict)
    samples: int = 0
    terms: Tensor | float = 0.0
    loss: Tensor | float = 0.0

    def add(self, name: str, terms: Tensor | float, results: dict[Extension, list[Any]]) -> None:
        for place, extension in enumerate(self.extensions):
            for index, (row, value) in enumerate(
                zip(extension.rows, results.get(extension, []), strict=False)
            ):
                if value is None:
                    continue
                key = (place, index, name)
                partial = lift(row.over_n, rescale(value, terms, row.degree))
                before = self.partial.get(key)
                self.partial[key] = (
                    partial if before is None else row.over_n.merge(before, partial)
                )

    def result(self) -> Result:
        values: dict[str, dict[str, Value]] = {}
        names = list(dict.fromkeys(name for _, _, name in self.partial))
        for place, extension in enumerate(self.extensions):
            by_name = values.setdefault(extension.savefield, {})
            for name in names:
                rows = []
                for index, row in enumerate(extension.rows):
                    partial = self.partial.get((place, index, name))
                    value = None if partial is None else row.over_n.result(partial)
                    rows.append(rescale(value, 1 / self.terms, row.degree))
                if any(row is not None for row in rows):
                    by_name[name] = extension.finish(rows, self.samples)
        return Result(values, self.samples, float(self.loss / self.terms))


def compute(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: Iterable[tuple[Any, Any]],
    extensions: Sequence[Extension],
    *,
    progress: bool = True,
    device: torch.device | str | None = None,
) -> Result:
    """The quantities of ``extensions`` for the loss over a whole data set, batch by batch.

    They are those of one loss over all samples: under a mean loss the scale is 1 over the number of all terms,
    whatever the sizes of the batches. ``.grad`` is left alone and gradients of weights are not computed.

    Args:
        model: The model, in the mode (train or eval) that it shall be used in; need not be extended.
        loss: ``loss(model(inputs), targets)``, a loss module or function of torch that reduces by mean or sum.
        data: Batches ``(inputs, targets)``; inputs may be a tuple or a dictionary of arguments.
        extensions: What to compute.
        progress: Show a progress bar.
        device: Where batches are moved to; by default where the model's parameters are.

    Raises:
        BadInput: For extensions that need all samples in one batch, no data, or a loss whose number of terms
            is not known.
    """
    chosen = check_extensions("compute(...) was called.", list(extensions))
    for extension in chosen:
        if any(row.whole for row in extension.rows) or extension.subsampling is not None:
            raise BadInput(
                "compute(...) was called.",
                f"extension {extension.name}",
                "it relates samples of one batch to each other or by their index in it",
                "use it in `with backpack(...)` on one batch",
            )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    where = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    state = _State(chosen)
    borrowed = [module for module in model.modules() if not is_extended(module)]
    extend(model)
    try:
        batches = track(data, description="packprop", transient=True) if progress else data
        for batch in batches:
            _add_batch(state, model, loss, batch, where, names)
    finally:
        for module in borrowed:
            restore(module)
    if state.samples == 0:
        raise BadInput(
            "compute(...) was called.", "data", "it held no batch", "give at least one batch"
        )
    return state.result()


def _add_batch(
    state: _State,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    device: torch.device | str,
    names: dict[int, str],
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
    terms = _terms(graph)

    def done(leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        state.add(names.get(id(leaf), graph.name(leaf)), terms, results)

    Observation(graph, state.extensions, create_graph=False, done=done).run(None)
    graph.let_go(keep=False)
    state.samples += graph.samples
    state.terms = state.terms + terms
    state.loss = state.loss + value.detach() * terms


def _terms(graph: Graph) -> Tensor | float:
    """What the batch's loss was divided by."""
    calls = [loss.call for loss in graph.losses]
    divisors = [describe(call.function, call.args, call.kwargs).divisor for call in calls]
    if len(divisors) != 1 or divisors[0] is None or graph.unlosed:
        raise PackpropError(
            "Quantities of a loss over several batches were asked for.",
            f"the loss of a batch, made of {len(calls)} recorded loss functions",
            "what it is divided by is not known, so that batches cannot be given their weight",
            "use one loss function of torch with reduction 'mean' or 'sum'",
        )
    return divisors[0]
