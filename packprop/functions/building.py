"""What rules are made of: saved tensors, choices of samples, and the two common kinds of entries."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from packprop.algebra.order import fold_swapped, fold_to
from packprop.algebra.structures import Dense, Outer, Structure, filled_up
from packprop.errors import PackpropError
from packprop.functions.entry import (
    Call,
    Cotangents,
    Entry,
    Fans,
    Samples,
    Scratch,
    StructureOf,
    Taken,
    name_of,
)
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype
from packprop.tensors.state import version


class _Current(threading.local):
    taken: tuple[Taken, ...] = ()


_current = _Current()
"""What had gone into the call whose entries are being made in this thread, if that was earlier."""


@contextlib.contextmanager
def as_it_was(call: Call) -> Iterator[None]:
    """Inside, inputs of a call are saved as they were when it was made."""
    before, _current.taken = _current.taken, call.taken or ()
    try:
        yield
    finally:
        _current.taken = before


class SavedTensor:
    """An input of a function, which must not change before it is needed in the backward pass."""

    def __init__(self, tensor: Tensor, function_name: str) -> None:
        earlier = [each.version for each in _current.taken if each.tensor is tensor]
        self._version_before = earlier[0] if earlier else version(tensor)
        self._tensor, self._function_name = tensor, function_name

    def __call__(self) -> Tensor:
        """The tensor; raises if it was changed."""
        if version(self._tensor) != self._version_before:
            raise changed_since(self._function_name, self._tensor)
        return self._tensor


def changed_since(name: str, tensor: Tensor) -> PackpropError:
    """The error for an input that was changed after the function ``name`` had used it."""
    return PackpropError(
        "A per-sample quantity was asked for.",
        f"an input of {name}, of shape {list(tensor.shape)}",
        "it was changed in place after the function had used it",
        "use the out-of-place version of the operation that changes it, or clone it first; call backward() "
        "before an optimizer's step",
    )


def select_samples(tensor: Tensor, samples: Samples, skip: int = 0) -> Tensor:
    """Some samples of a tensor whose samples are at axis ``skip``, in at least single precision."""
    if isinstance(samples, Tensor):
        tensor = tensor.index_select(skip, samples.to(tensor.device))
    elif samples != slice(None):
        tensor = tensor[(slice(None),) * skip + (samples,)]
    return tensor.to(accumulation_dtype(tensor.dtype))


def rowwise(
    build: Callable[..., Structure], name: str, *inputs: Tensor | Callable[[], Tensor]
) -> StructureOf:
    """``structure_of`` for inputs that hold the samples on the same axis as the output.

    ``build`` is given the cotangent ``[v, n, ...]`` and the inputs ``[n, ...]`` of the chosen samples.
    """
    saved_inputs = [SavedTensor(each, name) if isinstance(each, Tensor) else each for each in inputs]

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is not None:
            cotangent = select_samples(layout.to_front(cotangent, 1), samples, 1)
        inputs = (select_samples(layout.to_front(saved()), samples) for saved in saved_inputs)
        structure = build(cotangent, *inputs)
        return structure if layout.rows is None else filled_up(structure)

    return structure_of


def affine(call: Call, x: Tensor, weight: Tensor, *, transposed: bool = False) -> Entry:
    """A weight ``[o, i]`` (``[i, o]`` if ``transposed``) applied to the last axis of ``x``."""
    fold = (fold_swapped if transposed else fold_to)(weight.shape)
    fan_in = x.shape[-1]
    fan_out = weight.numel() // fan_in

    def build(cotangent: Tensor | None, x: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, fan_out)
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), cotangent, fold)

    last = len(call.shape) - 1
    return Entry(
        weight,
        "Outer",
        rowwise(build, name_of(call.function), x),
        admits=lambda axis: axis != last,
        scratch=Scratch(inputs_only=fan_in),
        fans=Fans(1, fan_in, fan_out),
        linear=True,
    )


def scaled(
    call: Call,
    parameter: Tensor,
    factor: Callable[[], Tensor] | float = 1.0,
    *,
    aligned: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    linear: bool = False,
) -> Entry:
    """A parameter that multiplies entries of the output: ``y = parameter * factor + ...``.

    Args:
        call: The call.
        parameter: The parameter, broadcast against the output.
        factor: What multiplies it, computed when needed, broadcast against the output; or a number.
        aligned: The parameter's shape among the output's axes, where it is not aligned on the right; of an
            expanded parameter, its own or that of what it was expanded from.
        window: Axis of the output and offset of the part that the parameter makes up (concatenation).
        linear: Whether ``factor`` is known not to depend on the parameter; numbers and saved tensors do not.
    """
    source = call.unexpanded(parameter)
    if aligned is None or math.prod(aligned) == source.numel():  # else autograd goes through the expansion
        parameter = source
    dims = len(call.shape)
    broadcast_shape = tuple(aligned or (1,) * (dims - parameter.dim()) + tuple(parameter.shape))

    def structure_of(
        cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples, power: int = 1
    ) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        if window is not None:
            axis, offset = window
            cotangent = cotangent.narrow(axis + 1, offset, broadcast_shape[axis])
        product = select_samples(layout.to_front(cotangent, 1), samples, 1)
        if callable(factor):
            shape = torch.Size(cotangent.shape[1:])
            product = product * select_samples(layout.to_front(factor().expand(shape)), samples) ** power
        elif factor != 1.0:
            product = product * factor**power
        rows = sum_over_broadcast(product, layout, broadcast_shape, samples)
        return Dense(rows.reshape(*rows.shape[:2], *parameter.shape))

    linear = linear or not callable(factor) or isinstance(factor, SavedTensor)
    return Entry(
        parameter,
        "Scale",
        structure_of,
        admits=lambda axis: window is None or axis != window[0],
        linear=linear,
        constant=not callable(factor),
        squares=functools.partial(structure_of, power=2) if linear else None,
    )


def sum_over_broadcast(
    product: Tensor, layout: Layout, broadcast_shape: tuple[int, ...], samples: Samples
) -> Tensor:
    """Sum ``[v, n, (k), *rest]`` over the axes that a parameter is broadcast over, but for the samples.

    ``k`` are the positions that share the samples' axis; ``broadcast_shape`` is the parameter's shape among the
    output's axes.
    """
    rest, along_samples = broadcast_shape, 1  # the parameter's extent along the samples' axes
    if layout.axis is not None:
        along_samples = math.prod(broadcast_shape[layout.axis : layout.behind])
        before, behind = broadcast_shape[: layout.axis], broadcast_shape[layout.behind :]
        rest = before + behind
        if layout.folded:  # parts stay where the sample axis was
            rest = (*before, 1 if along_samples == 1 else layout.parts, *behind)
    summed = [2 + axis for axis, size in enumerate(rest) if size == 1 and product.shape[2 + axis] != 1]
    rows = product.sum(summed, keepdim=True) if summed else product.clone()  # never a view of the cotangent
    if along_samples == 1:
        return rows
    # each sample has its own entries of the parameter: its row is zero elsewhere
    index = torch.arange(layout.samples, device=rows.device)
    chosen = index[samples.to(rows.device) if isinstance(samples, Tensor) else samples]
    full = rows.new_zeros(rows.shape[0], len(chosen), layout.samples, *rows.shape[2:])
    full[:, torch.arange(len(chosen), device=rows.device), chosen] = rows
    back = layout.from_front(full, 2)
    shared = [2 + axis for axis in layout.axes if layout.joined and broadcast_shape[axis] == 1]
    return back.sum(shared, keepdim=True) if shared else back
