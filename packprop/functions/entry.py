"""How a parameter enters a node of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.algebra.structures import Structure
from packprop.tensors.layout import Layout

Samples = slice | Tensor
"""A choice of samples: a slice, or a tensor of indices."""


Cotangents = Sequence[Tensor | None]
"""One for each output of a node, ``[v, *y]``; ``None`` where nothing arrived."""


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
    ``rows``: how often the map is applied in one node; ``None`` for what the (first) output has room for.
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
    """How one parameter enters one node.

    Args:
        parameter: A leaf, or what was computed from leaves alone, by its place in the graph.
        structure: Name of the structure, for tables and messages.
        structure_of: Builds the structure from cotangents at the outputs ``[v, *y]``, their layouts, and a
            choice of samples. A cotangent is ``None`` where only inputs are asked for, or where nothing reaches
            the output.
        refusal: Why no number can be given and what to do instead, where that is so.
        admits: Whether an axis of the outputs can hold the samples. Elsewhere the node is called for each
            sample.
        sample_axes: For each output the one axis that can hold the samples; ``None`` if ``admits`` says it all.
        scratch: Temporary memory that ``structure_of`` takes.
        fans: Groups and extents, for an affine map.
        linear: Whether the outputs are known to be affine in the parameter, with everything else fixed.
        constant: Whether the parameter is known to be multiplied by one number, the same for all samples.
        squares: As ``structure_of``, with the square of what multiplies the parameter. ``None`` if the
            structure itself tells the squares (``with_squares``), or if they are not known.
        sparse: Whether torch's own gradient of the parameter is a sparse tensor.
        calls_node: If a node is called when the structure is built, from the layouts of its outputs: where the
            parameter comes from. The graph must be there then.
        by_rule: Whether a rule says how the parameter enters; otherwise the node is called for each sample.
    """

    parameter: Any
    structure: str
    structure_of: StructureOf
    refusal: tuple[str, str] | None = None
    admits: Callable[[int], bool] = lambda axis: True
    sample_axes: Sequence[int] | None = None
    scratch: Scratch = NO_SCRATCH
    fans: Fans | None = None
    linear: bool = False
    constant: bool = False
    squares: StructureOf | None = None
    sparse: bool = False
    calls_node: Callable[[Sequence[Layout]], GradientEdge | None] = lambda layouts: None
    by_rule: bool = True

    def but(self, **changed: Any) -> Entry:
        """As ``dataclasses.replace``, in a fifth of the time: entries are made for each use in each pass."""
        entry = object.__new__(Entry)
        vars(entry).update(vars(self), **changed)
        return entry


def plain_options(value: Any, numbers: bool = False) -> Any:
    """The integers and texts in a value, and its other numbers if wanted; ``None`` in place of all else."""
    if isinstance(value, (list, tuple)):
        return tuple(plain_options(each, numbers) for each in value)
    return value if isinstance(value, (int, str)) or (numbers and isinstance(value, float)) else None
