"""What a tensor or a node was computed from."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from packprop.recording.marks import nodes_above

__all__ = ["leaves_above", "leaves_of", "nodes_above"]


def leaves_above(tensor: Tensor) -> list[Tensor]:
    """Leaves that require gradients and that a tensor was computed from."""
    return [] if tensor.grad_fn is None else leaves_of(tensor.grad_fn)


def leaves_of(node: Node) -> list[Tensor]:
    """Leaves that a node's outputs were computed from, and that require gradients."""
    above = nodes_above([node])
    return [leaf for node in above if (leaf := getattr(node, "variable", None)) is not None]
