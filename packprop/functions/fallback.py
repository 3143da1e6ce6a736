"""Any function: evaluated again by itself, and pulled back for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.structures import Dense, Structure
from packprop.functions.building import SavedTensor
from packprop.functions.entry import Call, Cotangents, Entry, Samples, Scratch, is_in_place, name_of
from packprop.functions.pulling import pulled
from packprop.functions.vectorised import Copied, effort_of_copies, gradients_of_copies
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.precision import accumulation_dtype
from packprop.tensors.random import random_numbers_from
from packprop.tensors.repeated import Products, one_by_one


def fallback(call: Call, parameter: Tensor) -> Entry:
    """The entry for a function without a rule: evaluate it again by itself, pull back for each sample.

    Exact wherever the samples are separate in the outputs. Where the function takes its samples on the axis of
    its outputs, all of them are pulled back at once, see NOTE [A parameter for each sample]; else it costs one
    vector-Jacobian product of the function for each sample and column.
    """
    saved = [SavedTensor(tensor, name_of(call.function)) for tensor in tensors_in((call.args, call.kwargs))]

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        if all(cotangent is None for cotangent in cotangents):
            return Dense(None)
        for each in saved:
            each()
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad(), _random_numbers_of(call):
            weight = parameter.view_as(parameter) if differentiable else parameter.detach()
            weight.requires_grad_(True)

            isolated = {id(parameter): weight}

            def isolate(tensor: Tensor) -> Tensor:
                if id(tensor) not in isolated:
                    isolated[id(tensor)] = tensor if differentiable else tensor.detach()
                return isolated[id(tensor)]

            args, kwargs = map_tensors(isolate, call.args), map_tensors(isolate, call.kwargs)
            if is_in_place(call.function):  # what it overwrites is needed the next time
                args = (args[0].clone(), *args[1:])
            outputs = call.function(*args, **kwargs)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        input_nodes = {tensor.grad_fn for tensor in tensors_in((args, kwargs))}
        cotangents = _from_outside(outputs, cotangents, input_nodes)
        if not (differentiable or is_in_place(call.function) or call.random_state is not None):
            chosen = _sample_numbers(samples, layouts[0].samples)
            shared = [isolated[id(other)] for other in call.parameters if id(other) in isolated]
            copied = Copied(call.function, (args, kwargs), weight, shared)
            rows = gradients_of_copies(copied, outputs, cotangents, layouts, chosen)
            if rows is not None:
                return Dense(rows.to(accumulation_dtype(rows.dtype)))
        return pulled_samplewise(outputs, weight, cotangents, layouts, samples)

    def effort(layout: Layout) -> str:
        copied = Copied(call.function, (call.args, call.kwargs), parameter, call.parameters)
        return effort_of_copies(copied, layout.axis)

    return Entry(parameter, "Dense", structure_of, scratch=Scratch(parameter.numel()), effort=effort)


def _from_outside(outputs: Sequence[Any], cotangents: Cotangents, input_nodes: set[Any]) -> Cotangents:
    """Cotangents without the part that came from other outputs of the same call.

    An output may be computed from another one, as the state of an LSTM cell from its memory. Then the whole
    gradient arrives at the latter, and would be counted twice: once by itself, once through the former.

    Args:
        outputs: Outputs of the function, evaluated again.
        cotangents: What arrived at each, ``[v, *y]``.
        input_nodes: Nodes that made the inputs.
    """
    nodes = [output.grad_fn if isinstance(output, Tensor) else None for output in outputs]
    earlier = [_upstream(node, input_nodes) & set(nodes) for node in nodes]
    if not any(earlier):
        return cotangents
    outside = list(cotangents)
    for place in sorted(range(len(outputs)), key=lambda place: -len(earlier[place])):  # the last ones first
        later = [
            other
            for other, others_earlier in enumerate(earlier[: len(outside)])
            if nodes[place] in others_earlier and outside[other] is not None
        ]
        if later and (cotangent := outside[place]) is not None:
            columns = [column for other in later if (column := outside[other]) is not None]
            outside[place] = cotangent - pulled([outputs[other] for other in later], outputs[place], columns)
    return outside


def _upstream(node: Any, ends: set[Any]) -> set[Any]:
    """Nodes that a node's inputs came from, up to those in ``ends`` and without them."""
    seen: set[Any] = set()
    stack = [] if node is None else [node]
    while stack:
        for upstream, _ in stack.pop().next_functions:
            if upstream is not None and upstream not in seen and upstream not in ends:
                seen.add(upstream)
                stack.append(upstream)
    return seen


def pulled_samplewise(
    outputs: Sequence[Any],
    parameter: Tensor,
    cotangents: Cotangents,
    layouts: Sequence[Layout],
    samples: Samples,
) -> Structure:
    """Cotangents at tensors or edges, pulled back to a parameter once for each sample."""
    reached = [
        (output, cotangent, layout)
        for output, cotangent, layout in zip(outputs, cotangents, layouts, strict=False)
        if cotangent is not None and not (isinstance(output, Tensor) and not output.requires_grad)
    ]
    if not reached:  # an output of several, which does not depend on the parameter
        return _zero_rows(parameter, cotangents, layouts, samples)
    numbers = _sample_numbers(samples, reached[0][2].samples)

    def gradient(place: int) -> Products:
        columns = [_of_sample(numbers[place], cotangent, layout) for _, cotangent, layout in reached]
        return [pulled([output for output, _, _ in reached], parameter, columns)]

    gradients = [piece for (piece,) in one_by_one(len(numbers), gradient) if piece is not None]
    rows = torch.stack(gradients, 1)
    return Dense(rows.to(accumulation_dtype(rows.dtype)))


def _zero_rows(
    parameter: Tensor, cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples
) -> Structure:
    """Gradients of zero, if a cotangent has arrived at all."""
    arrived = next((cotangent for cotangent in cotangents if cotangent is not None), None)
    if arrived is None:
        return Dense(None)
    count = len(_sample_numbers(samples, layouts[0].samples))
    dtype = accumulation_dtype(parameter.dtype)
    return Dense(parameter.new_zeros(len(arrived), count, *parameter.shape, dtype=dtype))


def _sample_numbers(samples: Samples, count: int) -> Sequence[int]:
    """The numbers of the chosen samples, out of ``count``."""
    if isinstance(samples, slice):
        return range(count)[samples]
    return range(len(samples)) if is_dry_run() else samples.tolist()


def _of_sample(sample: int, cotangent: Tensor, layout: Layout) -> Tensor:
    """A cotangent that is zero for all samples but one."""
    if layout.axis is None:
        return cotangent
    own = torch.arange(layout.samples, device=cotangent.device) == sample
    return cotangent * layout.broadcast(own, cotangent.dim(), 1)


def _random_numbers_of(call: Call) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn as the call drew them, if it drew any."""
    return nullcontext() if call.random_state is None else random_numbers_from(call.random_state)
