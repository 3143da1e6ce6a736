"""Products of matrices and vectors, bilinear maps, and a head with its loss in one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.structures import Dense, Outer, Structure
from packprop.engine.functions.building import affine, rowwise, samplewise, scaled, select_samples
from packprop.engine.functions.entry import Cotangents, Entry, Samples, Scratch
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.nodes import WITHOUT_SECOND_DERIVATIVE
from packprop.engine.functions.registry import rule_of
from packprop.engine.tensors.layout import Layout


@rule_of("Addmm", "Mm", form="shape or transpose")
def _product_of_matrices(call: NodeCall) -> Entry | None:
    """Return the entry of an operand of ``beta * bias + alpha * left @ right``; ``Mm`` has no bias."""
    sums = call.name == "Addmm"
    if sums and call.place == 0:
        return None if call.operand.is_transposed else scaled(call, float(call.option("beta")))
    factor = float(call.option("alpha")) if sums else 1.0
    if call.place == len(call.node.next_functions) - 1:
        return affine(call, call.saved("mat1" if sums else "self"), transposed=True, factor=factor)
    if factor != 1.0 or call.operand.is_transposed:
        return None
    return _contraction(call, "ab", call.saved("mat2"), "bc", "ac")


@rule_of("Bmm", "Baddbmm", form="shape")
def _products_of_matrices(call: NodeCall) -> Entry | None:
    """Return the entry of an operand of the same function of batches of matrices."""
    sums = call.name == "Baddbmm"
    if sums and call.place == 0:
        return scaled(call, float(call.option("beta")))
    if sums and float(call.option("alpha")) != 1.0:
        return None
    if call.place == len(call.node.next_functions) - 1:
        return _contraction(call, "abc", call.saved("batch1" if sums else "self"), "adb", "adc")
    return _contraction(call, "abc", call.saved("batch2" if sums else "mat2"), "acd", "abd")


@rule_of("Mv", form="shape")
def _product_with_a_vector(call: NodeCall) -> Entry | None:
    return _contraction(call, "b", call.saved("self"), "ab", "a") if call.place == 1 else None


def _contraction(call: NodeCall, weight: str, other: Callable[[], Tensor], x: str, y: str) -> Entry:
    """Return the entry of a parameter in ``einsum("weight,x->y")``, with samples only in the other operand.

    Its gradient is the contraction of the cotangent and the other operand.
    """
    parameter = call.operand.tensor

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        letter = "" if layout.axis is None else y[layout.axis]
        x_layout = layout._replace(axis=x.index(letter)) if letter else layout
        inputs = select_samples(x_layout.to_front(other()), samples)
        moved = select_samples(layout.to_front(cotangent, 1), samples, 1)
        x_rest, y_rest = x, y
        if letter and not layout.folded:
            x_rest, y_rest = x.replace(letter, ""), y.replace(letter, "")
        return Dense(torch.einsum(f"VN{y_rest},N{x_rest}->VN{weight}", moved, inputs))

    return Entry(
        parameter,
        "Dense",
        structure_of,
        admits=lambda axis: y[axis] in x and y[axis] not in weight,
        scratch=Scratch(parameter.numel()),
        linear=True,
    )


BILINEAR = ((1, 3), (0,), (1, 2), (2, 3))
"""The axes that ``torch.nn.functional.bilinear`` expands in two inputs and a weight, and those it sums over."""


@rule_of("Trilinear", form="shape")
def _bilinear(call: NodeCall) -> Entry | None:
    """Return the entry of the weight ``[o, i, j]`` of a bilinear map."""
    forms = tuple(tuple(call.option(name)) for name in ("expand1", "expand2", "expand3", "sumdim"))
    if call.place != 1 or forms != BILINEAR:
        return None
    fan_out, *fan_in = call.operand.shape
    fold = fold_to(call.operand.shape)

    def build(cotangent: Tensor | None, left: Tensor, right: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, fan_out)
        left = left.reshape(left.shape[0], -1, 1, fan_in[0], 1)
        products = left * right.reshape(right.shape[0], -1, 1, 1, fan_in[1])
        return Outer(products.flatten(-2), cotangent, fold)

    last = len(call.shape) - 1
    return Entry(
        call.operand.tensor,
        "Outer",
        rowwise(build, call.saved("i1"), call.saved("i3")),
        admits=lambda axis: axis != last,
        features=last,
        scratch=Scratch(2 * call.operand.shape.numel()),
        linear=True,
    )


SUMMED = (
    "linear_cross_entropy with options sums over all samples inside one kernel, which takes its gradient in "
    "the forward pass: no gradients of single samples are left, and second derivatives would count as zero",
    "call it with options=None; or, to hold the logits of some tokens only, F.linear and F.cross_entropy(..., "
    'reduction="sum") on chunks of tokens, each chunk in torch.utils.checkpoint(..., use_reentrant=False)',
)


@rule_of(*(f"{name}_defaultBackward" for name in WITHOUT_SECOND_DERIVATIVE))
def _summed_in_chunks(call: NodeCall) -> Entry:
    return samplewise(call, refusal=SUMMED)
