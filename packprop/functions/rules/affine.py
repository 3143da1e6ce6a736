"""Functions that are affine in a parameter: matrix products and contractions."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.algebra.order import fold_to
from packprop.algebra.structures import Dense, Outer, Structure
from packprop.functions.building import SavedTensor, affine, rowwise, scaled, select_samples
from packprop.functions.entry import Call, Cotangents, Entry, Samples, name_of
from packprop.functions.fallback import fallback
from packprop.functions.registry import register_use
from packprop.tensors.layout import Layout


@register_use(F.linear)
def _linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Entry] | None:
    if call.consumes(input):
        return None
    found = [affine(call, input, weight)]
    return found if bias is None else [*found, scaled(call, bias)]


@register_use(torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm)
@register_use(Tensor.mv, Tensor.__matmul__)
def _matmul(
    call: Call,
    input: Tensor,
    other: Tensor | None = None,
    *,
    mat2: Tensor | None = None,
    vec: Tensor | None = None,
) -> list[Entry] | None:
    other = next(t for t in (other, mat2, vec) if t is not None)
    if call.consumes(other) and not call.consumes(input):
        if other.dim() == 2:
            return [affine(call, input, other, transposed=True)]
        if other.dim() == input.dim() and other.shape[:-2] == input.shape[:-2] and other.dim() > 2:
            batch = string.ascii_lowercase[: other.dim() - 2]
            return contraction(call, other, batch + "yz", input, batch + "xy", batch + "xz")
    if call.consumes(input) and not call.consumes(other) and input.dim() == 2 and other.dim() >= 2:
        batch = string.ascii_lowercase[: other.dim() - 2]
        return contraction(call, input, "xy", other, batch + "yz", batch + "xz")
    return None


@register_use(torch.addmm, Tensor.addmm)
def _addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> list[Entry] | None:
    if call.consumes(mat1) or alpha != 1:
        return None
    found = [scaled(call, input, float(beta))] if call.consumes(input) else []
    return [*found, affine(call, mat1, mat2, transposed=True)]


@register_use(torch.einsum)
def _einsum(call: Call, equation: Any, *operands: Any) -> list[Entry] | None:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    position = 0 if call.consumes(operands[0]) else 1
    if call.consumes(operands[1 - position]):
        return None
    weight, x = terms[position], terms[1 - position]
    return contraction(call, operands[position], weight, operands[1 - position], x, right)


def contraction(
    call: Call, weight: Tensor, w: str, x: Tensor, x_letters: str, y_letters: str
) -> list[Entry] | None:
    """``einsum("w,x->y")`` in one parameter: its gradient is the contraction of cotangent and inputs."""
    repeated = any(len(set(term)) < len(term) for term in (w, x_letters, y_letters))
    if repeated or set(w) - set(x_letters + y_letters) or (set(x_letters) - set(w + y_letters)):
        return None
    # the equation's letters become small ones: N and V are the sample and the column
    names = dict(zip(sorted(set(w + x_letters + y_letters)), string.ascii_lowercase, strict=False))
    w, x_letters, y_letters = ("".join(names[letter] for letter in term) for term in (w, x_letters, y_letters))
    saved = SavedTensor(x, name_of(call.function))

    def structure_of(cotangents: Cotangents, where: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = where[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        shared = "" if layout.axis is None else y_letters[layout.axis]
        if shared in w and shared:  # each sample has entries of the parameter to itself
            return fallback(call, weight).structure_of(cotangents, where, samples)
        inside = layout if not shared else layout._replace(axis=x_letters.index(shared))
        inputs = select_samples(inside.to_front(saved()), samples)
        moved = select_samples(layout.to_front(cotangent, 1), samples, 1)
        x_term, y_term = x_letters, y_letters
        if shared and layout.parts == 1:
            x_term, y_term = x_term.replace(shared, ""), y_term.replace(shared, "")
        return Dense(torch.einsum(f"VN{y_term},N{x_term}->VN{w}", moved, inputs))

    def admits(axis: int) -> bool:
        return y_letters[axis] in x_letters

    return [Entry(weight, "Dense", structure_of, weight.numel(), admits=admits, linear=True)]


@register_use(F.bilinear)
def _bilinear(
    call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Entry] | None:
    if call.consumes(input1) or call.consumes(input2):
        return None
    fan_out, *fan_in = weight.shape
    fold = fold_to(weight.shape)

    def build(cotangent: Tensor | None, left: Tensor, right: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, fan_out)
        products = left.reshape(left.shape[0], -1, 1, fan_in[0], 1) * right.reshape(
            right.shape[0], -1, 1, 1, fan_in[1]
        )
        return Outer(products.flatten(-2), cotangent, fold)

    structure_of = rowwise(build, "bilinear", input1, input2)
    last = len(call.shape) - 1
    found = [
        Entry(weight, "Outer", structure_of, 2 * weight.numel(), admits=lambda axis: axis != last, linear=True)
    ]
    return found if bias is None else [*found, scaled(call, bias)]
