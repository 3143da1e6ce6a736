"""Rules that users register: checks of what they return, and that their rows sum to the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.statistics import sq_norm, total_grad
from packprop.engine.algebra.structures import Structure
from packprop.engine.functions.building import as_parameter
from packprop.engine.functions.entry import Cotangents, Entry, Samples
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.registry import Rule, current
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.traced import is_traced
from packprop.errors import BadInput, OfParameter

ASKED = "A quantity beyond the gradient was asked for."


def checked(call: NodeCall, rule: Rule) -> Entry | None:
    """Return the entry that a rule makes; ``None`` if it makes none.

    Raises:
        BadInput: If a user's rule returns something else. Building the structure of its entry raises
            ``OfParameter`` if the rows of the chosen samples do not sum to the node's own gradient for them.
    """
    entry = rule.entry_of(call)
    if rule.proven is None or entry is None:
        return entry
    if not isinstance(entry, Entry) or entry.parameter is not call.operand.tensor:
        made = "an entry of another tensor" if isinstance(entry, Entry) else f"{type(entry).__name__}"
        raise BadInput(
            ASKED,
            _place(call, rule),
            f"it returned {made}; packprop expects the entry of this parameter, or None",
            "return affine(call, ...), scaled(call, ...) or Entry(call.operand.tensor, ...); None leaves the "
            "parameter to PyTorch's own derivative of each sample",
        )
    made_by_rule, proven = entry, rule.proven

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        structure = made_by_rule.structure_of(cotangents, layouts, samples)
        if current.trusted or is_dry_run() or is_traced() or all(each is None for each in cotangents):
            return structure
        case = call.form, *layouts
        if case not in proven:
            with torch.no_grad():
                is_proven = _sums_up(call, rule, made_by_rule, (cotangents, layouts, samples))
            if is_proven:
                proven.note(case)
        return structure

    return entry.but(structure_of=structure_of)


def _place(call: NodeCall, rule: Rule) -> str:
    name = getattr(rule.entry_of, "__name__", repr(rule.entry_of))
    return f"the rule {name} that is registered for {call.node.name()}"


def _sums_up(call: NodeCall, rule: Rule, entry: Entry, given: tuple[Any, ...]) -> bool:
    """Tell whether the rows of the first column sum to the gradient that the node itself returns for it.

    Return ``False`` if packprop cannot tell: the graph is gone, or numbers are not finite, or all zero.

    Raises:
        OfParameter: If the rows do not sum to this gradient.
    """
    cotangents, layouts, samples = given
    chosen = torch.zeros(layouts[0].samples, device="cpu")
    chosen[samples if isinstance(samples, slice) else samples.to("cpu")] = 1
    column = [
        None if each is None else _of_samples(each[:1], layout, chosen)
        for each, layout in zip(cotangents, layouts, strict=False)
    ]
    try:
        expected = as_parameter(call, call.products(column))[0]
    except RuntimeError:  # the graph is gone, or the function does not take these numbers
        return False
    structure = entry.structure_of(column, layouts, samples)
    total = total_grad(structure)
    is_alike = total.shape == expected.shape
    if is_alike:
        wide = torch.promote_types(total.dtype, expected.dtype)
        difference = torch.linalg.vector_norm(total.to(wide) - expected.to(wide))
        scale = sq_norm(structure).sqrt().sum()
        tolerance = max(0.01, torch.finfo(expected.dtype).eps ** 0.5)  # a wrong rule is far off
        if not bool(difference > tolerance * scale):  # NaN is not larger
            return bool(difference.isfinite() & (scale > 0))
    raise OfParameter(
        ASKED,
        _place(call, rule) + ", at {parameter}",
        "the rows of the samples do not sum to the gradient that the function's own backward gives",
        "packprop.testing.check_use(MyFunction.apply, make) shows for which samples the rule is wrong; if a "
        "rule returns None, packprop calls that backward for each sample",
    )


def _of_samples(column: Tensor, layout: Layout, chosen: Tensor) -> Tensor:
    """Return a column with zeros in the rows of all samples that were not chosen."""
    return column * layout.broadcast(chosen.to(column.device, column.dtype), column.dim() - 1)
