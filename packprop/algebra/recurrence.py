"""Recurrences opened up: what arrives at the affine maps of every step, from what arrives at the states.

Axes are ``[t, b, *]``: steps in the order in which they are taken, and rows of the batch, which may be
samples and positions; cotangents are ``[t, v, b, *]``. Both maps of a step, of its input and of the state
before it, are affine; everything between them is entry by entry. So one product with derivatives that are known
for all steps at once, and one product with a weight, lead from a step to the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["lstm", "gru", "tanh", "relu"]
"""What a step does with its two affine maps."""


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
    """What went into the affine maps of all steps.

    Args:
        input: ``[t, b, f]``.
        before: The state before each step ``[t, b, p]``.
        memory: The memory of an LSTM before the first step ``[b, h]``, or ``None``.
    """

    input: Tensor
    before: Tensor
    memory: Tensor | None = None


class Arrived(NamedTuple):
    """What arrives at the states.

    Args:
        states: At the state after each step ``[t, v, b, p]``.
        memory: At the memory after the last step ``[v, b, h]``, or ``None``.
        memories: At the memory after each step ``[t, v, b, h]``, if rows end at different steps.
        is_total: Whether what arrives at the memory holds what comes through the state of that step.
    """

    states: Tensor
    memory: Tensor | None = None
    memories: Tensor | None = None
    is_total: bool = False


class Signals(NamedTuple):
    """What arrives at the outputs of the affine maps, and at the first state.

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
    """The state after every step ``[t, b, p]``, by basic operations: differentiable any number of times."""
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
    """What the projection of an LSTM multiplies, at every step ``[t, b, h]``."""
    assert steps.memory is not None
    ours, theirs = _affine(steps, weights)
    i, f, g, o = (ours + theirs).chunk(4, -1)
    return o.sigmoid() * _memories(f.sigmoid(), i.sigmoid() * g.tanh(), steps.memory)[1].tanh()


def pull_back(kind: Kind, steps: Steps, weights: Weights, arrived: Arrived) -> Signals:
    """Run a recurrence backward."""
    return PULLS[kind](steps, weights, arrived)


def _affine(steps: Steps, weights: Weights) -> tuple[Tensor, Tensor]:
    """The outputs of both affine maps of every step ``[t, b, k*h]``."""
    return (
        F.linear(steps.input, weights.input, weights.input_bias),
        F.linear(steps.before, weights.state, weights.state_bias),
    )


def _pull_back_plain(
    slope: Callable[[Tensor], Tensor], steps: Steps, weights: Weights, arrived: Arrived
) -> Signals:
    """A state that is a function of the sum of both maps, entry by entry, with this derivative."""
    ours, theirs = _affine(steps, weights)
    slopes = slope(ours + theirs).unsqueeze(-2)
    scan = _Scan(arrived.states, weights.state, (1,), steps.before.shape[-1])
    for step, at_state in scan:
        scan.put(step, (at_state, slopes[step]))
    signals = scan.signals()
    return Signals(signals, signals, scan.at_first())


def _pull_back_gru(steps: Steps, weights: Weights, arrived: Arrived) -> Signals:
    """The map of the states is multiplied by a gate before it meets the other one: their signals differ."""
    ours, theirs = _affine(steps, weights)
    size = steps.before.shape[-1]
    r, z = (ours[..., : 2 * size] + theirs[..., : 2 * size]).sigmoid().chunk(2, -1)
    inner = theirs[..., 2 * size :]
    n = (ours[..., 2 * size :] + r * inner).tanh()
    at_n = (1 - z) * (1 - n.square())
    at_inner = at_n * r
    at_r, at_z = at_inner * inner * (1 - r), (steps.before - n) * z * (1 - z)
    slopes = torch.stack([at_r, at_z, at_inner, at_n], -2)
    scan = _Scan(arrived.states, weights.state, (4,), size)
    for step, at_state in scan:
        scan.put(step, (at_state, slopes[step]), beside=at_state * z[step])
    signals = scan.signals()
    at_inputs = torch.cat([signals[..., : 2 * size], signals[..., 3 * size :]], -1)
    return Signals(at_inputs, signals[..., : 3 * size], scan.at_first())


