"""An LSTM's layer in one node of oneDNN: each weight enters an affine map at every step.

# NOTE [Recurrent nodes]
On a CPU, recurrent layers and cells leave nodes of plain functions, some for each step, which need no rule. An
LSTM in single precision leaves one ``MkldnnRnnLayer`` for each layer and direction, which saves the states
after all steps. This module expands it into steps, and goes through them once for all parameters.

On CUDA, one ``CudnnRnn`` computes all layers. It saves neither the tensors between layers nor the masks of
dropout, so packprop calls it for each sample. Cells leave ``ThnnFusedLstmCell`` and ``ThnnFusedGruCell``
between products with the weights. The products have rules, and the fused part has only biases as operands.
``docs/gpu.md`` has results of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.recurrence import Signals, Steps, Weights, pull_back
from packprop.engine.algebra.structures import Dense, Outer, Structure
from packprop.engine.functions.building import scaled, select_samples
from packprop.engine.functions.entry import ArrivedCotangents, Cotangents, Entry, Fans, Samples, Scratch
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.registry import rule_of
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype

SAVED = "input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_", "result0"
"""The saved tensors of the node: its operands, in order, and the states after all steps."""

INPUT, OF_INPUT, OF_STATE, *BIASES, STATE, MEMORY = range(7)
"""Places of operands."""

LSTM = 2
"""The mode of an LSTM's node."""


class _Opened(NamedTuple):
    """Inputs and states of the steps, and the cotangents in them; ``None`` if no cotangent has arrived."""

    steps: Steps
    signals: Signals | None


class _Layer:
    """A layer of an LSTM in one direction; ``call`` is its node, at any place.

    The cotangents of a sweep hold the results computed from them, which serve all parameters of the layer.
    """

    def __init__(self, call: NodeCall) -> None:
        self._saved = [call.saved(name) for name in SAVED]
        self._is_reversed, self._has_biases = bool(call.option("reverse")), bool(call.option("has_biases"))
        self.shape = call.shape
        """Steps, rows of the batch, and size of a state."""

    def opened(self, cotangents: Cotangents) -> _Opened:
        """Return inputs and states of the steps, and the cotangents in them, from those at the outputs."""
        if not isinstance(cotangents, ArrivedCotangents):
            return self._open(cotangents)
        if cotangents.derived is None:
            cotangents.derived = self._open(cotangents)
        found: _Opened = cotangents.derived
        return found

    def _open(self, cotangents: Cotangents) -> _Opened:
        dtype = accumulation_dtype(self._saved[0]().dtype)
        x, of_input, of_state, *biases, first, memory, after = (saved().to(dtype) for saved in self._saved)
        x, after = self._in_order(x), self._in_order(after)
        steps = Steps(x, torch.cat([first[None], after[:-1]]), memory)
        states, last, at_memory = (None if each is None else each.to(dtype) for each in cotangents[:3])
        columns = next((len(each) for each in cotangents if each is not None), 0)
        if not columns:
            return _Opened(steps, None)
        count, rows, size = self.shape
        if states is None:
            states = x.new_zeros(1, 1, 1, 1).expand(count, columns, rows, size)
        else:
            states = self._in_order(states.transpose(0, 1))
        if last is not None:
            states = torch.cat([states[:-1], (states[-1] + last)[None]])
        weights = Weights(of_input, of_state, biases[0] + biases[1] if self._has_biases else None)
        return _Opened(steps, pull_back(steps, weights, states, at_memory))

    def _in_order(self, tensor: Tensor) -> Tensor:
        """Return steps in the order of their computation."""
        return tensor.flip(0) if self._is_reversed else tensor


def _layout(cotangents: Cotangents, layouts: Sequence[Layout]) -> Layout:
    """Return the layout of samples on axis 0 of ``[b, *]``."""
    pairs = zip(cotangents, layouts, strict=False)
    layout = next((layout for cotangent, layout in pairs if cotangent is not None), layouts[0])
    return layout if layout.axis is None else layout._replace(axis=0)


@rule_of("MkldnnRnnLayer", form="shape")
def _parameter_of_layer(call: NodeCall) -> Entry | None:
    """Return the entry of a weight, a bias, the first state or the first memory of an LSTM's layer."""
    if call.option("mode") != LSTM or call.place == INPUT:
        return None
    layer = _Layer(call)
    if call.place in (OF_INPUT, OF_STATE):
        entry = _weight(call, layer)
    elif call.place in BIASES:
        entry = _bias(call, layer)
    else:
        entry = _first_state(call, layer)
    return replace(entry, admits=lambda axis: axis < 2, sample_axes=(1, 0, 0))


def _weight(call: NodeCall, layer: _Layer) -> Entry:
    """Return the entry of a weight ``[o, i]`` that is applied at every step."""
    fan_out, fan_in = call.operand.shape
    fold = fold_to(call.operand.shape)

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        (steps, signals), layout = layer.opened(cotangents), _layout(cotangents, layouts)
        x = steps.input if call.place == OF_INPUT else steps.before
        x = select_samples(layout.to_front(x.transpose(0, 1)), samples)
        arrived = None
        if signals is not None:
            arrived = layout.to_front(signals.maps.permute(1, 2, 0, 3), 1)
            arrived = select_samples(arrived, samples, 1)
            arrived = arrived.reshape(*arrived.shape[:2], -1, 1, fan_out)
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), arrived, fold)

    return Entry(
        call.operand.tensor,
        "Outer",
        structure_of,
        scratch=Scratch(inputs_only=fan_in),
        fans=Fans(1, fan_in, fan_out, rows=layer.shape[:2].numel()),
    )


def _bias(call: NodeCall, layer: _Layer) -> Entry:
    """Return the entry of a bias ``[o]`` that is added at every step."""

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        signals = layer.opened(cotangents).signals
        if signals is None:
            return Dense(None)
        summed = _layout(cotangents, layouts).to_front(signals.maps.sum(0), 1)
        summed = select_samples(summed, samples, 1)
        return Dense(summed.reshape(*summed.shape[:2], -1, summed.shape[-1]).sum(2))

    return Entry(call.operand.tensor, "Scale", structure_of)


def _first_state(call: NodeCall, layer: _Layer) -> Entry:
    """Return the entry of a trained first state, or a trained first memory ``[b, h]``."""
    entry = scaled(replace(call, shapes=[call.operand.shape]))

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        signals = layer.opened(cotangents).signals
        if signals is None:
            return Dense(None)
        arrived = signals.state if call.place == STATE else signals.memory
        return entry.structure_of([arrived], [_layout(cotangents, layouts)], samples)

    return replace(entry, structure_of=structure_of, linear=False, constant=False, squares=None)
