"""How a parameter enters a call of a torch function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.algebra.structures import Structure
from packprop.tensors.layout import Layout

Samples = slice | Tensor


Cotangents = Sequence[Tensor | None]


StructureOf = Callable[[Cotangents, Sequence[Layout], Samples], Structure]


class Fans(NamedTuple):
    """Groups of an affine map, and how many entries of each go in and come out.

    ``unfolds``: whether inputs are unfolded to positions, and gradients can be had without that.
    """

    groups: int
    fan_in: int
    fan_out: int
    unfolds: bool = False


@dataclass(frozen=True)
class Entry:
    """How one parameter enters one call.

    Args:
        parameter: A leaf, or a tensor computed from leaves alone.
        structure: Name of the structure, for tables and messages.
        meet: From cotangents at the outputs ``[v, *y]`` (``None``: inputs only, or an output that nothing
            reaches), their layouts, and a choice of samples, to a structure.
        scratch: Entries of temporary memory for one sample and one column, where these are more than
            the entries of the parameter and those of a sample's output.
        refusal: Why and what instead, where no number can be given.
        admits: Whether an axis of the (first) output can hold the samples.
        alone: Entries of temporary memory for one sample where only inputs are asked for.
        single: As ``scratch`` in a sweep of one column that unfolds no inputs, where there is such a way.
        fans: Groups and extents of an affine map.
        linear: Whether the outputs are known to be affine in the parameter, all else held.
        constant: Whether what multiplies the parameter is known to be one number for all samples.
        squares: As ``structure_of``, with squares of what multiplies the parameter; ``None`` if they are known
            from the structure itself (``with_squares``), or not at all.
    """

    parameter: Tensor
    structure: str
    structure_of: StructureOf
    scratch: int = 0
    refusal: tuple[str, str] | None = None
    admits: Callable[[int], bool] = lambda axis: True
    alone: int = 0
    single: int = 0
    fans: Fans | None = None
    linear: bool = False
    constant: bool = False
    squares: StructureOf | None = None


@dataclass(frozen=True)
class Call:
    """One call of a torch function that consumes trainable parameters, after it returned.

    Args:
        parameters: Trainable tensors among the arguments that do not depend on the samples.
        shape: Shape of the (first) output.
        unexpanded: The tensor that a parameter was expanded from, or the parameter itself.
        random_state: State of the random generators before the call, where the call drew from them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Tensor, ...]
    shape: torch.Size
    unexpanded: Callable[[Tensor], Tensor]
    random_state: Any = None

    def consumes(self, value: Any) -> bool:
        """Whether ``value`` is one of the trainable parameters of this call."""
        return any(value is parameter for parameter in self.parameters)


class Expansions:
    """Tensors that are parameters expanded to a larger shape, and what they were expanded from."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note(self, out: Tensor, given: Tensor) -> None:
        """``out`` was expanded from ``given``."""
        self._sources[id(out)] = (weakref.ref(out), self.source(given))

    def source(self, tensor: Tensor) -> Tensor:
        """What a tensor was expanded from, or the tensor itself."""
        reference, source = self._sources.get(id(tensor), (None, tensor))
        return source if reference is not None and reference() is tensor else tensor


def name_of(function: Callable[..., Any]) -> str:
    """The name of a torch function, as users know it."""
    return str(getattr(function, "__name__", function))
