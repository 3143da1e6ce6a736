"""Parts of rules: the selection of samples, the common kinds of entries, and calls of nodes for each sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.algebra.changes import filled_up
from packprop.engine.algebra.order import fold_swapped, fold_to
from packprop.engine.algebra.structures import Dense, Outer, Structure
from packprop.engine.functions.entry import Cotangents, Entry, Fans, Samples, Scratch, StructureOf
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.tensors.device import multiplies_wide
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import NARROW, accumulation_dtype, widened

ALL = slice(None)

AT_ONCE = 2**22
"""Largest number of entries of cotangents in one chunk, with a masked copy for each sample."""


def select_samples(tensor: Tensor, samples: Samples, skip: int = 0, as_they_are: bool = False) -> Tensor:
    """Return samples of a tensor along axis ``skip``, in at least single precision unless ``as_they_are``."""
    if isinstance(samples, Tensor):
        tensor = tensor.index_select(skip, samples.to(tensor.device))
    elif samples != ALL:
        tensor = tensor[(ALL,) * skip + (samples,)]
    return tensor if as_they_are or tensor.dtype not in NARROW else widened(tensor)


def rowwise(
    build: Callable[..., Structure], *inputs: Callable[[], Tensor], only_multiplied: bool = False
) -> StructureOf:
    """Return ``structure_of`` for inputs with the samples on the same axis as the output.

    ``build`` takes the cotangent ``[v, n, ...]`` and the inputs ``[n, ...]`` of the chosen samples. They are in
    at least single precision, unless they are ``only_multiplied`` and the device multiplies narrow numbers.
    """

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        saved = [layout.to_front(each()) for each in inputs]
        as_they_are = only_multiplied and saved[0].dtype in NARROW and _stays_narrow(saved[0])
        if cotangent is not None:
            cotangent = select_samples(layout.to_front(cotangent, 1), samples, 1, as_they_are)
        structure = build(cotangent, *[select_samples(each, samples, 0, as_they_are) for each in saved])
        if layout.rows is None:
            return structure
        return filled_up(structure, select_samples(layout.rows.counts, samples).sum())

    return structure_of


def _stays_narrow(values: Tensor) -> bool:
    """Tell whether to multiply values in sixteen bits as they are; not if the products are differentiated."""
    return multiplies_wide(values) and not torch.is_grad_enabled()


def affine(call: NodeCall, x: Callable[[], Tensor], *, transposed: bool = False, factor: float = 1.0) -> Entry:
    """Return the entry of a weight ``[o, i]`` that is applied to the last axis of an input ``[..., i]``.

    Args:
        call: The node, and the place of the weight.
        x: Returns the input.
        transposed: Whether the node takes the weight as ``[i, o]``.
        factor: A number that multiplies the input.
    """
    operand = call.operand
    shape = operand.tensor.shape
    fold = (fold_swapped if transposed != operand.is_transposed else fold_to)(shape)
    fan_in = operand.shape[0 if transposed else -1]
    fan_out = math.prod(shape) // fan_in

    def build(cotangent: Tensor | None, x: Tensor) -> Structure:
        if cotangent is not None:
            cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, fan_out)
        x = x if factor == 1.0 else x * factor  # and not the cotangent, which may be None
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), cotangent, fold)

    last = len(call.shape) - 1
    return Entry(
        operand.tensor,
        "Outer",
        rowwise(build, x, only_multiplied=factor == 1.0),
        admits=lambda axis: axis != last,
        features=last,
        scratch=Scratch(inputs_only=fan_in),
        fans=Fans(1, fan_in, fan_out, in_order=fold is fold_to(shape)),
        linear=True,
    )


def scaled(
    call: NodeCall,
    factor: Callable[[], Tensor] | float = 1.0,
    *,
    aligned: Sequence[int] | None = None,
    linear: bool = False,
) -> Entry:
    """Return the entry of a parameter that scales entries of the output: ``y = parameter * factor + ...``.

    Args:
        call: The node, and the place of the parameter.
        factor: Returns the factor, broadcast against the output; or a number.
        aligned: The parameter's shape among the output's axes, if it is not aligned on the right.
        linear: Whether ``factor`` is known not to depend on the parameter, which is sure for a number.
    """
    parameter = call.operand.tensor
    broadcast_shape = tuple(aligned or call.aligned)

    def structure_of(
        cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples, power: int = 1
    ) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        product = select_samples(layout.to_front(cotangent, 1), samples, 1, as_they_are=True)
        if callable(factor):  # in at least single precision, as the product is: factors may be whole numbers
            shape = torch.Size(cotangent.shape[1:])
            scale = select_samples(layout.to_front(factor().expand(shape)), samples)
            scale = scale.to(torch.promote_types(scale.dtype, accumulation_dtype(product.dtype)))
            product = product * (scale if power == 1 else scale**power)
        elif factor != 1.0:
            product = widened(product) * factor**power
        rows = sum_over_broadcast(product, layout, broadcast_shape, samples)
        return Dense(rows.reshape(*rows.shape[:2], *parameter.shape))

    linear = linear or not callable(factor)
    return Entry(
        parameter,
        "Scale",
        structure_of,
        linear=linear,
        constant=not callable(factor),
        squares=functools.partial(structure_of, power=2) if linear else None,
    )


def sum_over_broadcast(
    product: Tensor, layout: Layout, broadcast_shape: tuple[int, ...], samples: Samples
) -> Tensor:
    """Sum ``[v, n, (k), *rest]`` over the axes that a parameter is broadcast over, except the samples.

    ``k`` are the positions that share the samples' axis; ``broadcast_shape`` is the parameter's shape among the
    output's axes. The result is in at least single precision.
    """
    rest, along_samples = broadcast_shape, 1  # the parameter's extent along the samples' axes
    if layout.axis is not None:
        end = layout.behind
        along_samples = math.prod(broadcast_shape[layout.axis : end])
        before, behind = broadcast_shape[: layout.axis], broadcast_shape[end:]
        rest = before + behind
        if layout.folded:  # parts keep the place of the sample axis
            rest = (*before, 1 if along_samples == 1 else layout.parts, *behind)
    summed = [2 + axis for axis, size in enumerate(rest) if size == 1 and product.shape[2 + axis] != 1]
    if product.dtype not in NARROW:
        rows = product.sum(summed, keepdim=True) if summed else product.clone()  # never a view of the cotangent
    else:
        wide = accumulation_dtype(product.dtype)
        rows = product.sum(summed, keepdim=True, dtype=wide) if summed else product.to(wide)
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


def broadcast(call: NodeCall) -> Entry:
    """Return the entry of an operand that any entrywise node broadcasts against its output."""
    of_product = scaled(call).structure_of

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        if cotangents[0] is None:
            return Dense(None)
        product = call.products([cotangents[0]])
        if product.shape != cotangents[0].shape:
            return samplewise(call).structure_of(cotangents, layouts, samples)
        return of_product([product], layouts, samples)

    return Entry(call.operand.tensor, "Scale", structure_of, calls_node=lambda layouts: call.edge)


def samplewise(call: NodeCall, **known: Any) -> Entry:
    """Return the entry of a parameter without a rule; packprop calls its node on each sample's cotangent."""
    parameter = call.operand.tensor

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        arrived = [each for each in cotangents if each is not None]
        if not arrived:
            return Dense(None)
        numbers = _numbers(samples, layouts[0].samples)
        columns = len(arrived[0])
        entries = sum(each[:1].numel() for each in arrived) * columns
        step = max(1, AT_ONCE // max(1, entries))
        rows = []
        for start in range(0, len(numbers), step):
            own = numbers[start : start + step]
            masked = [
                None if each is None else _of_samples(own, each, layout).flatten(0, 1)
                for each, layout in zip(cotangents, layouts, strict=False)
            ]
            rows.append(as_parameter(call, call.products(masked)).unflatten(0, (columns, len(own))))
        whole = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        return Dense(whole.to(accumulation_dtype(whole.dtype)))

    return Entry(
        parameter,
        "Dense",
        structure_of,
        scratch=Scratch(parameter.numel()),
        calls_node=lambda layouts: call.edge,
        by_rule=False,
        **known,
    )


def as_parameter(call: NodeCall, products: Tensor) -> Tensor:
    """Map the products that a node returns for columns to gradients of the parameter ``[v, *p]``."""
    shape = call.operand.shape
    if shape != products.shape[1:]:
        ones = [1] * (products.dim() - 1 - len(shape))
        products = products.sum_to_size(len(products), *ones, *shape)
    products = products.reshape(len(products), *shape)
    products = products.mT if call.operand.is_transposed else products
    return products.reshape(len(products), *call.operand.tensor.shape)


def anywhere(call: NodeCall, entry: Entry) -> Entry:
    """Return an entry that uses the rule if that admits the samples' axis, and calls of the node otherwise."""

    def is_admitted(layouts: Sequence[Layout]) -> bool:
        first = layouts[0]
        return first.axis is None or (not first.joined[1:] and entry.admits(first.axis))

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        if is_admitted(layouts):
            return entry.structure_of(cotangents, layouts, samples)
        return samplewise(call).structure_of(cotangents, layouts, samples)

    def calls_node(layouts: Sequence[Layout]) -> GradientEdge | None:
        return entry.calls_node(layouts) if is_admitted(layouts) else call.edge

    return entry.but(structure_of=structure_of, admits=lambda axis: True, calls_node=calls_node)


def _numbers(samples: Samples, count: int) -> list[int]:
    if isinstance(samples, slice):
        return list(range(count)[samples])
    return list(range(len(samples))) if is_dry_run() else samples.tolist()


def _of_samples(numbers: Sequence[int], cotangent: Tensor, layout: Layout) -> Tensor:
    """Return a cotangent ``[v, *y]`` for each of some samples, zero in all other rows: ``[v, m, *y]``."""
    if layout.axis is None:
        return cotangent.unsqueeze(1)
    owner = layout.sample_of(cotangent.device)
    own = owner == torch.tensor(list(numbers), device=cotangent.device).unsqueeze(1)  # [m, k]
    behind = cotangent.dim() - 1 - layout.behind
    form = [len(numbers), *[1] * layout.axis, *(layout.joined or (-1,)), *[1] * behind]
    return torch.where(own.reshape(form), cotangent.unsqueeze(1), cotangent.new_zeros(()))
