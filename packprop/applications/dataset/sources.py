"""Sources of batches: samples that packprop puts together, or batches that the user's own loader yields."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from packprop.applications.dataset.all_samples import as_data_set
from packprop.applications.dataset.data_facts import data_set_facts, loader_facts
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.digests import seed_from, spot_check
from packprop.applications.dataset.messages import described
from packprop.errors import BadInput, require_number

BATCH_SIZE = 128
"""Samples in a batch if the data come sample by sample."""


@dataclass(frozen=True)
class Samples:
    """A data set of single samples.

    Args:
        data: The data set; its samples have indices.
        size: Samples in a batch; the last one may have fewer.
    """

    data: Any
    size: int
    is_read_once: ClassVar = False
    has_state: ClassVar = False

    @property
    def tensors(self) -> Sequence[Tensor] | None:
        """The tensors whose leading axes hold the samples, if the data set only indexes them; else ``None``."""
        methods = ("__len__", "__getitem__", "__getitems__")  # a loader calls the last one if there is one
        plain = all(getattr(type(self.data), m, None) is getattr(TensorDataset, m, None) for m in methods)
        return self.data.tensors if plain else None

    def generators(self) -> list[torch.Generator]:
        """Return an empty list: packprop takes the samples in their order."""
        return []

    def open(self, begin: int, rank: int, world: int) -> Iterator[Any]:
        """Yield every batch of this rank: the batch ``begin + rank``, and every ``world``-th one after it."""
        starts = range((begin + rank) * self.size, len(self.data), world * self.size)
        if self.tensors is not None:
            return (tuple(t[at : at + self.size] for t in self.tensors) for at in starts)
        indices = range(len(self.data))
        return iter(DataLoader(self.data, batch_sampler=([*indices[at : at + self.size]] for at in starts)))

    def indices(self, number: int) -> range:
        """Return the indices of the samples in the batch with this number among those of all ranks."""
        return range(number * self.size, min((number + 1) * self.size, len(self.data)))

    def facts(self) -> dict[str, Any]:
        """Return facts that tell these data from others, without reading them all."""
        spots = None if self.tensors is None else spot_check(self.tensors)
        return {"samples": len(self.data), "samples in a batch": self.size, "some values": spots}

    def described(self, describer: Describer) -> dict[str, Any]:
        """Describe the code that reads the samples, and some samples; return nothing for plain tensors."""
        return {} if self.tensors is not None else data_set_facts(self.data, describer)

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)


def samplers_of(data: Any) -> list[Any]:
    """Return the samplers of a data loader, with the one inside of its batch sampler; none for other data."""
    found = [getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    found.append(getattr(found[1], "sampler", None))
    return [each for each in found if each is not None]


@dataclass(frozen=True)
class Given:
    """Batches as the user's own loader yields them.

    Args:
        data: An iterable of batches.
    """

    data: Iterable[Any]

    @property
    def is_read_once(self) -> bool:
        """Tell whether the data are gone after one reading."""
        return isinstance(self.data, Iterator)

    @property
    def has_state(self) -> bool:
        """Tell whether the data know their position, and can restore it, as a ``StatefulDataLoader`` does."""
        return all(callable(getattr(self.data, name, None)) for name in ("state_dict", "load_state_dict"))

    def generators(self) -> list[torch.Generator]:
        """Return generators that a data loader and its samplers draw from, each once."""
        found = [getattr(each, "generator", None) for each in (self.data, *samplers_of(self.data))]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def facts(self) -> dict[str, Any]:
        """Return facts that tell these data from others, without reading them."""
        return {"batches": "of a loader with a state" if self.has_state else "as they are given"}

    def described(self, describer: Describer) -> dict[str, Any]:
        """Describe the code that yields the batches, and some batches or samples that need no iteration."""
        return loader_facts(self.data, describer)

    def open(self, begin: int, rank: int, world: int) -> Iterator[Any]:
        """Yield the loader's batches from its own position on, without ``persistent_workers``.

        Persistent workers keep drawing from their last random state, which packprop cannot restore.
        """
        loader: Any = self.data
        if type(loader) is not DataLoader or not loader.persistent_workers:
            return iter(self.data)
        fresh = copy.copy(loader)
        vars(fresh)["persistent_workers"] = False  # a DataLoader refuses the assignment
        return iter(fresh)

    def __len__(self) -> int:
        try:
            return len(self.data) if isinstance(self.data, Sized) else 0
        except TypeError:  # a loader of a data set that has no length
            return 0


Source = Samples | Given


def source_of(asked: str, data: Any, batch_size: int | None, whole: bool) -> Source:
    """Return the source of data of any form: of samples if they have indices, else of batches.

    Args:
        asked: The call of the user, for messages.
        data: Data of any form.
        batch_size: Samples in a batch; only for data that come sample by sample.
        whole: True if the model takes whole batches, without separate targets.

    Raises:
        BadInput: For data of another form; for a batch size that is no positive number, or with batches.
    """
    if batch_size is not None:
        require_number(asked, "batch_size", batch_size, "number of samples")
    data, where = as_data_set(asked, data, whole), ""
    if isinstance(data, Dataset):
        size = batch_size or BATCH_SIZE
        has_indices = isinstance(data, Sized) and not isinstance(data, IterableDataset)
        return Samples(data, size) if has_indices else Given(DataLoader(data, size))
    if isinstance(data, Mapping):
        why = "a mapping is one batch, not data that batches are taken from"
        instead = "give a list of batches, [batch], a data loader or a Dataset"
    elif not isinstance(data, Iterable):
        why = "it is neither a data set nor can it be iterated over"
        instead = "give a Dataset, a pair of tensors, or batches (inputs, targets)"
    elif batch_size is None:
        return Given(data)
    else:
        where, why = f"batch_size={batch_size} with ", "these data come in batches already"
        instead = "leave the batch size out, or give a Dataset or a pair of tensors"
    raise BadInput(asked, f"{where}data {described(data)}", why, instead)


def generator_of_data() -> torch.Generator:
    """Return a generator for the draws of the data, seeded by the state of the global generator."""
    return torch.Generator().manual_seed(seed_from(torch.get_rng_state().numpy().tobytes()))


@contextlib.contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Give the CPU's global generator the state of the data's generator inside; keep both states afterwards.

    So the order of a shuffled loader, and its random changes to samples, depend only on the number of batches
    read, and not on what the computation draws in between.
    """
    outside = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(outside)


