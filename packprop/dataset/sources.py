"""Where batches come from: samples that are put together here, or batches that come as they are."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from packprop.dataset.data_facts import data_set_facts, loader_facts
from packprop.dataset.describing import Describer
from packprop.dataset.digests import spot_check
from packprop.tensors.nesting import tensors_in


@dataclass(frozen=True)
class Ranges:
    """Indices of the samples of some batches, in the data's order: a sampler of batches.

    Args:
        samples: Samples in all batches.
        size: Samples in a batch; the last one may have fewer.
        begin: The first batch.
        step: From one batch to the next.
    """

    samples: int
    size: int
    begin: int = 0
    step: int = 1

    @property
    def numbers(self) -> range:
        """Numbers of the batches."""
        return range(self.begin, -(-self.samples // self.size), self.step)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[list[int]]:
        for number in self.numbers:
            yield list(range(number * self.size, min(self.samples, (number + 1) * self.size)))


@dataclass(frozen=True)
class Samples:
    """A data set of single samples.

    Args:
        data: The data set; its samples have indices.
        size: Samples in a batch.
    """

    data: Any
    size: int

    @property
    def tensors(self) -> Sequence[Tensor] | None:
        """Tensors whose leading axes hold the samples, where there is nothing else to a sample."""
        plain = type(self.data).__getitem__ is TensorDataset.__getitem__
        return self.data.tensors if plain else None

    def open(self, begin: int, rank: int = 0, world: int = 1) -> Iterator[Any]:
        """Batches from number ``begin`` on: of ``world`` in a row the one of number ``rank``."""
        ranges = Ranges(len(self.data), self.size, begin + rank, world)
        if self.tensors is not None:
            return (tuple(t[at[0] : at[-1] + 1] for t in self.tensors) for at in ranges)
        return iter(DataLoader(self.data, batch_sampler=ranges))

    def facts(self) -> dict[str, Any]:
        """What tells these data from others, without reading them all."""
        spots = None if self.tensors is None else spot_check(self.tensors)
        return {"samples": len(self.data), "samples in a batch": self.size, "some values": spots}

    def described(self, describer: Describer) -> dict[str, Any]:
        """What reads the samples, and some of them; nothing where the tensors are known."""
        return {} if self.tensors is not None else data_set_facts(self.data, describer)

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)


@dataclass(frozen=True)
class Given:
    """Batches as the user's own loader yields them.

    Args:
        data: Can be iterated over.
    """

    data: Iterable[Any]

    @property
    def is_read_once(self) -> bool:
        """Whether the data are gone when they have been read."""
        return isinstance(self.data, Iterator)

    @property
    def has_state(self) -> bool:
        """Whether the data say where they are, and can be put there, as a ``StatefulDataLoader`` does."""
        return all(callable(getattr(self.data, name, None)) for name in ("state_dict", "load_state_dict"))

    def generators(self) -> list[torch.Generator]:
        """Generators that a data loader and its samplers draw from, each once."""
        loader: Any = self.data
        samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
        samplers.append(getattr(samplers[1], "sampler", None))
        found = [getattr(each, "generator", None) for each in (loader, *samplers)]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def facts(self) -> dict[str, Any]:
        """What tells these data from others, without reading them."""
        return {"batches": "of a loader with a state" if self.has_state else "as they are given"}

    def described(self, describer: Describer) -> dict[str, Any]:
        """What yields the batches, and some of them where they can be seen without reading."""
        return loader_facts(self.data, describer)

    def __len__(self) -> int:
        return len(self.data) if isinstance(self.data, Sized) else 0


Source = Samples | Given


def source_of(data: Any, size: int) -> Source:
    """Samples, if the data have indices; a data set without becomes a loader."""
    if isinstance(data, Dataset):
        if isinstance(data, Sized) and not isinstance(data, torch.utils.data.IterableDataset):
            return Samples(data, size)
        return Given(DataLoader(data, size))
    return Given(data)


class Draws:
    """Random numbers of the data: the global generator of the CPU, apart from what is drawn between batches.

    So the order of a shuffled loader, and what it does to its samples, depends on how many batches it gave, and
    not on what was computed from them. It begins with a state that the global one determines.
    """

    def __init__(self) -> None:
        seed = (
            int.from_bytes(hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest())
            >> 1
        )
        self.state: Tensor = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, the global generator is that of the data."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)


def chained(before: str, batch: Any) -> str:
    """A text that stands for the batches so far and this one, in their order."""
    return hashlib.blake2b((before + spot_check([*tensors_in(batch)])).encode(), digest_size=8).hexdigest()


def _as_bytes(numbers: list[Any]) -> Tensor:
    """Bytes, as the state of a generator of torch is."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _from_bytes(state: Tensor) -> list[float]:
    return state.clone().view(torch.float64).tolist()


class PythonNumbers:
    """The numbers that the functions of Python's ``random`` draw, as a generator of torch has them."""

    def get_state(self) -> Tensor:
        """Whole numbers below 2**32, and a number that waits, ``NaN`` for none."""
        _, words, waiting = random.getstate()
        return _as_bytes([*words, math.nan if waiting is None else waiting])

    def set_state(self, state: Tensor) -> None:
        """Put back what ``get_state`` returned."""
        *words, waiting = _from_bytes(state)
        random.setstate((3, tuple(map(int, words)), None if math.isnan(waiting) else waiting))


class NumpyNumbers:
    """The numbers that the functions of ``numpy.random`` draw; empty where another algorithm was put there."""

    def get_state(self) -> Tensor:
        """Whole numbers below 2**32, the place among them, whether a number waits, and that number."""
        state: Any = np.random.get_state()  # noqa: NPY002  # the one that functions draw from
        return _as_bytes([] if isinstance(state, dict) else [*state[1], *state[2:]])

    def set_state(self, state: Tensor) -> None:
        """Put back what ``get_state`` returned."""
        if len(state):
            *words, place, waits, waiting = _from_bytes(state)
            kept = ("MT19937", np.array(words, np.uint32), int(place), int(waits), waiting)
            np.random.set_state(kept)  # noqa: NPY002  # the one that functions draw from


Drawing = torch.Generator | PythonNumbers | NumpyNumbers
"""What numbers are drawn from."""

GLOBAL = (PythonNumbers(), NumpyNumbers())
"""What data draw from beside generators of torch; the data's own objects are not known here."""


def states_of(generators: Sequence[Drawing]) -> list[Tensor]:
    """The states of generators."""
    return [generator.get_state() for generator in generators]


def set_states(generators: Sequence[Drawing], states: Sequence[Tensor]) -> None:
    """Put back what ``states_of`` returned."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