def _pull_back_lstm(steps: Steps, weights: Weights, arrived: Arrived) -> Signals:
    assert steps.memory is not None
    ours, theirs = _affine(steps, weights)
    i, f, g, o = (ours + theirs).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    before, after = _memories(f, i * g, steps.memory)
    squashed = after.tanh()
    at_memory = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g.square())], -2)
    at_output = (squashed * o * (1 - o)).unsqueeze(-2)
    through = o * (1 - squashed.square())
    memory = arrived.memory
    if memory is None:
        memory = o.new_zeros(*arrived.states.shape[1:3], o.shape[-1])
    memories = arrived.memories
    projected: list[Tensor] = []
    scan = _Scan(arrived.states, weights.state, (3, 1), o.shape[-1])
    for step, at_state in scan:
        if weights.projection is not None:
            projected.append(at_state)
            at_state = at_state @ weights.projection
        if memories is not None:
            memory = memory + memories[step]
        if not arrived.is_total:
            memory = torch.addcmul(memory, at_state, through[step])
        scan.put(step, (memory, at_memory[step]), (at_state, at_output[step]))
        memory = memory * f[step]
    signals = scan.signals()
    if weights.projection is None:
        return Signals(signals, signals, scan.at_first(), memory)
    return Signals(signals, signals, scan.at_first(), memory, torch.stack(projected[::-1]))


PULLS: dict[Kind, Callable[[Steps, Weights, Arrived], Signals]] = {
    "lstm": _pull_back_lstm,
    "gru": _pull_back_gru,
    "tanh": lambda *given: _pull_back_plain(lambda sums: 1 - sums.tanh().square(), *given),
    "relu": lambda *given: _pull_back_plain(lambda sums: (sums > 0).to(sums.dtype), *given),
}


def _memories(kept: Tensor, added: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The memory before and after every step ``[t, b, h]``."""
    if torch.is_grad_enabled():
        pieces = [first]
        for step in range(len(kept)):
            pieces.append(torch.addcmul(added[step], kept[step], pieces[-1]))
        memories = torch.stack(pieces)
    else:
        memories = first.new_empty(len(kept) + 1, *first.shape)
        memories[0] = first
        for step in range(len(kept)):
            torch.addcmul(added[step], kept[step], memories[step], out=memories[step + 1])
    return memories[:-1], memories[1:]


class _Scan:
    """One way through all steps, the last one first.

    The signals of all steps are written to one tensor, or kept one by one where they shall be differentiable.

    Args:
        states: What arrives at the state after each step from outside ``[t, v, b, p]``.
        weight: Multiplies the state before each step ``[k*h, p]``: takes the first ``k*h`` signals of a step.
        products: How many gates there are in each product that ``put`` is given.
        size: Entries of a gate.
    """

    def __init__(self, states: Tensor, weight: Tensor, products: tuple[int, ...], size: int) -> None:
        self._weight, self._shape = weight, states.shape[1:]
        self._outside = states.flatten(1, 2)
        self._later: Tensor | None = None  # the signals of the step after this one [v*b, k*h]
        self._beside: Tensor | None = None
        self._kept: list[Tensor] = []
        self._buffer: Tensor | None = None
        if not torch.is_grad_enabled():
            self._buffer = states.new_empty(*states.shape[:3], sum(products), size)
            self._rows = self._buffer.flatten(3).flatten(1, 2)
            self._places = self._buffer.split(products, 3)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Each step, with what arrives at the state after it ``[v, b, p]``."""
        for step in reversed(range(len(self._outside))):
            yield step, self._arriving(self._outside[step]).view(self._shape)

    def _arriving(self, outside: Tensor) -> Tensor:
        if self._later is None:
            return outside
        if self._beside is not None:
            outside = outside + self._beside.flatten(0, 1)
        return torch.addmm(outside, self._later, self._weight)

    def put(self, step: int, *products: tuple[Tensor, Tensor], beside: Tensor | None = None) -> None:
        """Note the signals of a step.

        Args:
            step: The step.
            products: ``[v, b, h]``, and what it is multiplied by for each gate ``[1, b, k, h]``.
            beside: What arrives at the state before the step by another way than the weight ``[v, b, p]``.
        """
        if self._buffer is None:
            signal = torch.cat([value.unsqueeze(-2) * slope for value, slope in products], -2)
            self._kept.append(signal)
            rows = signal.flatten(2).flatten(0, 1)
        else:
            for (value, slope), places in zip(products, self._places, strict=True):
                torch.mul(value.unsqueeze(-2), slope, out=places[step])
            rows = self._rows[step]
        self._later, self._beside = rows[:, : len(self._weight)], beside

    def signals(self) -> Tensor:
        """The signals of all steps ``[t, v, b, k*h]``."""
        signals = torch.stack(self._kept[::-1]) if self._buffer is None else self._buffer
        return signals.flatten(3)

    def at_first(self) -> Tensor:
        """What arrives at the state before the first step ``[v, b, p]``."""
        assert self._later is not None
        first = (self._later @ self._weight).view(self._shape)
        return first if self._beside is None else first + self._beside