class Numbers:
    """A generator of Python or numpy, with ``get_state`` and ``set_state`` like a ``torch.Generator``.

    Args:
        source: A generator, or a module whose functions draw from one: ``random`` or ``numpy.random``.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def get_state(self) -> Tensor:
        """Return the state, as a tensor of bytes."""
        if hasattr(self.source, "getstate"):
            state = self.source.getstate()
        elif isinstance(self.source, np.random.Generator):
            state = self.source.bit_generator.state
        else:
            state = self.source.get_state(legacy=False)
        return torch.frombuffer(bytearray(json.dumps(state, default=_plain).encode()), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """Restore a state that ``get_state`` returned."""
        found = json.loads(state.numpy().tobytes(), object_hook=_array)
        if hasattr(self.source, "getstate"):
            version, numbers, waiting = found
            self.source.setstate((version, tuple(numbers), waiting))
        elif isinstance(self.source, np.random.Generator):
            self.source.bit_generator.state = found
        else:
            self.source.set_state(found)


def _plain(value: Any) -> Any:
    """Return a value of numpy in a form that JSON can hold."""
    return {"dtype": str(value.dtype), "values": value.tolist()}


def _array(found: dict[str, Any]) -> Any:
    """Return the value that ``_plain`` was given; return any other mapping unchanged."""
    return np.array(found["values"], found["dtype"])[()] if found.keys() == {"dtype", "values"} else found


Drawing = torch.Generator | Numbers
"""Types of generators."""

GLOBAL = (Numbers(random), Numbers(np.random))
"""The generators behind Python's ``random`` and ``numpy.random``."""


def unless_drawn(was: Tensor, begun: Tensor, now: Tensor) -> Tensor:
    """Return the state to leave a user's generator in: its state before, if the run has not drawn from it."""
    return was if torch.equal(begun, now) else now
