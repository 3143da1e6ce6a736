"""``check_use``: a registered rule against one sample at a time, and against the fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop import extensions as catalogue
from packprop.functions.entry import name_of
from packprop.functions.registry import RULES
from packprop.graph.walk import walk
from packprop.recording.switch import extend
from packprop.testing.example import Example, Make, make_example
from packprop.testing.host import Host
from packprop.testing.models import compare
from packprop.testing.problem import Problem, double_precision
from packprop.testing.reference import check_reference
from packprop.testing.report import TOLERANCE, CheckFailed, Comparison, Ledger, Report
from packprop.testing.structures import check_structures


def check_use(
    function: Callable[..., Any],
    make: Make,
    *,
    allow_fallback: bool = False,
    tolerance: float = TOLERANCE,
) -> Report:
    """Compare the rule registered for a function with one sample at a time, and with the fallback.

    The check runs the rule for one column and two, for all samples and for some, for 1, 3 and 6 samples, with
    positions folded into the samples' axis, and for inputs alone. It then runs a small model that calls the
    function once or twice, there also under ``create_graph=True``.

    Args:
        function: The function that you gave to ``register_use``.
        make: Maps a number of samples n to the arguments of one call: a tuple, or a dictionary of
            keyword arguments. Parameters are ``nn.Parameter``; tensors that hold samples have extent
            n along one axis.
        allow_fallback: Let the fallback take parameters that no rule describes.
        tolerance: Largest relative error allowed.

    Returns:
        The report of all comparisons, with the structure of each parameter; prints.

    Raises:
        CheckFailed: An ``AssertionError`` that names parameter, samples and largest relative error.
        BadInput: If ``make`` returns anything else.
    """
    ledger = Ledger(f"check_use({name_of(function)})", tolerance)
    with double_precision():
        for samples in (1, 3, 6):
            example = make_example(ledger, function, make, samples)
            _require_seen(ledger, example, allow_fallback)
            check_structures(ledger, example)
        for samples, calls in ((1, 1), (3, 1), (3, 2)):
            first = make_example(ledger, function, make, samples)
            examples = [first, make_example(ledger, function, make, samples, like=first)]
            _check_in_a_model(ledger, examples[:calls])
    return ledger.report()


def _require_seen(ledger: Ledger, example: Example, allow_fallback: bool) -> None:
    """Require that recording sees the function itself, and that its rule describes all parameters."""
    name = name_of(example.function)

    def unseen(why: str, instead: str) -> CheckFailed:
        asked = f"{ledger.subject}: the registered rule was looked for."
        return CheckFailed(asked, f"function {name!r}", why, instead, float("inf"))

    host = Host([example])
    extend(host)
    outputs = host(*host.data)
    seen = [use.recorded.name for use in walk(outputs, [None] * len(outputs), None).uses]
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


def _check_in_a_model(ledger: Ledger, examples: list[Example]) -> None:
    host = Host(examples)
    targets = tuple(torch.randn_like(output.detach()) for output in host(*host.data))
    problem = Problem.of((host, _squared_error, host.data, targets))
    law = f"in a model that calls it {'once' if len(examples) == 1 else 'twice'}"
    inside = Ledger(f"{ledger.subject}, {law}", ledger.tolerance)
    gradients = catalogue.BatchGrad()
    compare(inside, problem, [gradients, catalogue.SqrtGGNExact()])
    check_reference(inside, problem, gradients, lambda rows: rows[0])
    ledger.comparisons += [Comparison(law, f"{c.law}, {c.where}", c.error) for c in inside.comparisons]


def _squared_error(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    losses = [F.mse_loss(y, t) for y, t in zip(outputs, targets, strict=True)]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
