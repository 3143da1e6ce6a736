"""Recurrences step by step: from the cotangents of the states to those of the affine maps of every step.

Axes are ``[t, b, *]``: steps in their order, and rows of the batch, which may be samples and positions;
cotangents are ``[t, v, b, *]``. Both maps of a step, of its input and of the state before it, are affine;
everything between them is entry by entry. So two products lead from a step to the one before it: one with
derivatives that are known for all steps at once, and one with a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["lstm", "gru", "tanh", "relu"]
"""The use of the two affine maps in a step."""


class Weights(NamedTuple):
    """The parameters of one direction of one layer.

    Args:
        input: Multiplies the input of each step ``[k*h, f]``, with k gates.
        state: Multiplies the state before it ``[k*h, p]``.
        input_bias: ``[k*h]``, or ``None``.
        state_bias: ``[k*h]``, or ``None``.
        projection: Makes the state of an LSTM from its gated memory ``[p, h]``, or ``None``.
    """

    input: Tensor
    state: Tensor
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None
    projection: Tensor | None = None


class Steps(NamedTuple):
    """The inputs of the affine maps of all steps.

    Args:
        input: ``[t, b, f]``.
        before: The state before each step ``[t, b, p]``.
        memory: The memory of an LSTM before the first step ``[b, h]``, or ``None``.
    """

    input: Tensor
    before: Tensor
    memory: Tensor | None = None


class Arrived(NamedTuple):
    """The cotangents of the states.

    Args:
        states: Of the state after each step ``[t, v, b, p]``.
        memory: Of the memory after the last step ``[v, b, h]``, or ``None``.
        memories: Of the memory after each step ``[t, v, b, h]``, if rows end at different steps.
        is_total: Says that the memory's cotangent includes the path through the state of that step.
    """

    states: Tensor
    memory: Tensor | None = None
    memories: Tensor | None = None
    is_total: bool = False


class Signals(NamedTuple):
    """The cotangents of the outputs of the affine maps, and of the first state.

    Args:
        input: At the map of the inputs ``[t, v, b, k*h]``.
        state: At the map of the states ``[t, v, b, k*h]``.
        first: At the state before the first step ``[v, b, p]``.
        first_memory: At the memory before it ``[v, b, h]``, or ``None``.
        projected: At the output of the projection ``[t, v, b, p]``, or ``None``.
    """

    input: Tensor
    state: Tensor
    first: Tensor
    first_memory: Tensor | None = None
    projected: Tensor | None = None


def states_after(kind: Kind, x: Tensor, state: Tensor, memory: Tensor | None, weights: Weights) -> Tensor:
    """Return the state after every step ``[t, b, p]``, by basic, differentiable operations."""
    inputs = F.linear(x, weights.input, weights.input_bias)
    states = []
    for own in inputs.unbind(0):
        recurrent = F.linear(state, weights.state, weights.state_bias)
        if kind == "lstm":
            assert memory is not None
            i, f, g, o = (own + recurrent).chunk(4, -1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
            state = state if weights.projection is None else F.linear(state, weights.projection)
        elif kind == "gru":
            r, z, n = own.chunk(3, -1)
            recurrent_r, recurrent_z, recurrent_n = recurrent.chunk(3, -1)
            z = (z + recurrent_z).sigmoid()
            n = (n + (r + recurrent_r).sigmoid() * recurrent_n).tanh()
            state = n + z * (state - n)
        else:
            state = (own + recurrent).tanh() if kind == "tanh" else (own + recurrent).relu()
        states.append(state)
    return torch.stack(states)


def gated_memory(steps: Steps, weights: Weights) -> Tensor:
    """Return the input of an LSTM's projection, at every step ``[t, b, h]``."""
    *_, o, memories = _gates_of_lstm(steps, weights)
    return o * memories[1:].tanh()


def pull_back(kind: Kind, steps: Steps, weights: Weights, arrived: Arrived) -> Signals:
    """Run a recurrence backward."""
    return PULLS[kind](steps, weights, arrived)


