"""The contents of a run's checkpoint, as types; packprop compares all that it reads with them before use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from packprop.applications.dataset.values import NotPlainError, decode, encode
from packprop.errors import BadInput
from packprop.store.plain import dtype_of
from packprop.store.schema import Size, Unfit, fitted, parsed

ASKED = "compute(..., checkpoint=...) was called."


SavedShards = list[tuple[Size, Size, str, list[Size], Any]]
"""Shards of one rank: extension, row, parameter, the index in the whole at which the shard begins, values."""


@dataclass(frozen=True)
class Facts:
    """The facts in the JSON file of every checkpoint."""

    said: str
    identity: dict[str, Any]
    may_have_more: ClassVar[bool] = True


@dataclass(frozen=True)
class RunFacts(Facts):
    """The facts in the JSON file of a run over a data set, whose ranks have a file of tensors each."""

    reading: Literal[0, 1]
    complete: bool
    number: Size


@dataclass(frozen=True)
class SavedPlace:
    """The place in the data and in the store that one rank continues from, and its random states.

    ``stored`` are samples, terms, and the checksum of the store.
    """

    batches: Size
    digest: str
    start: list[Tensor]
    generators: list[Tensor]
    loader: Any
    ended: bool
    now: dict[str, Tensor]
    begin: dict[str, Tensor]
    stored: tuple[Size, float, Size] | None
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse tensors that are not random states, and a place without a state of the CPU or of the data.

        Raises:
            ValueError: With the first fault.
        """
        for state in (*self.now.values(), *self.begin.values(), *self.start, *self.generators):
            if state.dtype != torch.uint8 or state.dim() != 1:
                raise Unfit(f"{list(state.shape)} of {state.dtype} is no random state")
        of_cpu = self.now.get("cpu"), self.begin.get("cpu"), *self.start[:1], *self.generators[:1]
        length = len(torch.get_rng_state())
        if [None if each is None else len(each) for each in of_cpu] != [length] * 4:
            raise Unfit("there is no random state of the CPU, or of the data")


@dataclass(frozen=True)
class SavedResults:
    """Results of the batches so far."""

    partial: list[tuple[Size, Size, str, Any]]
    rotations: list[tuple[Size, str, list[Any]]]
    dtypes: dict[str, str]
    reached: dict[str, Size]
    samples: Size
    terms: int | float
    loss: Tensor | Any
    reduction: Literal["", "mean", "sum"]
    weights: list[Any]
    again: list[Any]
    batches: list[tuple[Size, Size]]
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse unknown precisions, and a loss that is not a number.

        Raises:
            ValueError: With the first fault.
        """
        for name in self.dtypes.values():
            dtype_of(name)  # refuses all others
        if not isinstance(self.loss, (Tensor, float, int)):
            raise Unfit("loss is no number")


@dataclass(frozen=True)
class SavedRank:
    """The state that one rank continues from: its place, its sums, its chunk sizes, and its shards."""

    place: SavedPlace
    results: SavedResults
    chunks: list[tuple[list[list[Size]], list[Any]]]
    shards: SavedShards
    may_have_more: ClassVar[bool] = True


def packed(value: Any) -> list[Tensor]:
    """Return a value as the tensors of one file: the last one describes the others in JSON.

    Raises:
        BadInput: If it holds something that no file can hold; the message names its type.
    """
    tensors: list[Tensor] = []
    try:
        named = json.dumps(encode(value, tensors)).encode()
    except NotPlainError as error:
        raise BadInput(
            ASKED,
            f"a value of type {error}",
            "a checkpoint holds tensors, numbers and texts, and this is none of them",
            "use only these in the statistics of the extension and in the state of the data loader, or leave "
            "checkpoint out",
        ) from error
    return [*tensors, torch.frombuffer(bytearray(named), dtype=torch.uint8)]


def unpacked(kind: Any, tensors: Sequence[Tensor], part: str | None = None) -> Any:
    """Return the value that ``packed`` was given, or its entry ``part``, without reading other tensors.

    Raises:
        Unfit: If the tensors do not hold a value of this kind.
    """
    if not len(tensors):
        raise Unfit("a file of values holds nothing")
    plain = parsed(tensors[len(tensors) - 1].numpy().tobytes())
    if part is not None:
        plain = dict(fitted(dict[str, list[tuple[str, Any]]], plain).get("items", ())).get(part)
    value = decode(plain, tensors)
    fitted(kind, value)
    return value
