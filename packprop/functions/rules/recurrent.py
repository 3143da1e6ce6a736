"""Recurrent functions and their cells: every weight is used by an affine map at every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.order import fold_to
from packprop.algebra.recurrence import Kind, Weights, gated_memory
from packprop.algebra.structures import Dense, Outer, Structure
from packprop.functions.building import SavedTensor, scaled, select_samples
from packprop.functions.entry import Call, Cotangents, Entry, Fans, Samples, Scratch, name_of
from packprop.functions.recurrent_calls import Opened, Packing, RecurrentCall
from packprop.functions.registry import register_use
from packprop.tensors.layout import Layout

KINDS: dict[Callable[..., Any], Kind] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
    torch.rnn_tanh_cell: "tanh",
    torch.rnn_relu_cell: "relu",
}
"""What a step of each function does."""


HIDDEN_DRAWS = (
    "dropout between its layers was drawn by cuDNN, which does not say what it dropped",
    "set dropout=0, call .eval() on the layer, or run it inside torch.backends.cudnn.flags(enabled=False)",
)


@register_use(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrence(call: Call, *args: Any, **kwargs: Any) -> list[Entry] | None:
    is_packed = "batch_sizes" in kwargs or (len(args) > 3 and not isinstance(args[3], bool))
    return (_of_packed_sequences if is_packed else _of_sequences)(call, *args, **kwargs)


def _of_sequences(
    call: Call,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    *,
    batch_sizes: Tensor | None = None,
) -> list[Entry] | None:
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if call.consumes(input) or input.dim() != (3 if batch_sizes is None else 2):
        return None
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    starts = range(0, num_layers * directions * each, each)
    opened = _opened(
        call, input, states, [_weights(params[start : start + each], has_biases) for start in starts]
    )
    opened.directions, opened.batch_first = directions, batch_first
    if train and num_layers > 1:
        opened.dropout, opened.random_state = dropout, call.random_state
    axis, rows = 0 if batch_first or batch_sizes is not None else 1, input.shape[:-1].numel()
    sequences = None
    if batch_sizes is not None:
        opened.packing = packing = Packing.of(batch_sizes)
        rows = packing.steps * packing.sequences
        everyone = tuple(range(packing.sequences))
        sequences = (packing.sequence_of_row, *[everyone] * len(states))
    entries = [
        (number, replace(entry, sample_axes=(axis, *[1] * len(states)), sequences=sequences))
        for number, entry in _entries(call, opened, states, rows)
    ]
    opened.lowest = min((number for number, _ in entries), default=0) // directions
    if opened.dropout and input.is_cuda and torch.backends.cudnn.is_acceptable(input):
        return [replace(entry, refusal=HIDDEN_DRAWS) for _, entry in entries]
    return [entry for _, entry in entries]


def _of_packed_sequences(
    call: Call, data: Tensor, batch_sizes: Tensor, *others: Any, **named: Any
) -> list[Entry] | None:
    return _of_sequences(call, data, *others, **named, batch_sizes=batch_sizes)


@register_use(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def _cell(
    call: Call,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> list[Entry] | None:
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if call.consumes(input) or (b_ih is None) != (b_hh is None):
        return None
    opened = _opened(call, input, states, [Weights(w_ih, w_hh, b_ih, b_hh)])
    opened.is_cell = True
    opened.is_total = len(states) > 1 and _state_is_made_of_memory(input.device.type, w_ih.dtype)
    rows = input.numel() // input.shape[-1]
    return [replace(entry, admits=lambda axis: axis == 0) for _, entry in _entries(call, opened, states, rows)]


@functools.cache
def _state_is_made_of_memory(device: str, dtype: torch.dtype) -> bool:
    """Whether a call of an LSTM's cell makes several nodes, so that all of a gradient arrives at the memory.

    Where one node makes both outputs, what arrives at each is what comes from outside. This is seen from the
    smallest cell: that there is a fused one depends on the device.
    """
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        one = torch.ones(1, 1, device=device, dtype=dtype)
        weight = torch.ones(4, 1, device=device, dtype=dtype, requires_grad=True)
        state, memory = torch.lstm_cell(one, (one, one), weight, weight)
    return state.grad_fn is not memory.grad_fn


def _opened(call: Call, x: Tensor, states: Sequence[Tensor], weights: Sequence[Weights]) -> RecurrentCall:
    name = name_of(call.function)
    saved = [SavedTensor(state, name) for state in states]
    unchanged = [SavedTensor(each, name) for own in weights for each in own if each is not None]
    return RecurrentCall(KINDS[call.function], SavedTensor(x, name), saved, weights, unchanged)


def _weights(params: Sequence[Tensor], has_biases: bool) -> Weights:
    biases = params[2:4] if has_biases else (None, None)
    projected = len(params) % 2 == 1
    return Weights(params[0], params[1], biases[0], biases[1], params[-1] if projected else None)


def _entries(call: Call, opened: RecurrentCall, states: Sequence[Tensor], rows: int) -> list[tuple[int, Entry]]:
    """An entry for each parameter, with the direction of the layer that it belongs to, by number."""
    entries: list[tuple[int, Entry]] = []
    for number, own in enumerate(opened.weights):
        entries += [
            (number, _affine(opened, number, own.input, rows, lambda o: o.steps.input, _at_inputs)),
            (number, _affine(opened, number, own.state, rows, lambda o: o.steps.before, _at_states)),
        ]
        if own.input_bias is not None and own.state_bias is not None:
            entries.append((number, _bias(opened, number, own.input_bias, _at_inputs)))
            entries.append((number, _bias(opened, number, own.state_bias, _at_states)))
        if own.projection is not None:
            entries.append((number, _affine(opened, number, own.projection, rows, _gated, _projected)))
    entries = [(number, entry) for number, entry in entries if call.consumes(entry.parameter)]
    for place, state in enumerate(states):
        if call.consumes(state):
            entries.append((0, _first_state(call, opened, state, bool(place))))
    return entries


def _at_inputs(opened: Opened) -> Tensor | None:
    return None if opened.signals is None else opened.signals.input


def _at_states(opened: Opened) -> Tensor | None:
    return None if opened.signals is None else opened.signals.state


def _projected(opened: Opened) -> Tensor | None:
    return None if opened.signals is None else opened.signals.projected


def _gated(opened: Opened) -> Tensor:
    return gated_memory(opened.steps, opened.weights)


def _affine(
    call: RecurrentCall,
    number: int,
    weight: Tensor,
    rows: int,
    inputs_of: Callable[[Opened], Tensor],
    signals_of: Callable[[Opened], Tensor | None],
) -> Entry:
    """A weight ``[o, i]`` that is applied at every step."""
    fan_out, fan_in = weight.shape
    fold = fold_to(weight.shape)

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        opened, layout = call.opened(cotangents)[number], call.layout(cotangents, layouts)
        x = select_samples(layout.to_front(inputs_of(opened).transpose(0, 1)), samples)
        signals = signals_of(opened)
        if signals is not None:
            signals = select_samples(layout.to_front(signals.permute(1, 2, 0, 3), 1), samples, 1)
            signals = signals.reshape(*signals.shape[:2], -1, 1, fan_out)
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), signals, fold)

    return Entry(
        weight,
        "Outer",
        structure_of,
        scratch=Scratch(inputs_only=fan_in),
        fans=Fans(1, fan_in, fan_out, rows=rows),
    )


def _bias(
    call: RecurrentCall, number: int, bias: Tensor, signals_of: Callable[[Opened], Tensor | None]
) -> Entry:
    """A bias ``[o]`` that is added at every step."""

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        signals = signals_of(call.opened(cotangents)[number])
        if signals is None:
            return Dense(None)
        layout = call.layout(cotangents, layouts)
        summed = select_samples(layout.to_front(signals.sum(0), 1), samples, 1)
        return Dense(summed.reshape(*summed.shape[:2], -1, summed.shape[-1]).sum(2))

    return Entry(bias, "Scale", structure_of)


def _first_state(call: Call, recurrent: RecurrentCall, state: Tensor, is_memory: bool) -> Entry:
    """A trained state before the first step, or a trained first memory."""
    entry = scaled(replace(call, shape=state.shape), state)

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout = recurrent.layout(cotangents, layouts)
        if layout.axis is not None:
            layout = layout._replace(axis=state.dim() - 2)
        signals = [opened.signals for opened in recurrent.opened(cotangents)]
        arrived = [each.first_memory if is_memory else each.first for each in signals if each is not None]
        if not arrived:
            return Dense(None)
        first = torch.stack([each for each in arrived if each is not None], 1)
        return entry.structure_of([first.reshape(len(first), *state.shape)], [layout], samples)

    return replace(entry, structure_of=structure_of, linear=False, constant=False, squares=None)
