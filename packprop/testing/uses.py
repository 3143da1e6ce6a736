"""``check_use``: a registered rule against one sample at a time, and against the fallback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import extensions as catalogue
from packprop.algebra.factors import input_gram
from packprop.algebra.statistics import batch_sq, gram, sq_norm, sum_sq
from packprop.algebra.structures import rows
from packprop.functions.entry import name_of
from packprop.functions.fallback import fallback
from packprop.functions.registry import RULES
from packprop.graph.walk import walk
from packprop.recording.switch import extend
from packprop.tensors.layout import Layout
from packprop.testing.example import Example, Make, make_example
from packprop.testing.laws import check_reference
from packprop.testing.loops import (
    Problem,
    double_precision,
    strided,
)
from packprop.testing.models import compare
from packprop.testing.report import TOLERANCE, CheckFailed, Comparison, Ledger, Report


def check_use(
    function: Callable[..., Any],
    make: Make,
    *,
    allow_fallback: bool = False,
    tolerance: float = TOLERANCE,
) -> Report:
    """Compare the rule registered for a function with one sample at a time, and with the fallback.

    The rule is asked for one column and two, for all samples and for some, for 1, 3 and 6 samples,
    with positions folded into the samples' axis, and for inputs alone; then inside a small model
    that calls the function once or twice, there also under ``create_graph=True``.

    Args:
        function: What ``register_use`` was given.
        make: From a number of samples n to the arguments of one call, as a tuple, or as a
            dictionary of keyword arguments: parameters as ``nn.Parameter``, tensors that hold
            samples with extent n along one axis.
        allow_fallback: Whether parameters that no rule describes may be left to the fallback.
        tolerance: Largest relative error allowed.

    Returns:
        What was compared, and the structure of each parameter; prints.

    Raises:
        CheckFailed: An ``AssertionError`` that names parameter, samples and largest relative error.
        BadInput: If ``make`` does not return what it should.
    """
    ledger = Ledger(f"check_use({name_of(function)})", tolerance)
    with double_precision():
        for samples in (1, 3, 6):
            example = make_example(ledger, function, make, samples)
            _require_seen(ledger, example, allow_fallback)
            for where in _ways(example):
                _check_structures(ledger, example, where)
        for samples, calls in ((1, 1), (3, 1), (3, 2)):
            first = make_example(ledger, function, make, samples)
            examples = [first, make_example(ledger, function, make, samples, like=first)]
            _check_in_a_model(ledger, examples[:calls])
    return ledger.report()


def _require_seen(ledger: Ledger, example: Example, allow_fallback: bool) -> None:
    """Recording must see the function itself, and its rule describe all parameters."""
    name = name_of(example.function)

    def unseen(why: str, instead: str) -> CheckFailed:
        asked = f"{ledger.subject}: the registered rule was looked for."
        return CheckFailed(asked, f"function {name!r}", why, instead, float("inf"))

    host = _Host([example])
    extend(host)
    outputs = host(*host.data)
    seen = [found.recorded.name for found in walk(outputs, [None] * len(outputs), None).uses]
    rule = RULES.get(example.function)
    spellings = {name_of(other) for other in RULES if rule is not None and RULES[other] is rule}
    if len(seen) != 1 or seen[0] not in spellings | {name}:
        what = ", ".join(map(repr, seen)) or "nothing"
        if not allow_fallback:
            raise unseen(
                f"recording saw {what} in its place",
                "decorate a function of your own with torch.overrides.wrap_torch_function, or "
                "register a rule for what was seen",
            )
        ledger.notes.append(f"recording sees {what} in place of {name!r}")
    if rule is None and not allow_fallback:
        raise unseen(
            "no rule is registered for it: the fallback is used",
            "decorate a rule with @packprop.register_use(function), or pass allow_fallback=True",
        )
    described = example.described
    for label in example.parameters:
        if label not in described and not allow_fallback:
            raise unseen(
                f"its rule says nothing of parameter {label!r} for these arguments",
                "return an entry for it, or pass allow_fallback=True",
            )
        known = label in described
        ledger.structures[label] = described[label].structure if known else "Dense, by the fallback"


def _ways(example: Example) -> Iterator[list[Layout]]:
    """Layouts of the outputs: as they are, and with two rows taken for one sample."""
    yield example.places
    half, left = divmod(example.samples, 2)
    if left == 0 and all(place.axis is not None and place.parts == 1 for place in example.places):
        for major in (True, False):
            yield [Layout(place.axis, half, 2, major) for place in example.places]


def _check_structures(ledger: Ledger, example: Example, where: list[Layout]) -> None:
    """Every entry for random cotangents, against loops and the fallback."""
    outputs, samples = example.outputs(), where[0].samples
    chosen: list[slice | Tensor] = [slice(None)]
    if samples > 1:
        chosen += [slice(1, 2), torch.tensor([samples - 1, 0])]
    reached = [[True] * len(outputs)]
    if len(outputs) > 1:
        reached += [[place == only for place in range(len(outputs))] for only in range(len(outputs))]
    for columns, here in itertools.product((1, 2), reached):
        cotangents = [
            torch.randn(columns, *output.shape).to(output) if fed else None
            for output, fed in zip(outputs, here, strict=True)
        ]
        expected = _loop(example, cotangents, where)
        for label, some in itertools.product(example.parameters, chosen):
            spelled = some.tolist() if isinstance(some, Tensor) else "all"
            spelled = [1] if some == slice(1, 2) else spelled
            how = f"v={columns}, {where[0]}, chosen {spelled}"
            _check_structure(ledger, example, label, cotangents, where, some, expected[label], how)


def _check_structure(
    ledger: Ledger,
    example: Example,
    label: str,
    cotangents: list[Tensor | None],
    where: list[Layout],
    chosen: slice | Tensor,
    expected: Tensor,
    how: str,
) -> None:
    """One parameter for some samples; ``expected`` are the rows of all of them ``[v, n, *p]``."""
    loop, entry = expected[:, chosen], example.described.get(label)
    slow = rows(fallback(example.call, example.parameters[label]).structure_of(cotangents, where, chosen))
    ledger.same("the fallback and the loop", {label: slow}, {label: loop}, how)
    if entry is None:
        return
    axis = where[0].axis
    if axis is not None and not entry.admits(axis):
        ledger.notes.append(f"{label}: its rule refuses samples on axis {axis} of the output")
        return
    structure = entry.structure_of(cotangents, where, chosen)
    if structure.rows is None:
        law = "one sample at a time"
        raise ledger.failed(law, f"parameter {label!r}, {how}", "the structure has no rows")
    ledger.same("one sample at a time", {label: structure.rows}, {label: loop}, how)
    ledger.same("the fallback", {label: structure.rows}, {label: slow}, how)
    flat = loop.reshape(*loop.shape[:2], -1)
    definitions: list[tuple[Callable[..., Tensor], Tensor]] = [
        (sum_sq, loop.square().sum((0, 1))),
        (batch_sq, loop.square().sum(0)),
        (sq_norm, flat.square().sum((0, 2))),
        (gram, torch.einsum("vnp,vmp->nm", flat, flat)),
    ]
    for statistic, value in definitions:
        made = {label: statistic(structure)}
        ledger.same("fast statistics", made, {label: value}, f"{statistic.__name__}, {how}")
    alone = input_gram(entry.structure_of([None] * len(cotangents), where, chosen))
    beside = input_gram(structure)
    if alone is not None or beside is not None:
        ledger.same("inputs alone", {label: alone}, {label: beside}, how)


def _loop(example: Example, cotangents: Sequence[Tensor | None], where: Sequence[Layout]) -> dict[str, Tensor]:
    """Per-sample gradients ``[v, n, *p]``: each sample evaluated alone, each column pulled back."""
    layout, parameters = where[0], example.parameters
    columns = next(cotangent.shape[0] for cotangent in cotangents if cotangent is not None)
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
            (output, place.to_front(cotangent, 1)[:, n].reshape(columns, *output.shape))
            for output, cotangent, place in zip(outputs, cotangents, where, strict=True)
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


class _Host(nn.Module):
    """A model that calls a function, for one set of data or more, with the samples in front."""

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__()
        self.examples = list(examples)
        for label, parameter in examples[0].parameters.items():
            name = label.replace(".", "_")
            free = name if not hasattr(self, name) else f"{name}_"
            self.register_parameter(free, nn.Parameter(parameter.detach().clone()))

    def forward(self, *data: Tensor) -> tuple[Tensor, ...]:
        remaining, outputs = iter(data), []
        for example in self.examples:
            own = dict(zip(map(id, example.parameters.values()), self.parameters(), strict=True))
            tensors = [own.get(id(tensor), tensor) for tensor in example.tensors]
            samples = 1
            for place, axis in enumerate(example.axes):
                if axis is not None:
                    fed = next(remaining)
                    samples = fed.shape[0]
                    tensors[place] = fed.movedim(0, axis)
            for output, layout in zip(example.outputs(tensors), example.places, strict=True):
                axis = layout.axis or 0  # a single sample: any axis, its extent is kept in front
                here = layout._replace(axis=axis, samples=samples)
                outputs.append(output.unsqueeze(0) if layout.axis is None else here.to_front(output))
        return tuple(outputs)

    @property
    def data(self) -> tuple[Tensor, ...]:
        return tuple(
            tensor.movedim(axis, 0)
            for example in self.examples
            for tensor, axis in zip(example.tensors, example.axes, strict=True)
            if axis is not None
        )


def _check_in_a_model(ledger: Ledger, examples: list[Example]) -> None:
    host = _Host(examples)
    targets = tuple(torch.randn_like(output.detach()) for output in host(*host.data))
    problem = Problem.of((host, _squared_error, host.data, targets))
    law = f"in a model that calls it {'once' if len(examples) == 1 else 'twice'}"
    inside = Ledger(f"{ledger.subject}, {law}", ledger.tolerance)
    gradients = catalogue.BatchGrad()
    compare(inside, problem, [gradients, catalogue.SqrtGGNExact()])
    check_reference(inside, problem, gradients, lambda rows: rows[0])
    found = inside.comparisons
    ledger.comparisons += [Comparison(law, f"{c.law}, {c.where}", c.error) for c in found]


def _squared_error(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    losses = [F.mse_loss(y, t) for y, t in zip(outputs, targets, strict=True)]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
