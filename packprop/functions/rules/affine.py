"""Functions that are affine in a parameter: matrix products and contractions."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.algebra.order import fold_to
from packprop.algebra.structures import Dense, Outer, Structure
from packprop.functions.building import SavedTensor, affine, rowwise, scaled, select_samples
from packprop.functions.entry import Call, Cotangents, Entry, Samples, Scratch, name_of
from packprop.functions.fallback import fallback
from packprop.functions.registry import made_later, register_use
from packprop.tensors.layout import Layout


@register_use(F.linear)
@made_later((1, "weight"))
def _linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Entry] | None:
    if call.consumes(input) or weight.dim() == 1:
        return None
    entry = affine(call, input, weight)
    return [entry] if bias is None else [entry, scaled(call, bias)]


@register_use(torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm)
@register_use(Tensor.mv, Tensor.__matmul__)
@made_later()
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
@made_later((0, "input"), (2, "mat2"))
def _addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> list[Entry] | None:
    if call.consumes(mat1) or alpha != 1:
        return None
    summand = [scaled(call, input, float(beta))] if call.consumes(input) else []
    return [*summand, affine(call, mat1, mat2, transposed=True)]


@register_use(torch.einsum)
@made_later()
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
    weight_letters, x_letters = terms[position], terms[1 - position]
    return contraction(call, operands[position], weight_letters, operands[1 - position], x_letters, right)


def contraction(
    call: Call,
    weight: Any,
    weight_letters: str,
    x: Tensor | Callable[[], Tensor],
    x_letters: str,
    y_letters: str,
) -> list[Entry] | None:
    """``einsum("w,x->y")`` of a parameter w: its gradient is the contraction of cotangent and x.

    ``None`` where letters do not tell it: one has several extents (an axis of one entry that is broadcast), is
    repeated, or is in one term alone.
    """
    terms = weight_letters, x_letters, y_letters
    repeated = any(len(set(term)) < len(term) for term in terms)
    of_x = zip(x_letters, x.shape, strict=True) if isinstance(x, Tensor) else zip(y_letters, call.shape, strict=True)
    extents = {*zip(weight_letters, weight.shape, strict=True), *of_x}
    broadcast = len(extents) > len({letter for letter, _ in extents})
    in_one_term = set(weight_letters) - set(x_letters + y_letters) or set(x_letters) - set(
        weight_letters + y_letters
    )
    if repeated or broadcast or in_one_term:
        return None
    # the equation's letters become small ones: N and V are the sample and the column
    letters = dict(zip(sorted(set("".join(terms))), string.ascii_lowercase, strict=False))
    w_term, x_term, y_term = ("".join(letters[letter] for letter in term) for term in terms)
    saved = SavedTensor(x, name_of(call.function)) if isinstance(x, Tensor) else x

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        sample_letter = "" if layout.axis is None else y_term[layout.axis]
        own_entries = bool(sample_letter) and sample_letter in w_term  # of the parameter, for each sample
        if own_entries or layout.joined:
            return fallback(call, weight).structure_of(cotangents, layouts, samples)
        x_layout = layout._replace(axis=x_term.index(sample_letter)) if sample_letter else layout
        inputs = select_samples(x_layout.to_front(saved()), samples)
        moved = select_samples(layout.to_front(cotangent, 1), samples, 1)
        x_rest, y_rest = x_term, y_term
        if sample_letter and not layout.folded:
            x_rest, y_rest = x_term.replace(sample_letter, ""), y_term.replace(sample_letter, "")
        return Dense(torch.einsum(f"VN{y_rest},N{x_rest}->VN{w_term}", moved, inputs))

    return [
        Entry(
            weight,
            "Dense",
            structure_of,
            admits=lambda axis: y_term[axis] in x_term,
            scratch=Scratch(weight.numel()),
            linear=True,
        )
    ]


@register_use(F.bilinear)
@made_later((2, "weight"))
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

    last = len(call.shape) - 1
    entry = Entry(
        weight,
        "Outer",
        rowwise(build, "bilinear", input1, input2),
        admits=lambda axis: axis != last,
        scratch=Scratch(2 * weight.numel()),
        linear=True,
    )
    return [entry] if bias is None else [entry, scaled(call, bias)]
