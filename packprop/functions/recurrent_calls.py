"""Calls of recurrent functions, opened up into layers, directions and steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
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

FUSED: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "tanh": torch.rnn_tanh,
    "relu": torch.rnn_relu,
}
"""PyTorch's own functions, which take all steps of a layer in one call."""


class Opened(NamedTuple):
    """What one direction of one layer was given, and what arrives in it; nothing where no cotangent did."""

    weights: Weights
    steps: Steps
    signals: Signals | None = None


class Packing(NamedTuple):
    """How sequences of different lengths, the longest first, are packed: those that are there, step by step.

    Args:
        steps: Length of the longest.
        sequences: How many there are.
        lengths: The length of each.
        sequence_of_row: The sequence of each row of the packed data.
    """

    steps: int
    sequences: int
    lengths: tuple[int, ...]
    sequence_of_row: tuple[int, ...]

    @classmethod
    def of(cls, batch_sizes: Tensor) -> Packing:
        """From how many sequences there are at each step; this tensor is on the CPU whatever the device."""
        there = batch_sizes.tolist()
        lengths = tuple(sum(size > sequence for size in there) for sequence in range(there[0]))
        return cls(len(there), there[0], lengths, tuple(number for size in there for number in range(size)))

    def padded(self, data: Tensor) -> Tensor:
        """``[s, *]`` to ``[t, b, *]``, with zeros behind the end of each sequence."""
        there = torch.arange(self.steps)[:, None] < torch.tensor(self.lengths)
        places = there.flatten().nonzero().flatten().to(data.device)
        flat = data.new_zeros(self.steps * self.sequences, *data.shape[1:])
        return flat.index_copy(0, places, data).view(self.steps, self.sequences, *data.shape[1:])

    def turned(self, tensor: Tensor) -> Tensor:
        """Each sequence of ``[t, *, b, f]`` from its end to its start."""
        steps, lengths = torch.arange(self.steps)[:, None], torch.tensor(self.lengths)
        index = torch.where(steps < lengths, lengths - 1 - steps, steps).to(tensor.device)
        form = [self.steps, *[1] * (tensor.dim() - 3), self.sequences, 1]
        return tensor.gather(0, index.view(form).expand_as(tensor))

    def at_ends(self, values: Tensor) -> Tensor:
        """``[v, b, *]`` at the last step of each sequence, and zeros elsewhere: ``[t, v, b, *]``."""
        last = torch.tensor(self.lengths, device=values.device) - 1
        is_last = torch.arange(self.steps, device=values.device)[:, None] == last
        placed: Tensor = values * is_last[:, None, :, None].to(values.dtype)
        return placed


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
        unchanged: All of these, as they must still be when the layers are run again.
        directions: 1 or 2.
        batch_first: Whether the first axis of the input holds the samples.
        is_cell: Whether it is a cell: one step, whose outputs are the states after it.
        is_total: Whether what arrives at the memory, if anything does, holds what comes by the state already.
        dropout: Probability of dropout between layers.
        random_state: State of the random generators before the call, if it drew from them.
        lowest: The lowest layer that something is asked of.
        packing: How the sequences of a packed input, which is ``[s, f]``, are packed.
    """

    kind: Kind
    x: SavedTensor
    states: Sequence[SavedTensor]
    weights: Sequence[Weights]
    unchanged: Sequence[SavedTensor]
    directions: int = 1
    batch_first: bool = False
    is_cell: bool = False
    is_total: bool = False
    dropout: float = 0.0
    random_state: RandomStates | None = None
    lowest: int = 0
    packing: Packing | None = None
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
        if self.packing is not None:
            layout = layouts[1]  # all outputs agree, and this one has a row for each sequence
        return layout if layout.axis is None else layout._replace(axis=0)

    def _forget(self, source: weakref.ref[Any]) -> None:
        if self._source is source:
            self._source, self._opened = None, []

    def _open(self, cotangents: Cotangents) -> list[Opened]:
        for saved in self.unchanged:
            saved()
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
        elif self.packing is not None:
            x = self.packing.padded(x)
        forward = _Forward([], [])
        with self._random_numbers():
            for layer in range(self.layers):
                outputs = []
                for direction in range(self.directions):
                    number = layer * self.directions + direction
                    first = states[0][number]
                    memory = states[1][number] if len(states) > 1 else None
                    own = self._turned(x) if direction else x
                    after = self._states(own, first, memory, weights[number], layer == self.layers - 1)
                    before = torch.cat([first[None], after[: len(own) - 1]])
                    forward.steps.append(Steps(own, before, memory))
                    outputs.append(self._turned(after) if direction else after)
                if layer < self.layers - 1:
                    x = outputs[0] if self.directions == 1 else torch.cat(outputs, -1)
                    if self.dropout:
                        forward.masks.append(self._mask(x))
                        x = x * forward.masks[-1]
        return forward

    def _turned(self, tensor: Tensor) -> Tensor:
        """Steps in the order of the other direction."""
        return tensor.flip(0) if self.packing is None else self.packing.turned(tensor)

    def _mask(self, x: Tensor) -> Tensor:
        """What dropout multiplied the outputs of a layer by."""
        if self.packing is None:
            return F.dropout(torch.ones_like(x), self.dropout)
        ones = x.new_ones(len(self.packing.sequence_of_row), x.shape[-1])
        return self.packing.padded(F.dropout(ones, self.dropout))

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
            outputs: Tensor = FUSED[self.kind](x, given, flat, *options)[0]
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
                    states = self._turned(states) if direction else states
                last = None if at_states is None else at_states[:, number]
                memory = None if at_memories is None else at_memories[:, number]
                arrived = self._arrived(states, last, memory, cotangents, steps)
                signals = pull_back(self.kind, steps, weights[number], arrived)
                opened[number] = Opened(weights[number], steps, signals)
                if layer > self.lowest:
                    own = signals.input @ weights[number].input
                    own = self._turned(own) if direction else own
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
        if output is not None and self.packing is not None:
            output = self.packing.padded(output.transpose(0, 1)).transpose(1, 2)
        elif output is not None:
            output = output.permute(2, 0, 1, 3) if self.batch_first else output.transpose(0, 1)
        return output, own[1], own[2] if len(own) > 2 else None

    def _arrived(
        self,
        states: Tensor | None,
        last: Tensor | None,
        memory: Tensor | None,
        cotangents: Cotangents,
        steps: Steps,
    ) -> Arrived:
        """What arrives at one direction of a layer.

        Args:
            states: At its outputs ``[t, v, b, p]``.
            last: At its last state ``[v, b, p]``.
            memory: At its last memory ``[v, b, h]``.
            cotangents: What arrives at the outputs of the call.
            steps: What it was given.
        """
        if states is None:
            columns = next(len(cotangent) for cotangent in cotangents if cotangent is not None)
            count, *rest = steps.before.shape
            states = steps.before.new_zeros(1, 1, 1, 1).expand(count, columns, *rest)
        if self.packing is not None:
            states = states if last is None else states + self.packing.at_ends(last)
            return Arrived(states, memories=None if memory is None else self.packing.at_ends(memory))
        if last is not None:
            states = torch.cat([states[:-1], (states[-1] + last)[None]])
        return Arrived(states, memory, is_total=self.is_total and memory is not None)


class _Forward(NamedTuple):
    """What the layers were given when they were run again, and what dropout multiplied their outputs by."""

    steps: list[Steps]
    masks: list[Tensor]
