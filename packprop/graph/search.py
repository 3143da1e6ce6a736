"""What a tensor or a node was computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node


def leaves_above(tensor: Tensor) -> list[Tensor]:
    """Leaves that require gradients and that a tensor was computed from."""
    above = nodes_above([tensor.grad_fn])
    return [leaf for node in above if (leaf := getattr(node, "variable", None)) is not None]


def nodes_above(nodes: Iterable[Node | None]) -> Iterator[Node]:
    """Some nodes and everything that they were computed from, each once."""
    stack = [node for node in dict.fromkeys(nodes) if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for above, _ in node.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                stack.append(above)
