"""The peak of each part of a step: the bytes alive at once, and their purposes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packprop.engine.memory.live import LiveBytes, strided
from packprop.engine.memory.mesh import Mesh, Shards
from packprop.engine.tensors.dry import storage_key
from packprop.engine.tensors.nesting import tensors_in

LARGEST = 5
"""The number of tensors in the list of the largest ones at a peak."""


CUDA_BLOCK = 512
"""CUDA's allocator rounds sizes up to a multiple of these bytes."""


class Peak(NamedTuple):
    """The most bytes that were alive at once in a part of a step.

    Args:
        size: The number of bytes.
        parts: The bytes of each kind of tensor.
        items: The largest single tensors: (description, bytes).
    """

    size: int
    parts: dict[str, int]
    items: list[tuple[str, int]]

    def beside(self, kind: str, size: int) -> Peak:
        """Return the same peak, plus ``size`` bytes of the step before that stay in memory throughout."""
        parts = {**self.parts, kind: self.parts.get(kind, 0) + size}
        items = sorted([*self.items, (f"{kind}: of the step before", size)], key=lambda item: -item[1])
        return Peak(self.size + size, parts, items[:LARGEST])


class PeakRecorder:
    """Counts the storage that is alive in a dry run, and says what each byte is for.

    Args:
        device: The device of the step.

    Attributes:
        live: The count, which is on while the step runs.
        partial_results: Returns the tensors of results that are not saved yet.
        saved_bytes: Bytes of all results that were saved.
    """

    def __init__(self, device: torch.device) -> None:
        self.live = LiveBytes(CUDA_BLOCK if device.type == "cuda" else 1, self._look)
        self.partial_results: Callable[[], Iterable[Tensor]] = tuple
        self.saved_bytes = 0
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._shards: Shards | None = None
        self._parts: dict[str, int] = {}
        self._items: list[tuple[str, int]] = []

    def own_model(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        """Count a model, or one device's part of it; label its gradients from now on."""
        self._model = weakref.ref(model)  # the count refers to this object: a circle would keep the copy alive
        self.live.own(model.parameters(), "parameters")
        self.live.own(model.buffers(), "buffers")
        if mesh is not None:
            self._shards = Shards(model, self.live, mesh)
            self.live.settle = self._shards.settle

    def own_result(self, value: Any) -> None:
        """Label the tensors of a value that is saved on a parameter as results."""
        for tensor in tensors_in(value):
            share = 1.0 if self._shards is None else self._shards.share(tensor)
            self.live.saved[storage_key(tensor)] = share
            self.saved_bytes += round(share * tensor.nbytes)

    def saved_alive(self) -> int:
        """Return the bytes of the saved results that are still alive."""
        return sum(round(share * self.live.sizes.get(key, 0)) for key, share in self.live.saved.items())

    def end_part(self) -> Peak:
        """Return the peak of the part of the step that ends here; the next part begins."""
        peak = Peak(self.live.peak, self._parts, self._items)
        self.live.restart()
        return peak

    def _look(self) -> None:
        """Record, at a new peak, the bytes of each kind of tensor, and the largest tensors."""
        kinds = {key: label for key, (label, _) in self.live.labels.items()}
        kinds |= dict.fromkeys(self.live.saved.keys() & kinds.keys(), "results")
        kinds |= dict.fromkeys(map(storage_key, self.partial_results()), "results")
        model = self._model()
        parameters = [] if model is None else model.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        kinds |= dict.fromkeys(map(storage_key, strided(gradients)), "gradients")
        sizes = self.live.sizes
        self._parts = {}
        for key, size in sizes.items():
            self._parts[kinds[key]] = self._parts.get(kinds[key], 0) + size
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:LARGEST]
        self._items = [(f"{kinds[key]}: {self.live.labels[key][1]}", sizes[key]) for key in largest]
