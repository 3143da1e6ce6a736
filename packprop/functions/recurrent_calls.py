"""Calls of recurrent functions, opened up into layers, directions and steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.algebra.recurrence import Arrived, Kind, Signals, Steps, Weights, pull_back, states_after
from packprop.functions.building import SavedTensor
from packprop.functions.entry import Cotangents
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype
from packprop.tensors.random import RandomStates, random_numbers_from

FUSED = {"lstm": torch.lstm, "gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}
"""PyTorch's own functions, which take all steps of a layer in one call."""


class Opened(NamedTuple):
    """What one direction of one layer was given, and what arrives in it; nothing where no cotangent did."""

    weights: Weights
    steps: Steps
    signals: Signals | None = None


@dataclass(eq=False)
class RecurrentCall:
    """One call of a recurrent function, or of one of its cells.

    What is computed from the cotangents of a sweep serves all parameters of the call. It is kept as long as the
    list that these cotangents came in.

    Args:
        kind: What a step does.
        x: Input: ``[t, b, f]``; ``[b, t, f]`` if ``batch_first``; of a cell ``[b, f]`` or ``[f]``.
        states: First state, and of an LSTM first memory: ``[l*d, b, p]``; of a cell ``[b, p]`` or ``[p]``.
        weights: The parameters of each direction of each layer, in PyTorch's order.
        directions: 1 or 2.
        batch_first: Whether the first axis of the input holds the samples.
        is_cell: Whether it is a cell: one step, whose outputs are the states after it.
        is_total: Whether what arrives at the memory, if anything does, holds what comes by the state already.
        dropout: Probability of dropout between layers.
        random_state: State of the random generators before the call, if it drew from them.
        lowest: The lowest layer that something is asked of.
    """

    kind: Kind
    x: SavedTensor
    states: Sequence[SavedTensor]
    weights: Sequence[Weights]
    directions: int = 1
    batch_first: bool = False
    is_cell: bool = False
    is_total: bool = False
    dropout: float = 0.0
    random_state: RandomStates | None = None
    lowest: int = 0
    _source: weakref.ref[Any] | None = field(default=None, init=False)
    _opened: list[Opened] = field(default_factory=list, init=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.weights) // self.directions

    def opened(self, cotangents: Cotangents) -> list[Opened]:
        """For each direction of each layer what went in, and what arrives, from cotangents at the outputs."""
        if self._source is not None and self._source() is cotangents:
            return self._opened
        opened = self._open(cotangents)
        try:
            self._source = weakref.ref(cotangents, self._forget)
        except TypeError:  # a plain list, which does not say when it is gone
            return opened
        self._opened = opened
        return opened

    def layout(self, cotangents: Cotangents, layouts: Sequence[Layout]) -> Layout:
        """Where axis 0 of ``[b, *]`` holds the samples."""
        pairs = zip(cotangents, layouts, strict=False)
        layout = next((layout for cotangent, layout in pairs if cotangent is not None), layouts[0])
        return layout if layout.axis is None else layout._replace(axis=0)

    def _forget(self, source: weakref.ref[Any]) -> None:
        if self._source is source:
            self._source, self._opened = None, []

    def _open(self, cotangents: Cotangents) -> list[Opened]:
        precise = self._precise
        weights = [
            Weights(
                precise(own[0]), precise(own[1]), *(each if each is None else precise(each) for each in own[2:])
            )
            for own in self.weights
        ]
        forward = self._forward(weights)
        if all(cotangent is None for cotangent in cotangents):
            return [Opened(*pair) for pair in zip(weights, forward.steps, strict=True)]
        return self._backward(forward, weights, cotangents)

    def _precise(self, tensor: Tensor) -> Tensor:
        return tensor.to(accumulation_dtype(self.weights[0].input.dtype))

    def _forward(self, weights: list[Weights]) -> _Forward:
        """Run the layers again, one direction after the other."""
        x = self._precise(self.x())
        states = [self._precise(saved()) for saved in self.states]
        if self.is_cell:
            x, states = x.reshape(1, -1, x.shape[-1]), [s.reshape(1, -1, s.shape[-1]) for s in states]
        elif self.batch_first:
            x = x.transpose(0, 1)
        forward = _Forward([], [])
        with self._random_numbers():
            for layer in range(self.layers):
                outputs = []
                for direction in range(self.directions):
                    number = layer * self.directions + direction
                    first = states[0][number]
                    memory = states[1][number] if len(states) > 1 else None
                    own = x.flip(0) if direction else x
                    after = self._states(own, first, memory, weights[number], layer == self.layers - 1)
                    before = torch.cat([first[None], after[: len(own) - 1]])
                    forward.steps.append(Steps(own, before, memory))
                    outputs.append(after.flip(0) if direction else after)
                if layer < self.layers - 1:
                    x = outputs[0] if self.directions == 1 else torch.cat(outputs, -1)
                    if self.dropout:
                        forward.masks.append(F.dropout(torch.ones_like(x), self.dropout))
                        x = x * forward.masks[-1]
        return forward

    def _random_numbers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.random_state is None else random_numbers_from(self.random_state)

    def _states(
        self, x: Tensor, first: Tensor, memory: Tensor | None, weights: Weights, is_last: bool
    ) -> Tensor:
        """The state after each step; of the last layer the one after the last step is not needed."""
        if is_last and len(x) == 1:
            return first[None]
        if torch.is_grad_enabled():
            return states_after(self.kind, x, first, memory, weights)
        given = (first[None], memory[None]) if memory is not None else first[None]
        flat = [weight for weight in weights if weight is not None]
        options = weights.input_bias is not None, 1, 0.0, False, False, False
        with warnings.catch_warnings():  # of weights that do not lie side by side: these are copied once
            warnings.filterwarnings("ignore", "RNN module weights")
            outputs: Tensor = FUSED[self.kind](x, given, flat, *options)[0]  # type: ignore[operator]
        return outputs

    def _backward(self, forward: _Forward, weights: list[Weights], cotangents: Cotangents) -> list[Opened]:
        """Run the layers backward, the last one first, as far down as is asked for."""
        at_output, at_states, at_memories = self._arriving(cotangents)
        opened = [Opened(*pair) for pair in zip(weights, forward.steps, strict=True)]
        for layer in reversed(range(self.lowest, self.layers)):
            at_input: Tensor | None = None
            for direction in range(self.directions):
                number = layer * self.directions + direction
                steps = forward.steps[number]
                size = steps.before.shape[-1]
                states = at_output
                if states is not None:
                    states = states[..., direction * size : (direction + 1) * size]
                    states = states.flip(0) if direction else states
                last = None if at_states is None else at_states[:, number]
                arrived = Arrived(
                    _with_last(states, last, cotangents, steps),
                    None if at_memories is None else at_memories[:, number],
                    is_total=self.is_total and at_memories is not None,
                )
                signals = pull_back(self.kind, steps, weights[number], arrived)
                opened[number] = Opened(weights[number], steps, signals)
                if layer > self.lowest:
                    own = signals.input @ weights[number].input
                    own = own.flip(0) if direction else own
                    at_input = own if at_input is None else at_input + own
            if at_input is not None and self.dropout:
                at_input = at_input * forward.masks[layer - 1][:, None]
            at_output = at_input
        return opened

    def _arriving(self, cotangents: Cotangents) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What arrives at outputs ``[t, v, b, d*p]``, last states and last memories ``[v, l*d, b, *]``."""
        own = [None if each is None else self._precise(each) for each in cotangents]
        if self.is_cell:
            ends = [None if each is None else each.reshape(len(each), 1, -1, each.shape[-1]) for each in own]
            return None, ends[0], ends[1] if len(ends) > 1 else None
        output = own[0]
        if output is not None:
            output = output.permute(2, 0, 1, 3) if self.batch_first else output.transpose(0, 1)
        return output, own[1], own[2] if len(own) > 2 else None


class _Forward(NamedTuple):
    """What the layers were given when they were run again, and what dropout multiplied their outputs by."""

    steps: list[Steps]
    masks: list[Tensor]


def _with_last(states: Tensor | None, last: Tensor | None, cotangents: Cotangents, steps: Steps) -> Tensor:
    """What arrives at the state after each step ``[t, v, b, p]``."""
    if states is None:
        columns = next(len(cotangent) for cotangent in cotangents if cotangent is not None)
        states = steps.before.new_zeros(1, 1, 1, 1).expand(len(steps.before), columns, *steps.before.shape[1:])
    return states if last is None else torch.cat([states[:-1], (states[-1] + last)[None]])
