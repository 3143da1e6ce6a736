"""The steps of an LSTM: cotangents at the affine maps of every step, from the cotangents at the states.

Axes are ``[t, b, *]``: steps in the order in which the layer takes them, and rows of the batch, which may be
samples and positions; cotangents are ``[t, v, b, *]``. A step adds two affine maps, of its input and of the
state before it; all functions after them work entry by entry. So one product with derivatives that are known
for all steps at once, and one product with a weight, lead from a step to the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Weights(NamedTuple):
    """The parameters of a layer, in one direction.

    Args:
        input: Multiplies the input of each step ``[4*h, f]``.
        state: Multiplies the state before it ``[4*h, h]``.
        bias: Added to both products ``[4*h]``, or ``None``.
    """

    input: Tensor
    state: Tensor
    bias: Tensor | None


class Steps(NamedTuple):
    """The inputs of the affine maps of all steps.

    Args:
        input: ``[t, b, f]``.
        before: The state before each step ``[t, b, h]``.
        memory: The memory before the first step ``[b, h]``.
    """

    input: Tensor
    before: Tensor
    memory: Tensor


class Signals(NamedTuple):
    """The cotangents at the sum of the affine maps, and at the inputs of the first step.

    Args:
        maps: ``[t, v, b, 4*h]``.
        state: At the state before the first step ``[v, b, h]``.
        memory: At the memory before it ``[v, b, h]``.
    """

    maps: Tensor
    state: Tensor
    memory: Tensor


def pull_back(steps: Steps, weights: Weights, at_states: Tensor, at_memory: Tensor | None) -> Signals:
    """Pull cotangents back through all steps, the last one first.

    The cotangent at a step, times derivatives, gives the cotangents at its four gates and at the memory before
    it. A product with the weight turns those at the gates into one at the state before. packprop writes
    products to one tensor, or keeps them one by one in gradient mode.

    Args:
        steps: The inputs of the steps.
        weights: The parameters.
        at_states: The cotangent at the state after each step ``[t, v, b, h]``.
        at_memory: The cotangent at the memory after the last step ``[v, b, h]``; ``None`` for zero.
    """
    of_state, of_memory = _slopes(steps, weights)
    count, columns, rows, size = at_states.shape
    is_kept = torch.is_grad_enabled()
    buffer = None if is_kept else of_state.new_empty(count, columns, *of_state.shape[1:])
    kept: list[Tensor] = []
    outside, memory, flat = at_states.flatten(1, 2), at_memory, None
    for step in reversed(range(count)):
        at_state = outside[step]
        if flat is not None:
            at_state = torch.addmm(at_state, flat, weights.state)
        value = at_state.view(columns, rows, 1, size)
        if buffer is None:
            own = value * of_state[step]
            own = own if memory is None else torch.addcmul(own, memory.unsqueeze(-2), of_memory[step])
            kept.append(own)
        else:
            own = torch.mul(value, of_state[step], out=buffer[step])
            own = own if memory is None else own.addcmul_(memory.unsqueeze(-2), of_memory[step])
        memory, flat = own[..., 4, :], own[..., :4, :].flatten(2).flatten(0, 1)
    assert memory is not None
    assert flat is not None
    products = torch.stack(kept[::-1]) if buffer is None else buffer
    at_first = (flat @ weights.state).view(columns, rows, size)
    return Signals(products[..., :4, :].flatten(3), at_first, memory)


def _slopes(steps: Steps, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return derivatives in the four gates and in the memory before each step, ``[t, b, 5, h]``.

    The first tensor has derivatives of the state after the step, by way of the memory as well; the second has
    derivatives of the memory.
    """
    i, f, g, o = _gates(steps, weights)
    memories = _memories(f, i * g, steps.memory)
    squashed = memories[1:].tanh()
    through = o * (1 - squashed.square())
    kept = [g * i * (1 - i), memories[:-1] * f * (1 - f), i * (1 - g.square())]
    of_state = [*(each * through for each in kept), squashed * o * (1 - o), f * through]
    return torch.stack(of_state, -2), torch.stack([*kept, torch.zeros_like(f), f], -2)


def _gates(steps: Steps, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gates of every step ``[t, b, h]``."""
    sums = F.linear(steps.input, weights.input, weights.bias) + F.linear(steps.before, weights.state)
    i, f, g, o = sums.chunk(4, -1)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


def _memories(kept: Tensor, added: Tensor, first: Tensor) -> Tensor:
    """Return the memory before the first step and after each step ``[t + 1, b, h]``."""
    if torch.is_grad_enabled():
        pieces = [first]
        for step in range(len(kept)):
            pieces.append(torch.addcmul(added[step], kept[step], pieces[-1]))
        return torch.stack(pieces)
    memories = first.new_empty(len(kept) + 1, *first.shape)
    memories[0] = first
    for step in range(len(kept)):
        torch.addcmul(added[step], kept[step], memories[step], out=memories[step + 1])
    return memories