def _affine(steps: Steps, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return the outputs of both affine maps of every step ``[t, b, k*h]``."""
    return (
        F.linear(steps.input, weights.input, weights.input_bias),
        F.linear(steps.before, weights.state, weights.state_bias),
    )


def _pull_back_plain(
    slope: Callable[[Tensor], Tensor], steps: Steps, weights: Weights, arrived: Arrived
) -> Signals:
    """Step back through a state that is a function of the sum of both maps, entry by entry."""
    ours, theirs = _affine(steps, weights)
    scanned = _scan(weights, arrived, slope(ours + theirs).unsqueeze(-2))
    signals = scanned.products.flatten(3)
    return Signals(signals, signals, scanned.at_first)


def _pull_back_gru(steps: Steps, weights: Weights, arrived: Arrived) -> Signals:
    """Step back where a gate multiplies the map of the states before the sum: the two cotangents differ."""
    scanned = _scan(weights, arrived, _slopes_of_gru(steps, weights), hands_on=True)
    gates = scanned.products
    at_inputs = torch.cat([gates[..., :2, :], gates[..., 3:4, :]], -2)
    return Signals(at_inputs.flatten(3), gates[..., :3, :].flatten(3), scanned.at_first)


def _slopes_of_gru(steps: Steps, weights: Weights) -> Tensor:
    """Return derivatives of each state in four gates, and in the state before it ``[t, b, 5, h]``."""
    ours, theirs = _affine(steps, weights)
    size = steps.before.shape[-1]
    r, z = (ours[..., : 2 * size] + theirs[..., : 2 * size]).sigmoid().chunk(2, -1)
    inner = theirs[..., 2 * size :]
    n = (ours[..., 2 * size :] + r * inner).tanh()
    at_n = (1 - z) * (1 - n.square())
    at_inner = at_n * r
    at_r, at_z = at_inner * inner * (1 - r), (steps.before - n) * z * (1 - z)
    return torch.stack([at_r, at_z, at_inner, at_n, z], -2)


def _pull_back_lstm(steps: Steps, weights: Weights, arrived: Arrived) -> Signals:
    scanned = _scan(weights, arrived, *_slopes_of_lstm(steps, weights, arrived.is_total))
    gates = scanned.products
    signals = gates[..., :4, :].flatten(3)
    return Signals(signals, signals, scanned.at_first, gates[0, ..., 4, :], scanned.projected)


def _slopes_of_lstm(steps: Steps, weights: Weights, is_total: bool) -> tuple[Tensor, Tensor]:
    """Return derivatives in four gates and in the memory before each step ``[t, b, 5, h]``.

    First come those of the state after it, including the path through the memory unless ``is_total``; then
    those of the memory.
    """
    i, f, g, o, memories = _gates_of_lstm(steps, weights)
    squashed, nothing = memories[1:].tanh(), torch.zeros_like(f)
    through = nothing if is_total else o * (1 - squashed.square())
    kept = [g * i * (1 - i), memories[:-1] * f * (1 - f), i * (1 - g.square())]
    of_state = [*(each * through for each in kept), squashed * o * (1 - o), f * through]
    return torch.stack(of_state, -2), torch.stack([*kept, nothing, f], -2)


def _gates_of_lstm(steps: Steps, weights: Weights) -> tuple[Tensor, ...]:
    """Return gates of every step ``[t, b, h]``; memory before the first and after each ``[t + 1, b, h]``."""
    assert steps.memory is not None
    ours, theirs = _affine(steps, weights)
    i, f, g, o = (ours + theirs).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    return i, f, g, o, _memories(f, i * g, steps.memory)


PULLS: dict[Kind, Callable[[Steps, Weights, Arrived], Signals]] = {
    "lstm": _pull_back_lstm,
    "gru": _pull_back_gru,
    "tanh": lambda *given: _pull_back_plain(lambda sums: 1 - sums.tanh().square(), *given),
    "relu": lambda *given: _pull_back_plain(lambda sums: (sums > 0).to(sums.dtype), *given),
}


def _memories(kept: Tensor, added: Tensor, first: Tensor) -> Tensor:
    """Return the memory before the first step and after each ``[t + 1, b, h]``."""
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


class _Scanned(NamedTuple):
    """The result of a way through all steps.

    Args:
        products: The cotangent of each step, times derivatives ``[t, v, b, k, h]``.
        at_first: The cotangent of the state before the first step ``[v, b, p]``.
        projected: The cotangent of the projection's output, if there is one ``[t, v, b, p]``.
    """

    products: Tensor
    at_first: Tensor
    projected: Tensor | None


def _scan(
    weights: Weights,
    arrived: Arrived,
    of_state: Tensor,
    of_memory: Tensor | None = None,
    hands_on: bool = False,
) -> _Scanned:
    """Go through all steps, the last one first.

    It multiplies the cotangent of a step by derivatives. As many of the products as the weight of the states
    has rows go through that weight to the state before the step. It writes products to one tensor, or keeps
    them one by one if they have to be differentiable.

    Args:
        weights: The parameters.
        arrived: The cotangents from outside.
        of_state: Derivatives of the state after each step ``[t, b, k, h]``.
        of_memory: Those of the memory after it; the last product is the cotangent of the memory before the
            step.
        hands_on: Says that the last product is the cotangent of the state before the step.
    """
    count, columns, rows, _ = arrived.states.shape
    outside, width, size = arrived.states.flatten(1, 2), len(weights.state), of_state.shape[-1]
    buffer = of_state.new_empty(count, columns, *of_state.shape[1:]) if not torch.is_grad_enabled() else None
    kept: list[Tensor] = []
    projected: list[Tensor] = []
    memory, products, beside = arrived.memory, None, None
    for step in reversed(range(count)):
        at_state = outside[step]
        if products is not None:
            at_state = torch.addmm(at_state if beside is None else at_state + beside, products, weights.state)
        if weights.projection is not None:
            projected.append(at_state.view(columns, rows, -1))
            at_state = at_state @ weights.projection
        value = at_state.view(columns, rows, 1, size)
        if arrived.memories is not None:
            injected = arrived.memories[step]
            memory = injected if memory is None else memory + injected
        if buffer is None:
            own = value * of_state[step]
        else:
            own = torch.mul(value, of_state[step], out=buffer[step])
        if of_memory is not None:
            if memory is not None:
                add = torch.addcmul if buffer is None else Tensor.addcmul_
                own = add(own, memory.unsqueeze(-2), of_memory[step])
            memory = own[..., -1, :]
        if buffer is None:
            kept.append(own)
        flat = own.flatten(2).flatten(0, 1)
        products, beside = flat[:, :width], flat[:, -size:] if hands_on else None
    assert products is not None
    at_first = products @ weights.state
    return _Scanned(
        torch.stack(kept[::-1]) if buffer is None else buffer,
        (at_first if beside is None else at_first + beside).view(columns, rows, -1),
        torch.stack(projected[::-1]) if projected else None,
    )
