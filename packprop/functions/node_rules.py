"""The table of rules by node: how a parameter enters what one node of the autograd graph did.

A rule is given a ``NodeCall`` and returns the entry of the parameter at its place; ``None`` means that the node is
called on the part of each sample (``samplewise``), which is right for all nodes, and slower. Names of nodes stand as
in ``functions/nodes.py``; saved tensors have the names of PyTorch's list of derivatives (``derivatives.yaml``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from packprop.algebra.order import fold_swapped, fold_to
from packprop.algebra.structures import Dense, Lookup, Outer, Structure, rows
from packprop.functions.building import rowwise, scaled
from packprop.functions.entry import Cotangents, Entry, Fans, Samples, Scratch, StructureOf
from packprop.functions.node_calls import (
    Computed,
    NodeCall,
    broadcast,
    has_complex_numbers,
    operand_at,
    rearranged,
    samplewise,
)
from packprop.functions.nodes import CONVOLUTIONS, NORMALISATIONS, name_of_node, names_of_nodes
from packprop.functions.operands import ENTRY_BY_ENTRY
from packprop.functions.rules.affine import contraction
from packprop.functions.rules.convolution import PlainGeometry, TransposedGeometry, weight_of_convolution
from packprop.functions.rules.recurrent import parameter_of_layer
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype

NodeRule = Callable[[NodeCall], Entry | None]
"""From a node and the place of a parameter to its entry; ``None``: the node is called for each sample."""


NODE_RULES: dict[str, NodeRule] = {}
"""Name of a node -> rule."""


OF_SHAPE = CONVOLUTIONS | names_of_nodes("Addmm Mm Bmm Baddbmm Embedding Trilinear MkldnnRnnLayer")
"""Nodes whose rules need a parameter in its own shape."""


def rule_of(*names: str) -> Callable[[NodeRule], NodeRule]:
    """Register a rule for nodes with these names."""

    def register(rule: NodeRule) -> NodeRule:
        NODE_RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


rule_of("MkldnnRnnLayer")(parameter_of_layer)


def entries_of_node(node: Node, places: Iterable[int], shapes: Sequence[torch.Size], holds: bool) -> list[Entry]:
    """One entry for each place of a node where a parameter enters it."""
    name = name_of_node(node)
    rule = None if isinstance(node, BackwardCFunction) else NODE_RULES.get(name)
    if rule is not None and has_complex_numbers(node):  # rules are written for real ones
        rule = None
    entries = []
    for place in places:
        call = NodeCall(node, place, operand_at(node, place, name in OF_SHAPE), shapes, holds)
        entry = rule(call) if rule is not None and call.operand.tensor.numel() else None
        entry = _without_rule(call) if entry is None else _anywhere(call, entry)
        entries.append(_of_leaf(call, entry) if isinstance(entry.parameter, Computed) else entry)
    return entries


def _of_leaf(call: NodeCall, entry: Entry) -> Entry:
    """The entry of the leaf, if the parameter of an entry has the entries of one at other places."""
    found = rearranged(call.node, call.place)
    if found is None or found[0].dtype.is_complex != entry.parameter.dtype.is_complex:
        return entry
    leaf, back = found

    def of_leaf(build: StructureOf) -> StructureOf:
        def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
            structure = build(cotangents, layouts, samples)
            if structure.rows is None:
                return Dense(None)
            return Dense(back(rows(structure)).reshape(*structure.rows.shape[:2], *leaf.shape))

        return structure_of

    return replace(
        entry,
        parameter=leaf,
        structure="Dense",
        structure_of=of_leaf(entry.structure_of),
        squares=None,
        fans=None,
        constant=False,
    )


def _without_rule(call: NodeCall) -> Entry:
    """The entry of a node that is called for each sample."""
    node = call.node
    is_table = name_of_node(node) in ("Embedding", "EmbeddingBag") and call.place == 0
    if not is_table:
        return samplewise(call)
    refusal = SCALED_BY_COUNTS if node._saved_scale_grad_by_freq else None
    return samplewise(call, linear=True, refusal=refusal, sparse=bool(getattr(node, "_saved_sparse", False)))


SCALED_BY_COUNTS = (
    "scale_grad_by_freq divides by counts over the whole batch: rows of single samples depend on the others",
    "drop scale_grad_by_freq",
)
"""Why a table has no gradient of single samples, and what to do instead."""


def _anywhere(call: NodeCall, entry: Entry) -> Entry:
    """The entry of a rule where it admits the samples; elsewhere the node is called for each sample."""

    def is_admitted(layouts: Sequence[Layout]) -> bool:
        return all(map(entry.admits, layouts[0].axes)) and len(layouts[0].axes) < 2

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        if is_admitted(layouts):
            return entry.structure_of(cotangents, layouts, samples)
        return samplewise(call).structure_of(cotangents, layouts, samples)

    edge = GradientEdge(*call.node.next_functions[call.place])

    def calls_node(layouts: Sequence[Layout]) -> GradientEdge | None:
        return entry.calls_node(layouts) if is_admitted(layouts) else edge

    return entry.but(structure_of=structure_of, admits=lambda axis: True, calls_node=calls_node)


def _matrix(
    call: NodeCall, x: Callable[[], Tensor], weight: Any, *, transposed: bool, factor: float = 1.0
) -> Entry:
    """A weight ``[o, i]`` (``[i, o]`` if ``transposed``) that rows ``[k, i]`` are multiplied with."""
    fold = (fold_swapped if transposed else fold_to)(weight.shape)
    fan_in, fan_out = weight.shape if transposed else weight.shape[::-1]

    def build(cotangent: Tensor | None, x: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, fan_out)
            cotangent = cotangent if factor == 1.0 else cotangent * factor
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), cotangent, fold)

    last = len(call.shape) - 1
    return Entry(
        weight,
        "Outer",
        rowwise(build, name_of_node(call.node), x),
        admits=lambda axis: axis != last,
        scratch=Scratch(inputs_only=fan_in),
        fans=Fans(1, fan_in, fan_out),
        linear=True,
    )


@rule_of("Addmm", "Mm")
def _product_of_matrices(call: NodeCall) -> Entry | None:
    """``beta * bias + alpha * left @ right``, of which ``Mm`` has no sum."""
    sums = name_of_node(call.node) == "Addmm"
    factor = float(call.option("alpha")) if sums else 1.0
    if sums and call.place == 0:
        return _summand(call, float(call.option("beta")))
    operand = call.operand
    if call.place == len(call.node.next_functions) - 1:
        left = call.saved("mat1" if sums else "self")
        return _matrix(call, left, operand.tensor, transposed=not operand.is_transposed, factor=factor)
    if factor != 1.0 or operand.is_transposed:
        return None
    return _contracted(call, "ab", call.saved("mat2"), "bc", "ac")


@rule_of("Bmm", "Baddbmm")
def _batch_of_products(call: NodeCall) -> Entry | None:
    sums = name_of_node(call.node) == "Baddbmm"
    if sums and call.place == 0:
        return _summand(call, float(call.option("beta")))
    if call.operand.is_transposed or (sums and float(call.option("alpha")) != 1.0):
        return None
    is_right = call.place == len(call.node.next_functions) - 1
    other = call.saved(("batch1" if is_right else "batch2") if sums else ("self" if is_right else "mat2"))
    terms = ("abc", "adb", "adc") if is_right else ("abc", "acd", "abd")
    return _contracted(call, terms[0], other, terms[1], terms[2])


def _contracted(call: NodeCall, weight: str, other: Callable[[], Tensor], x: str, y: str) -> Entry | None:
    """``einsum("weight,x->y")`` of a parameter, where its samples are on an axis of the other operand alone."""
    made = contraction(call.stand_in(), call.operand.tensor, weight, other, x, y)
    if not made:
        return None
    return replace(made[0], admits=lambda axis: y[axis] in x and y[axis] not in weight)


def _summand(call: NodeCall, factor: float) -> Entry:
    """A bias, broadcast against the output, times a number."""
    operand = call.operand
    aligned = (1,) * (len(call.shape) - len(operand.shape)) + tuple(operand.shape)
    return scaled(call.stand_in(), operand.tensor, factor, aligned=aligned)


@rule_of("Expand", "Alias")
def _expand(call: NodeCall) -> Entry | None:
    return None if call.operand.is_transposed else _summand(call, 1.0)


@rule_of("Add", "Sub")
def _sum(call: NodeCall) -> Entry | None:
    if call.operand.is_transposed:
        return None
    sign = -1.0 if name_of_node(call.node) == "Sub" else 1.0
    return _summand(call, 1.0 if call.place == 0 else sign * float(call.option("alpha")))


@rule_of("Mul")
def _mul(call: NodeCall) -> Entry | None:
    if call.operand.is_transposed:
        return None
    operand, other = call.operand, call.saved("self" if call.place else "other")
    aligned = (1,) * (len(call.shape) - len(operand.shape)) + tuple(operand.shape)
    return scaled(call.stand_in(), operand.tensor, other, aligned=aligned, linear=True)


@rule_of("Div")
def _div(call: NodeCall) -> Entry | None:
    if call.operand.is_transposed:
        return None
    if call.place:
        return broadcast(call)
    operand, other = call.operand, call.saved("other")
    aligned = (1,) * (len(call.shape) - len(operand.shape)) + tuple(operand.shape)
    return scaled(call.stand_in(), operand.tensor, lambda: other().reciprocal(), aligned=aligned, linear=True)


@rule_of("PreluKernel")
def _prelu(call: NodeCall) -> Entry | None:
    if call.place != 1:
        return None
    operand, x = call.operand, call.saved("self")
    aligned = (1,) * (len(call.shape) - len(operand.shape)) + tuple(operand.shape)
    factor = lambda: x().clamp(max=0)  # noqa: E731  # a name for what follows
    return scaled(call.stand_in(), operand.tensor, factor, aligned=aligned, linear=True)


@rule_of(*(ENTRY_BY_ENTRY - names_of_nodes("Add Sub Mul Div Stack") - {"NativeDropout"}))
def _entry_by_entry(call: NodeCall) -> Entry | None:
    return None if call.operand.is_transposed else broadcast(call)


@rule_of("NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm", *NORMALISATIONS)
def _normalisation(call: NodeCall) -> Entry | None:
    """Weight and bias of a normalisation scale and shift what it returns without them."""
    if call.place == 0:
        return None
    name, shape = name_of_node(call.node), call.operand.shape
    by_channel = name not in ("NativeLayerNorm", "FusedRmsNorm")
    aligned = [1, shape.numel(), *[1] * (len(call.shape) - 2)] if by_channel else None
    if call.place == 2:
        return scaled(call.stand_in(), call.operand.tensor, aligned=aligned)
    normalised = NORMALISED.get(name)
    factor = None if normalised is None else normalised(call)
    if factor is None:
        return None
    return scaled(call.stand_in(), call.operand.tensor, factor, aligned=aligned, linear=True)


def _of_layer(call: NodeCall) -> Callable[[], Tensor]:
    x, mean, deviation = call.saved("input"), call.saved("result1"), call.saved("result2")
    axes = tuple(range(-len(call.operand.shape), 0))

    def normalised() -> Tensor:
        if not torch.is_grad_enabled():
            return (x() - mean()) * deviation()
        # PyTorch has no derivatives of the statistics that it saved: these are computed again
        given = x()
        centred = given - given.mean(axes, keepdim=True)
        variance = centred.square().mean(axes, keepdim=True)
        rest = (deviation().to(variance.dtype).square().reciprocal() - variance).detach()
        return centred * (variance + rest).rsqrt()

    return normalised


def _of_groups(call: NodeCall) -> Callable[[], Tensor]:
    x, groups, eps = call.saved("input"), call.option("group"), call.option("eps")
    return lambda: torch.nn.functional.group_norm(x(), groups, eps=eps)


def _of_root_mean_square(call: NodeCall) -> Callable[[], Tensor]:
    x, axes = call.saved("input"), tuple(range(-len(call.operand.shape), 0))
    deviation = call.saved("result1")

    def normalised() -> Tensor:
        if not torch.is_grad_enabled():
            return x() * deviation()
        square = x().square().mean(axes, keepdim=True)
        rest = (deviation().to(square.dtype).square().reciprocal() - square).detach()
        return x() * (square + rest).rsqrt()

    return normalised


def _of_batch(call: NodeCall) -> Callable[[], Tensor] | None:
    if not hasattr(call.node, "_saved_training"):
        return None
    if call.option("training"):  # of one image whose channels are those of all samples: instance normalisation
        x, eps = call.saved("input"), call.option("eps")
        return lambda: torch.nn.functional.batch_norm(x(), None, None, training=True, eps=eps)
    x, mean, var = call.saved("input"), call.saved("running_mean"), call.saved("running_var")
    eps = call.option("eps") if hasattr(call.node, "_saved_eps") else call.option("epsilon")
    return lambda: torch.nn.functional.batch_norm(x(), mean(), var(), eps=eps)


NORMALISED: dict[str, Callable[[NodeCall], Callable[[], Tensor] | None]] = {
    "NativeLayerNorm": _of_layer,
    "NativeGroupNorm": _of_groups,
    "FusedRmsNorm": _of_root_mean_square,
    **dict.fromkeys(NORMALISATIONS, _of_batch),
}
"""What makes the normalised input, without weight and bias."""


@rule_of(*CONVOLUTIONS)
def _convolution(call: NodeCall) -> Entry | None:
    option, shape, operand = call.option, call.shape, call.operand
    space = len(shape) - 2
    if call.place == 2:
        return scaled(call.stand_in(), operand.tensor, aligned=(1, shape[1], *(1,) * space))
    if call.place != 1 or operand.is_transposed:
        return None
    kernel = operand.shape[2:]
    stride, padding, dilation, groups = (
        option(each) for each in ("stride", "padding", "dilation", "groups")
    )
    stride, padding, dilation = (_one_each(each, space) for each in (stride, padding, dilation))
    geometry: PlainGeometry | TransposedGeometry
    if hasattr(call.node, "_saved_transposed") and option("transposed"):
        extra = _one_each(option("output_padding"), space)
        geometry = TransposedGeometry(operand.shape, stride, dilation, groups, padding, extra)
        channels = operand.shape[0]
        image = [
            (extent - 1 - k * d + d + 2 * p - e) // s + 1
            for extent, k, d, p, e, s in zip(shape[2:], kernel, dilation, padding, extra, stride, strict=True)
        ]
    else:
        geometry = PlainGeometry(operand.shape, stride, dilation, groups, tuple((p, p) for p in padding))
        channels = operand.shape[1] * groups
        image = [
            (extent - 1) * s + (k - 1) * d + 1 - 2 * p
            for extent, k, d, p, s in zip(shape[2:], kernel, dilation, padding, stride, strict=True)
        ]
    known = call.shape_at(0)
    of_image = torch.Size([channels, *image]) if known is None else known[1:]
    return weight_of_convolution(call.stand_in(), call.saved("input"), of_image, operand.tensor, geometry)


def _one_each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    return tuple(value) if len(value) == count else tuple(value) * count


@rule_of("Trilinear")
def _bilinear(call: NodeCall) -> Entry | None:
    """The weight ``[o, i, j]`` of a bilinear map."""
    option, operand = call.option, call.operand
    forms = tuple(tuple(option(name)) for name in ("expand1", "expand2", "expand3", "sumdim"))
    if call.place != 1 or operand.is_transposed or forms != ((1, 3), (0,), (1, 2), (2, 3)):
        return None
    fan_out, *fan_in = operand.shape
    fold = fold_to(operand.tensor.shape)

    def build(cotangent: Tensor | None, left: Tensor, right: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, fan_out)
        left = left.reshape(left.shape[0], -1, 1, fan_in[0], 1)
        products = left * right.reshape(right.shape[0], -1, 1, 1, fan_in[1])
        return Outer(products.flatten(-2), cotangent, fold)

    last = len(call.shape) - 1
    return Entry(
        operand.tensor,
        "Outer",
        rowwise(build, "bilinear", call.saved("i1"), call.saved("i3")),
        admits=lambda axis: axis != last,
        scratch=Scratch(2 * operand.shape.numel()),
        linear=True,
    )


@rule_of("Embedding")
def _embedding(call: NodeCall) -> Entry | None:
    table, width = call.operand.shape
    if call.operand.is_transposed or call.option("scale_grad_by_freq"):
        return None
    padding, dtype = call.option("padding_idx"), call.operand.tensor.dtype

    def build(cotangent: Tensor | None, index: Tensor) -> Structure:
        index = index.reshape(index.shape[0], -1)
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, width)
            if padding >= 0:
                cotangent = cotangent * (index != padding)[None, :, :, None]
        return Lookup(index, cotangent, table, accumulation_dtype(dtype))

    last = len(call.shape) - 1
    return Entry(
        call.operand.tensor,
        "Lookup",
        rowwise(build, "embedding", call.saved("indices")),
        admits=lambda axis: axis != last,
        scratch=Scratch(math.prod(call.operand.shape)),
        linear=True,
        sparse=bool(call.option("sparse")) if hasattr(call.node, "_saved_sparse") else False,
    )
