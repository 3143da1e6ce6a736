"""The nodes and leaves that a tensor or a node was computed from."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.recording.marks import nodes_above

__all__ = ["leaves_above", "leaves_of", "nodes_above"]


def leaves_above(tensor: Tensor) -> list[Tensor]:
    """Return the leaves that require gradients and that a tensor was computed from."""
    return [] if tensor.grad_fn is None else leaves_of(tensor.grad_fn)


def leaves_of(node: Node) -> list[Tensor]:
    """Return the leaves that require gradients and that a node's outputs were computed from."""
    above = nodes_above([node])
    return [leaf for node in above if (leaf := getattr(node, "variable", None)) is not None]
