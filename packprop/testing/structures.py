"""Comparison of a rule's structures with loops over samples, and with the fallback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.factors import input_gram
from packprop.algebra.statistics import batch_sq, gram, sq_norm, sum_sq
from packprop.algebra.structures import Structure, rows
from packprop.functions.entry import Entry
from packprop.functions.fallback import fallback
from packprop.tensors.layout import Layout
from packprop.testing.example import Example
from packprop.testing.loops import strided
from packprop.testing.report import Ledger


@dataclass(frozen=True)
class Swept:
    """An example, and cotangents at its outputs.

    Args:
        example: A call of the function.
        cotangents: ``[v, *y]`` for each output; ``None`` for outputs that the sweep does not reach.
        layouts: The layouts of the outputs.
    """

    example: Example
    cotangents: list[Tensor | None]
    layouts: list[Layout]

    @property
    def columns(self) -> int:
        """The number of columns, v."""
        return next(cotangent.shape[0] for cotangent in self.cotangents if cotangent is not None)

    def structure(self, entry: Entry, chosen: slice | Tensor) -> Structure:
        """Return the structure of an entry for some samples."""
        return entry.structure_of(self.cotangents, self.layouts, chosen)


def check_structures(ledger: Ledger, example: Example) -> None:
    """Compare every entry, for random cotangents, with loops over samples and with the fallback."""
    for layouts in _possible_layouts(example):
        outputs, samples = example.outputs(), layouts[0].samples
        choices: list[slice | Tensor] = [slice(None)]
        if samples > 1:
            choices += [slice(1, 2), torch.tensor([samples - 1, 0])]
        reached = [[True] * len(outputs)]
        if len(outputs) > 1:
            reached += [[place == only for place in range(len(outputs))] for only in range(len(outputs))]
        for columns, is_reached in itertools.product((1, 2), reached):
            cotangents = [
                torch.randn(columns, *output.shape).to(output) if fed else None
                for output, fed in zip(outputs, is_reached, strict=True)
            ]
            swept = Swept(example, cotangents, layouts)
            expected = _rows_by_loops(swept)
            for name, chosen in itertools.product(example.parameters, choices):
                _check_structure(ledger, swept, name, chosen, expected[name][:, chosen])


def _check_structure(ledger: Ledger, swept: Swept, name: str, chosen: slice | Tensor, expected: Tensor) -> None:
    """Compare one parameter for some samples; ``expected`` are their gradients ``[v, n, *p]``."""
    example, layout = swept.example, swept.layouts[0]
    spelled: Any = chosen.tolist() if isinstance(chosen, Tensor) else "all"
    spelled = [1] if chosen == slice(1, 2) else spelled
    how = f"v={swept.columns}, {layout}, chosen {spelled}"
    by_fallback = rows(swept.structure(fallback(example.call, example.parameters[name]), chosen))
    ledger.same("the fallback and the loop", {name: by_fallback}, {name: expected}, how)
    entry = example.described.get(name)
    if entry is None:
        return
    if layout.axis is not None and not entry.admits(layout.axis):
        ledger.notes.append(f"{name}: its rule refuses samples on axis {layout.axis} of the output")
        return
    structure = swept.structure(entry, chosen)
    if structure.rows is None:
        law = "one sample at a time"
        raise ledger.failed(law, f"parameter {name!r}, {how}", "the structure has no rows")
    ledger.same("one sample at a time", {name: structure.rows}, {name: expected}, how)
    ledger.same("the fallback", {name: structure.rows}, {name: by_fallback}, how)
    flat = expected.reshape(*expected.shape[:2], -1)
    definitions: list[tuple[Callable[..., Tensor], Tensor]] = [
        (sum_sq, expected.square().sum((0, 1))),
        (batch_sq, expected.square().sum(0)),
        (sq_norm, flat.square().sum((0, 2))),
        (gram, torch.einsum("vnp,vmp->nm", flat, flat)),
    ]
    for statistic, value in definitions:
        ledger.same(
            "fast statistics", {name: statistic(structure)}, {name: value}, f"{statistic.__name__}, {how}"
        )
    nothing_reached = Swept(example, [None] * len(swept.cotangents), swept.layouts)
    alone = input_gram(nothing_reached.structure(entry, chosen))
    beside = input_gram(structure)
    if alone is not None or beside is not None:
        ledger.same("inputs alone", {name: alone}, {name: beside}, how)


def _possible_layouts(example: Example) -> Iterator[list[Layout]]:
    """Return layouts of the outputs: the real ones, and, if possible, with two rows as one sample."""
    yield example.layouts
    half, left = divmod(example.samples, 2)
    if left == 0 and all(layout.axis is not None and layout.parts == 1 for layout in example.layouts):
        for major in (True, False):
            yield [Layout(layout.axis, half, 2, major) for layout in example.layouts]


def _rows_by_loops(swept: Swept) -> dict[str, Tensor]:
    """Return per-sample gradients ``[v, n, *p]``: each sample evaluated alone, each column pulled back."""
    example, layout, parameters = swept.example, swept.layouts[0], swept.example.parameters
    columns = swept.columns
    gathered: list[list[Tensor]] = []
    for n in range(layout.samples):
        if layout.samples == example.samples:
            tensors = example.some(n)
        elif layout.major:
            tensors = example.some(n * layout.parts, layout.parts)
        else:
            tensors = example.some(n, layout.parts, layout.samples)
        outputs = example.outputs(tensors)
        fed = [
            (output, own.to_front(cotangent, 1)[:, n].reshape(columns, *output.shape))
            for output, cotangent, own in zip(outputs, swept.cotangents, swept.layouts, strict=True)
            if cotangent is not None
        ]
        for v in range(columns):
            gradients = torch.autograd.grad(
                [output for output, _ in fed],
                list(parameters.values()),
                [cotangent[v] for _, cotangent in fed],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            gathered.append(strided(gradients))
    return {
        name: torch.stack(pieces).unflatten(0, (layout.samples, columns)).transpose(0, 1)
        for name, pieces in zip(parameters, zip(*gathered, strict=True), strict=True)
    }
