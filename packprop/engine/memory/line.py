"""The line of a plan about one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from packprop.engine.algebra.structures import Outer, Statistical
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class Line:
    """The work for one parameter.

    Args:
        parameter: Its name.
        use: Functions that it enters.
        structure: The way in which it enters them.
        algorithm: Says whether its per-sample gradients are formed, and how; *in turn*: one at a time.
        samples: Samples in a chunk.
        count: Samples in all.
        bytes: Bytes of the per-sample gradients of a chunk, or of one in turn.
    """

    parameter: str
    use: str
    structure: str
    algorithm: str
    samples: int
    count: int
    bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks of samples."""
        return -(-self.count // self.samples)


def line_of(
    graph: Graph, leaf: Tensor, uses: Sequence[ReachedUse], structure: Statistical, samples: int
) -> Line:
    """Make the line about a leaf with this structure, in chunks of so many samples."""
    size, in_chunk = leaf.numel() * accumulation_dtype(leaf.dtype).itemsize, min(samples, graph.samples)
    return Line(
        graph.name(leaf),
        " + ".join(use.name for use in uses),
        type(structure).__name__,
        _algorithm(structure),
        in_chunk,
        graph.samples,
        size if _formed_in_turn(structure) else size * in_chunk,
    )


def forms_gradients(structure: Statistical) -> bool:
    """Tell whether per-sample gradients were formed, of a chunk or one after the other."""
    return getattr(structure, "formed", True) or _formed_in_turn(structure)


def _formed_in_turn(structure: Statistical) -> bool:
    """Tell whether per-sample gradients were there one at a time."""
    return isinstance(structure, Outer) and not structure.formed and "matrices" in vars(structure)


def _algorithm(structure: Statistical) -> str:
    if not forms_gradients(structure):
        return "cotangents and inputs alone"
    if _formed_in_turn(structure):
        return "gradients in turn"
    if not isinstance(structure, Outer) or structure.shape[1] == 1:
        return "per-sample gradients"
    return f"gradients by {'groups' if structure.by_groups else 'products'}"
