"""Gradients that packprop sums itself reach ``.grad`` through the nodes of the leaves, and without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.passes.gradient import hand_over


def test_autograd_takes_the_memory_of_the_gradient() -> None:
    leaf = nn.Parameter(torch.zeros(3, 2))
    gradients = [(leaf, torch.arange(6.0).reshape(3, 2))]
    place = gradients[0][1].data_ptr()
    hand_over(gradients)
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == place
    assert not leaf.grad.requires_grad
    assert not gradients


def test_gradients_add_up_and_hooks_run() -> None:
    """A leaf may come twice, as the sum over samples and that of a term beside them."""
    leaf, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    leaf.grad = torch.ones(2)
    seen: list[Any] = []
    leaf.register_hook(lambda gradient: gradient * 2)
    other.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    hand_over([(leaf, torch.ones(2)), (other, torch.ones(3, dtype=torch.float64)), (leaf, torch.ones(2))])
    assert torch.equal(leaf.grad, torch.full((2,), 5.0))
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.ones(3, dtype=torch.float64))


def test_a_complex_leaf_and_a_disabled_graph() -> None:
    leaf = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with torch.no_grad():
        hand_over([(leaf, torch.ones(2, dtype=torch.complex64))])
    assert isinstance(leaf.grad, Tensor)
    assert torch.equal(leaf.grad, torch.ones(2, dtype=torch.complex64))
