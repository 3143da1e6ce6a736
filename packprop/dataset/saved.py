"""What a checkpoint of a run holds, as declared types: what was read is fitted to them before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from packprop.store.plain import dtype_of
from packprop.store.schema import Size, Unfit

Pieces = list[tuple[tuple[Size, Size, str], Tensor]]
"""What has come to results that grow: extension, row, parameter, and the piece."""


@dataclass(frozen=True)
class Facts:
    """What the JSON file says."""

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
        """Refuse what is no random state.

        Raises:
            ValueError: If there is none of the CPU, or one of another kind.
        """
        require_states([*self.devices.values(), *self.generators])
        if "cpu" not in self.devices or self.devices["cpu"].shape != torch.get_rng_state().shape:
            raise Unfit("there is no random state of the CPU")


@dataclass(frozen=True)
class SavedRank:
    """What one rank goes on from."""

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
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse what is no random state.

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
class SavedRun:
    """What a run goes on from, but for what grows with the data."""

    reading: Literal[0, 1]
    complete: bool
    number: Size
    results: SavedResults
    chunks: list[tuple[list[list[Size]], list[Any]]]
    ranks: list[SavedRank]
    may_have_more: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a run of nobody.

        Raises:
            ValueError: If there is no rank.
        """
        if not self.ranks:
            raise Unfit("there is no rank")


def require_states(states: list[Tensor]) -> None:
    """Refuse tensors that are no random states.

    Raises:
        ValueError: For the first.
    """
    for state in states:
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise Unfit(f"{list(state.shape)} of {state.dtype} is no random state")
