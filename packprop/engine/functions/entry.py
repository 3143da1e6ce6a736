"""Entries, which describe the way in which a parameter enters a node of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.algebra.structures import Structure
from packprop.engine.tensors.layout import Layout

Samples = slice | Tensor
"""A choice of samples: a slice, or a tensor of indices."""

Cotangents = Sequence[Tensor | None]
"""One cotangent for each output of a node, ``[v, *y]``; ``None`` if none has arrived."""


class ArrivedCotangents(list[Tensor | None]):
    """Cotangents of one sweep at one use.

    ``derived`` holds what a rule computes from these cotangents for all parameters of the use.
    """

    derived: Any = None


StructureOf = Callable[[Cotangents, Sequence[Layout], Samples], Structure]
"""Maps cotangents at the outputs, the layouts of the outputs, and a choice of samples to a structure."""


class Fans(NamedTuple):
    """Groups of an affine map, with the numbers of inputs and outputs of each group.

    ``channels``: the channels in a group of the images that the map unfolds to positions; packprop can compute
    their gradients without unfolding. 0 if the map unfolds nothing.
    ``rows``: the number of rows that one node maps; ``None`` to count them in the (first) output.
    ``in_order``: whether gradients ``[g, o, i]`` have the order of the parameter in memory.
    """

    groups: int
    fan_in: int
    fan_out: int
    channels: int = 0
    rows: int | None = None
    in_order: bool = False


@dataclass(frozen=True)
class Scratch:
    """Entries of temporary memory that a structure takes for one sample.

    0 means no more than the larger one of the parameter and a sample's output.

    Args:
        per_column: Entries for each column of the cotangent.
        without_unfolding: Entries for a single column, with an algorithm that does not unfold the inputs.
        inputs_only: Entries without a cotangent.
    """

    per_column: int = 0
    without_unfolding: int = 0
    inputs_only: int = 0


@dataclass(frozen=True)
class Entry:
    """The way in which one parameter enters one node.

    Args:
        parameter: A leaf; or a tensor computed from leaves alone, given by its place in the graph.
        structure: Name of the structure, for tables and messages.
        structure_of: Builds the structure from cotangents at the outputs ``[v, *y]``, their layouts, and a
            choice of samples. A cotangent is ``None`` if a statistic needs only the inputs, or if no cotangent
            reaches the output.
        refusal: The reason why the parameter has no per-sample gradient, and what to do instead; ``None`` if it
            has one.
        admits: Tells whether an axis of the outputs can hold the samples. If they are on another axis, packprop
            calls the node for each sample.
        features: Axis of the output that the parameter makes, such as the features of a linear layer, so that
            it is no axis of a batch; ``None`` if there is none.
        sample_axes: The only axis of each output that can hold the samples; ``None`` to use ``admits`` alone.
        scratch: Temporary memory that ``structure_of`` takes.
        fans: Groups and extents, for an affine map.
        linear: Whether the outputs are known to be affine in the parameter, with everything else fixed.
        constant: Whether the parameter is known to be multiplied by one number, the same for all samples.
        squares: Like ``structure_of``, with the square of the factor on the parameter. ``None`` if the
            structure itself has the squares (``with_squares``), or if they are not known.
        sparse: Whether torch's own gradient of the parameter is a sparse tensor.
        calls_node: Returns, for the layouts of the outputs, the parameter's edge if building the structure
            calls a node, which needs the graph; else ``None``.
        by_rule: Whether a rule made the entry; otherwise packprop calls the node for each sample.
    """

    parameter: Any
    structure: str
    structure_of: StructureOf
    refusal: tuple[str, str] | None = None
    admits: Callable[[int], bool] = lambda axis: True
    features: int | None = None
    sample_axes: Sequence[int] | None = None
    scratch: Scratch = Scratch()
    fans: Fans | None = None
    linear: bool = False
    constant: bool = False
    squares: StructureOf | None = None
    sparse: bool = False
    calls_node: Callable[[Sequence[Layout]], GradientEdge | None] = lambda layouts: None
    by_rule: bool = True

    def but(self, **changed: Any) -> Entry:
        """Return a copy with changes, like ``dataclasses.replace``, but five times as fast."""
        entry = object.__new__(Entry)
        vars(entry).update(vars(self), **changed)
        return entry


def plain_options(value: Any, numbers: bool = False) -> Any:
    """Return a value with ``None`` in place of all but integers and texts, and also floats if ``numbers``."""
    if isinstance(value, (list, tuple)):
        return tuple([each if type(each) is int else plain_options(each, numbers) for each in value])
    return value if isinstance(value, (int, str)) or (numbers and isinstance(value, float)) else None
