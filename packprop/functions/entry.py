"""How a parameter enters a call of a torch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.algebra.structures import Structure
from packprop.tensors.layout import Layout
from packprop.tensors.state import version

Samples = slice | Tensor
"""A choice of samples: a slice, or a tensor of indices."""


Cotangents = Sequence[Tensor | None]
"""One for each output of a call, ``[v, *y]``; ``None`` where nothing arrived."""


class ArrivedCotangents(list[Tensor | None]):
    """Cotangents of one sweep at one use."""

    derived: Any = None
    """What a rule has computed from them for all parameters of the use."""


StructureOf = Callable[[Cotangents, Sequence[Layout], Samples], Structure]
"""From cotangents at the outputs, the layouts of the outputs, and a choice of samples, to a structure."""


class Fans(NamedTuple):
    """Groups of an affine map, and how many entries of each go in and come out.

    ``channels``: of a group of the images that the map unfolds to positions; gradients can be computed without
    unfolding. 0 if it unfolds nothing.
    ``rows``: how often the map is applied in one call; ``None`` for what the (first) output has room for.
    """

    groups: int
    fan_in: int
    fan_out: int
    channels: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Scratch:
    """How many entries of temporary memory a structure takes for one sample.

    0 where it takes no more than the entries of the parameter or of a sample's output, whichever are more.

    Args:
        per_column: For each column of the cotangent.
        without_unfolding: For a single column, where an algorithm that does not unfold the inputs is used.
        inputs_only: Where there is no cotangent.
    """

    per_column: int = 0
    without_unfolding: int = 0
    inputs_only: int = 0


NO_SCRATCH = Scratch()


@dataclass(frozen=True)
class Entry:
    """How one parameter enters one call.

    Args:
        parameter: A leaf, or a tensor computed from leaves alone (by its place in the graph, if it was read there).
        structure: Name of the structure, for tables and messages.
        structure_of: Builds the structure from cotangents at the outputs ``[v, *y]``, their layouts, and a
            choice of samples. A cotangent is ``None`` where only inputs are asked for, or where nothing reaches
            the output.
        refusal: Why no number can be given and what to do instead, where that is so.
        admits: Whether an axis of the outputs can hold the samples.
        sample_axes: For each output the one axis that can hold the samples; ``None`` if ``admits`` says it all.
        sequences: For each output the sequence that each entry along its sample axis belongs to, where outputs
            are packed sequences: all entries of a sequence are of one sample.
        scratch: Temporary memory that ``structure_of`` takes.
        fans: Groups and extents, for an affine map.
        linear: Whether the outputs are known to be affine in the parameter, with everything else fixed.
        constant: Whether the parameter is known to be multiplied by one number, the same for all samples.
        squares: As ``structure_of``, with the square of what multiplies the parameter. ``None`` if the
            structure itself tells the squares (``with_squares``), or if they are not known.
        sparse: Whether torch's own gradient of the parameter is a sparse tensor.
        calls_node: If a node is called when the structure is built, from the layouts of its outputs: where the
            parameter comes from. The graph must be there then.
        effort: Says how samples are pulled back, once some were, from the layout of the first output: for the
            fallback. ``None`` where a rule says how the parameter enters.
    """

    parameter: Any
    structure: str
    structure_of: StructureOf
    refusal: tuple[str, str] | None = None
    admits: Callable[[int], bool] = lambda axis: True
    sample_axes: Sequence[int] | None = None
    sequences: Sequence[tuple[int, ...]] | None = None
    scratch: Scratch = NO_SCRATCH
    fans: Fans | None = None
    linear: bool = False
    constant: bool = False
    squares: StructureOf | None = None
    sparse: bool = False
    calls_node: Callable[[Sequence[Layout]], GradientEdge | None] = lambda layouts: None
    effort: Callable[[Layout], str] | None = None

    def but(self, **changed: Any) -> Entry:
        """As ``dataclasses.replace``, in a fifth of the time: entries are made for each use in each pass."""
        entry = object.__new__(Entry)
        vars(entry).update(vars(self), **changed)
        return entry


class Taken(NamedTuple):
    """A tensor that went into a call, and what may have changed since.

    Args:
        tensor: The tensor.
        version: How often it had been changed in place.
        requires_grad: Whether it required gradients.
    """

    tensor: Tensor
    version: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Taken:
        """A tensor as it is now."""
        return cls(tensor, version(tensor), tensor.requires_grad)


@dataclass(eq=False)
class Call:
    """One call of a torch function that consumes trainable parameters, after it returned.

    Args:
        parameters: Trainable tensors among the arguments that do not depend on the samples.
        shape: Shape of the (first) output.
        unexpanded: From a parameter to the tensor that it was expanded from, or to itself.
        random_state: State of the random generators before the call, if the call drew from them.
        taken: What went in, as it was then; ``None`` if entries are made at once.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Tensor, ...]
    shape: torch.Size
    unexpanded: Callable[[Tensor], Tensor]
    random_state: Any = None
    taken: tuple[Taken, ...] | None = None

    def consumes(self, value: Any) -> bool:
        """Whether ``value`` is one of the trainable parameters of this call."""
        return any(value is parameter for parameter in self.parameters)

    def trains(self, parameter: Tensor) -> bool:
        """Whether a parameter of an entry required gradients when the call was made."""
        if self.taken is None:
            return parameter.requires_grad
        for each in self.taken:
            if each.tensor is parameter:
                return each.requires_grad
        return any(each is parameter or self.unexpanded(each) is parameter for each in self.parameters)


def functions_named(*names: str) -> frozenset[Callable[..., Any]]:
    """Functions and methods with these names, as far as this release of PyTorch has them."""
    owners = (torch, Tensor)
    return frozenset(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))


def plain_options(value: Any, numbers: bool = False) -> Any:
    """The integers and texts in a value, and its other numbers if wanted; ``None`` in place of all else."""
    if isinstance(value, (list, tuple)):
        return tuple(plain_options(each, numbers) for each in value)
    return value if isinstance(value, (int, str)) or (numbers and isinstance(value, float)) else None


def name_of(function: Callable[..., Any]) -> str:
    """The name of a torch function, as users know it."""
    return str(getattr(function, "__name__", function))


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a torch function overwrites its first argument, by its name."""
    name = name_of(function)
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
