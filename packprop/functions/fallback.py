"""Any function: evaluated again by itself, and pulled back once for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.structures import Dense, Structure
from packprop.functions.entry import Call, Cotangents, Entry, Samples
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.precision import accumulation_dtype
from packprop.tensors.random import random_numbers_from


def fallback(call: Call, parameter: Tensor) -> Entry:
    """Any function: evaluated again by itself, then pulled back once for each sample.

    Exact wherever the samples are separate in the outputs; costs one vector-Jacobian product of the
    function for each sample and column.
    """

    def structure_of(cotangents: Cotangents, where: Sequence[Layout], samples: Samples) -> Structure:
        if all(cotangent is None for cotangent in cotangents):
            return Dense(None)
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad(), _random_numbers_of(call):
            weight = parameter.view_as(parameter) if differentiable else parameter.detach()
            weight.requires_grad_(True)

            def isolate(tensor: Tensor) -> Tensor:
                if tensor is parameter:
                    return weight
                return tensor if differentiable else tensor.detach()

            args, kwargs = map_tensors(isolate, call.args), map_tensors(isolate, call.kwargs)
            outputs = call.function(*args, **kwargs)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        cotangents = _from_outside(
            outputs, cotangents, {tensor.grad_fn for tensor in tensors_in((args, kwargs))}
        )
        return pulled_samplewise(outputs, weight, cotangents, where, samples)

    return Entry(parameter, "Dense", structure_of, scratch=parameter.numel())


def _from_outside(outputs: Sequence[Any], cotangents: Cotangents, ends: set[Any]) -> Cotangents:
    """Cotangents without what came from other outputs of the same call.

    Where an output is computed from another one, as the state of an LSTM cell from its memory, what arrives at
    the latter is the whole gradient: it would be counted once by itself and once through the former.

    Args:
        outputs: Of the function, evaluated again.
        cotangents: What arrived at each, ``[v, *y]``.
        ends: Nodes that made the inputs.
    """
    made = [output.grad_fn if isinstance(output, Tensor) else None for output in outputs]
    above = [_upstream(node, ends) & set(made) for node in made]
    if not any(above):
        return cotangents
    outside = list(cotangents)
    for place in sorted(range(len(outputs)), key=lambda place: -len(above[place])):  # the last ones first
        later = [
            other
            for other, nodes in enumerate(above[: len(outside)])
            if made[place] in nodes and outside[other] is not None
        ]
        if later and (cotangent := outside[place]) is not None:
            columns = [column for other in later if (column := outside[other]) is not None]
            outside[place] = cotangent - pulled([outputs[other] for other in later], outputs[place], columns)
    return outside


def _upstream(node: Any, ends: set[Any]) -> set[Any]:
    """The nodes that a node's inputs came from, as far as those of ``ends``."""
    found: set[Any] = set()
    stack = [] if node is None else [node]
    while stack:
        for above, _ in stack.pop().next_functions:
            if above is not None and above not in found and above not in ends:
                found.add(above)
                stack.append(above)
    return found


def pulled_samplewise(
    outputs: Sequence[Any],
    parameter: Tensor,
    cotangents: Cotangents,
    where: Sequence[Layout],
    samples: Samples,
) -> Structure:
    """Cotangents at tensors or edges, pulled back to a parameter once for each sample."""
    pairs = [
        (output, cotangent, layout)
        for output, cotangent, layout in zip(outputs, cotangents, where, strict=False)
        if cotangent is not None and not (isinstance(output, Tensor) and not output.requires_grad)
    ]
    if not pairs:
        return Dense(None)
    count = pairs[0][2].samples
    found = [
        pulled(
            [output for output, _, _ in pairs],
            parameter,
            [_only(cotangent, layout, sample) for _, cotangent, layout in pairs],
        )
        for sample in _listed(samples, count)
    ]
    stacked = torch.stack(found, 1)
    return Dense(stacked.to(accumulation_dtype(stacked.dtype)))


def _listed(samples: Samples, count: int) -> Sequence[int]:
    """The indices of the samples that were chosen."""
    if isinstance(samples, slice):
        return range(count)[samples]
    return range(len(samples)) if is_dry_run() else samples.tolist()


def pulled(outputs: Sequence[Any], parameter: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Vector-Jacobian products of every column ``[v, *y]`` with a parameter, ``[v, *p]``.

    # NOTE [Autograd in rules]
    Here alone a rule calls autograd: what has no rule is differentiated by PyTorch itself.
    """
    differentiable = torch.is_grad_enabled()

    def pull(vectors: Sequence[Tensor], batched: bool) -> Tensor:
        (product,) = torch.autograd.grad(
            outputs,
            parameter,
            vectors,
            is_grads_batched=batched,
            retain_graph=True,
            create_graph=differentiable,
            allow_unused=True,
        )
        if product is not None:
            return product.to_dense() if product.is_sparse else product
        lead = vectors[0].shape[:1] if batched else ()
        return parameter.new_zeros((*lead, *parameter.shape))

    try:
        return pull(columns, batched=True)
    except RuntimeError:  # a function of the user's own without a batching rule
        count = columns[0].shape[0]
        return torch.stack(
            [pull([column[place] for column in columns], batched=False) for place in range(count)]
        )


def _only(cotangent: Tensor, layout: Layout, sample: int) -> Tensor:
    """A cotangent that is zero but for one sample."""
    if layout.axis is None:
        return cotangent
    mask = layout.sample_of(cotangent.device) == sample
    return cotangent * mask.view([-1 if axis == layout.axis + 1 else 1 for axis in range(cotangent.dim())])


def _random_numbers_of(call: Call) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn as the call drew them, if it drew any."""
    return nullcontext() if call.random_state is None else random_numbers_from(call.random_state)
