"""The contents of a run's checkpoint, as declared types: everything read has to fit them before its use."""

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
from packprop.store.schema import Size, Unfit, fitted_as, parsed

ASKED = "compute(..., checkpoint=...) was called."

Pieces = list[tuple[tuple[Size, Size, str], Tensor]]
"""A piece of a growing result: extension, row, parameter, and the piece."""


@dataclass(frozen=True)
class Facts:
    """The contents of the JSON file."""

    said: str
    identity: dict[str, Any]
    state: Any
    may_have_more: ClassVar[bool] = True


@dataclass(frozen=True)
class SavedDraws:
    """Random states, by device and by generator."""

    devices: dict[str, Tensor]
    generators: list[Tensor]

    def __post_init__(self) -> None:
        """Refuse anything that is no random state.

        Raises:
            ValueError: If there is none of the CPU, or one of another kind.
        """
        require_states([*self.devices.values(), *self.generators])
        if "cpu" not in self.devices or self.devices["cpu"].shape != torch.get_rng_state().shape:
            raise Unfit("there is no random state of the CPU")


@dataclass(frozen=True)
class SavedRank:
    """The state that one rank continues from."""

    batches: Size
    digest: str
    start: list[Any]
    draws: Tensor
    generators: list[Tensor]
    loader: Any
    ended: bool
    now: SavedDraws
    begin: SavedDraws
    stored: tuple[Size, float] | None
    samples: Size
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse anything that is no random state.

        Raises:
            ValueError: If it is not.
        """
        require_states([self.draws, *self.generators])
        if self.draws.shape != torch.get_rng_state().shape:
            raise Unfit("there is no random state of the data")


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
    again: list[Any]
    batches: list[tuple[Size, Size]]
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse names that are none of a precision.

        Raises:
            ValueError: With the first.
        """
        for name in self.dtypes.values():
            if dtype_of(name) is None:
                raise Unfit(f"unknown precision {name!r}")
        if not isinstance(self.loss, (Tensor, float, int)):
            raise Unfit("loss is no number")


@dataclass(frozen=True)
class SavedPart:
    """One rank's sums, without results that grow with the data, and its chunk sizes."""

    results: SavedResults
    chunks: list[tuple[list[list[Size]], list[Any]]]
    may_have_more: ClassVar[bool] = True


@dataclass(frozen=True)
class SavedRun(SavedPart):
    """The state that a run continues from, without growing results: sums are the first rank's."""

    reading: Literal[0, 1]
    complete: bool
    number: Size
    ranks: list[SavedRank]
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a run without ranks.

        Raises:
            ValueError: If there is no rank.
        """
        if not self.ranks:
            raise Unfit("there is no rank")


def packed(value: Any) -> list[Tensor]:
    """Return a value as the tensors of one file: the first one describes the others in JSON.

    Raises:
        BadInput: If it holds something that has no form in a file, with its type.
    """
    tensors: list[Tensor] = []
    try:
        named = json.dumps(encode(value, tensors)).encode()
    except NotPlainError as error:
        raise BadInput(
            ASKED,
            f"a value of type {error}",
            "results and positions are kept as tensors, numbers and texts, and this is neither",
            "let the statistics of the extension, or the state of the data loader, be made of such; "
            "or leave checkpoint out",
        ) from error
    return [torch.frombuffer(bytearray(named), dtype=torch.uint8), *tensors]


def unpacked(kind: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that ``packed`` was given.

    Raises:
        Unfit: If it was given nothing of this kind.
    """
    if not tensors:
        raise Unfit("a file of values holds nothing")
    return fitted_as(kind, decode(parsed(tensors[0].numpy().tobytes()), tensors[1:]))


def require_states(states: list[Tensor]) -> None:
    """Refuse tensors that are no random states.

    Raises:
        ValueError: For the first.
    """
    for state in states:
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise Unfit(f"{list(state.shape)} of {state.dtype} is no random state")
