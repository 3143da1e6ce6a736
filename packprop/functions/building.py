"""What rules are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from packprop.algebra.order import fold_swapped, fold_to
from packprop.algebra.structures import Dense, Outer, Structure
from packprop.errors import PackpropError
from packprop.functions.entry import Call, Cotangents, Entry, Fans, Samples, StructureOf, name_of
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype
from packprop.tensors.state import version


class SavedTensor:
    """A tensor that must not change before the cotangent arrives."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._tensor, self._before, self._name = tensor, version(tensor), name

    def __call__(self) -> Tensor:
        """The tensor, unless it was changed."""
        if version(self._tensor) != self._before:
            raise changed_since(self._name, self._tensor)
        return self._tensor


def changed_since(name: str, tensor: Tensor) -> PackpropError:
    """The error for an input of a function that no longer holds what the function had used."""
    return PackpropError(
        "A per-sample quantity was asked for.",
        f"an input of {name}, of shape {list(tensor.shape)}",
        "it was changed in place after the function had used it",
        "use the out-of-place version of the operation that changes it, or clone it first",
    )


def select_samples(tensor: Tensor, samples: Samples, skip: int = 0) -> Tensor:
    """Some samples of a tensor whose samples are at axis ``skip``, in at least single precision."""
    if isinstance(samples, Tensor):
        tensor = tensor.index_select(skip, samples.to(tensor.device))
    elif samples != slice(None):
        tensor = tensor[(slice(None),) * skip + (samples,)]
    return tensor.to(accumulation_dtype(tensor.dtype))


def rowwise(build: Callable[..., Structure], name: str, *inputs: Tensor) -> StructureOf:
    """A meeting built from cotangent and inputs whose leading axes hold the samples alike."""
    saved = [SavedTensor(tensor, name) for tensor in inputs]

    def structure_of(cotangents: Cotangents, where: Sequence[Layout], samples: Samples) -> Structure:
        cotangent = cotangents[0]
        if cotangent is not None:
            cotangent = select_samples(where[0].to_front(cotangent, 1), samples, 1)
        return build(cotangent, *(select_samples(where[0].to_front(tensor()), samples) for tensor in saved))

    return structure_of


def affine(call: Call, x: Tensor, weight: Tensor, *, transposed: bool = False) -> Entry:
    """A weight ``[o, i]`` (``[i, o]`` if ``transposed``) applied to the last axis of ``x``."""
    fold = (fold_swapped if transposed else fold_to)(weight.shape)
    fan_in = x.shape[-1]

    def build(cotangent: Tensor | None, x: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, weight.numel() // fan_in)
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), cotangent, fold)

    structure_of = rowwise(build, name_of(call.function), x)
    last = len(call.shape) - 1
    fans = Fans(1, fan_in, weight.numel() // fan_in)
    return Entry(
        weight, "Outer", structure_of, admits=lambda axis: axis != last, alone=fan_in, fans=fans, linear=True
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
        aligned: The parameter's shape among the output's axes, where it is not aligned on the right.
        window: Axis of the output and offset of the part that the parameter makes up (concatenation).
        linear: Whether ``factor`` is known not to depend on the parameter; numbers and saved tensors do not.
    """
    parameter = call.unexpanded(parameter)
    dims = len(call.shape)
    form = tuple(aligned or (1,) * (dims - parameter.dim()) + tuple(parameter.shape))

    def structure_of(
        cotangents: Cotangents, where: Sequence[Layout], samples: Samples, power: int = 1
    ) -> Structure:
        layout, cotangent = where[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        if window is not None:
            axis, offset = window
            cotangent = cotangent.narrow(axis + 1, offset, form[axis])
        product = select_samples(layout.to_front(cotangent, 1), samples, 1)
        if callable(factor):
            shape = torch.Size(cotangent.shape[1:])
            product = product * select_samples(layout.to_front(factor().expand(shape)), samples) ** power
        elif factor != 1.0:
            product = product * factor**power
        rows = _reduce(product, layout, form, samples)
        return Dense(rows.reshape(*rows.shape[:2], *parameter.shape))

    def admits(axis: int) -> bool:
        return window is None or axis != window[0]

    linear = linear or not callable(factor) or isinstance(factor, SavedTensor)
    squares = functools.partial(structure_of, power=2) if linear else None
    constant = not callable(factor)
    return Entry(
        parameter, "Scale", structure_of, admits=admits, linear=linear, constant=constant, squares=squares
    )


def _reduce(product: Tensor, layout: Layout, form: tuple[int, ...], samples: Samples) -> Tensor:
    """Sum ``[v, n, (k), *rest]`` over what a parameter of extents ``form`` is broadcast over."""
    if layout.axis is None:
        rest, own = form, None
    else:
        rest, own = form[: layout.axis] + form[layout.axis + 1 :], form[layout.axis]
        if layout.parts > 1:  # parts stay where the sample axis was
            rest = (*form[: layout.axis], 1 if own == 1 else layout.parts, *form[layout.axis + 1 :])
    summed = [2 + axis for axis, size in enumerate(rest) if size == 1 and product.shape[2 + axis] != 1]
    rows = product.sum(summed, keepdim=True) if summed else product.clone()  # never a view of the cotangent
    if own is None or own == 1:
        return rows
    # each sample has entries of the parameter to itself: its row is zero elsewhere
    assert layout.axis is not None
    index = torch.arange(layout.samples, device=rows.device)
    chosen = index[samples.to(rows.device) if isinstance(samples, Tensor) else samples]
    full = rows.new_zeros(rows.shape[0], len(chosen), layout.samples, *rows.shape[2:])
    full[:, torch.arange(len(chosen), device=rows.device), chosen] = rows
    return layout.from_front(full, 2)
