"""What a tensor or a node was computed from."""

from __future__ import annotations

from torch import Tensor

from packprop.recording.marks import nodes_above

__all__ = ["leaves_above", "nodes_above"]


def leaves_above(tensor: Tensor) -> list[Tensor]:
    """Leaves that require gradients and that a tensor was computed from."""
    above = nodes_above([tensor.grad_fn])
    return [leaf for node in above if (leaf := getattr(node, "variable", None)) is not None]
