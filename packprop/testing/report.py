"""Comparison of values by parameter name, the report of those that agree, and the error for others."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from packprop.engine.tensors import plain_text, tensors_in
from packprop.errors import PackpropError

TOLERANCE = 1e-10
"""The largest relative error that a check allows by default."""

FLOOR = 1e-4
"""The least scale of a relative error, as a part of the largest value of all parameters."""

Named = dict[str, Any]
"""Values by parameter name."""


class CheckFailed(PackpropError, AssertionError):
    """Raised if a check fails; ``error`` is the largest relative error, infinite if there is no number."""

    def __init__(self, asked: str, where: str, why: str, instead: str, error: float = math.inf) -> None:
        super().__init__(asked, where, why, instead)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.asked, self.where, self.why, self.instead, self.error)


@dataclass(frozen=True)
class Comparison:
    """One comparison that agreed.

    Args:
        law: The name of the comparison.
        where: The parameter, and the way of computing its value.
        error: Largest relative error.
    """

    law: str
    where: str
    error: float


@dataclass(frozen=True)
class Report:
    """The comparisons of a check; prints as a table with one row for each law.

    Args:
        subject: The name of the check and of the checked object, as in ``check_use(gelu)``.
        comparisons: The comparisons, all of which agreed.
        structures: The structure of each parameter, for ``check_use``.
        notes: Everything that was left out, and why.
    """

    subject: str
    comparisons: tuple[Comparison, ...]
    structures: dict[str, str]
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """The largest relative error of all comparisons."""
        return max((comparison.error for comparison in self.comparisons), default=0.0)

    @property
    def laws(self) -> dict[str, int]:
        """The number of comparisons for each law."""
        return dict(Counter(comparison.law for comparison in self.comparisons))

    def __rich__(self) -> Group:
        table = Table("compared", "times", "largest relative error", title=self.subject)
        for law, count in self.laws.items():
            largest = max(c.error for c in self.comparisons if c.law == law)
            table.add_row(law, str(count), f"{largest:.1e}")
        lines = [f"{name}: {structure}" for name, structure in self.structures.items()]
        return Group(table, *map(Text, [*lines, *self.notes]))

    def __str__(self) -> str:
        return plain_text(self, width=100)


HINTS = {
    "one sample at a time": "take the samples of the cotangent from the layout and the choice that "
    "structure_of() gets, keep its leading axis of columns, and sum over nothing but positions",
    "the fallback": "look at the rule first: the fallback agrees with the loop over samples",
    "the fallback and the loop": "let the function give the same value whenever it is called",
    "fast statistics": "let the structure describe the whole use: fold may only rearrange entries",
    "inputs alone": "let a structure without a cotangent hold the same inputs as one with a cotangent",
    "saved on every parameter": "let finish() return a value wherever there are results",
    "chunks of samples": "give the row the over_n that joins parts of a batch, or whole=True",
    "columns at once": "give the row the over_v that joins columns, and let the statistic do the "
    "same over its axis v",
    "overwritten": "let the statistic and finish() keep nothing, and change nothing in place",
    "scales with the loss": "give the row the degree with which its statistic grows with the loss: "
    "2 for squares of gradients, 1 for squares of columns",
    "batches of a data set": "let over_n and degree make one value of several batches; finish() "
    "gets the number of all samples; let the rule of a loss return the divisor of this call",
    "subsampling": "let the value depend on the chosen samples alone, in their order",
    "reference": "find out which of the two values is right",
    "double backward": "say linear=True only if the factor does not depend on the parameter",
    "differentiable": "use torch functions alone: no detach(), .data, item() or in-place changes",
}
"""Advice for each broken law."""


@dataclass
class Ledger:
    """Compares values, and keeps a list of the comparisons that agreed."""

    subject: str
    tolerance: float
    comparisons: list[Comparison] = field(default_factory=list)
    structures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def report(self) -> Report:
        """Return the report so far."""
        notes = tuple(dict.fromkeys(self.notes))
        return Report(self.subject, tuple(self.comparisons), self.structures, notes)

    def same(self, law: str, actual: Named, expected: Named, how: str = "", least: float = 0.0) -> None:
        """Compare values by parameter name with the expected ones; ``least``: the least scale of their errors.

        Raises:
            CheckFailed: If a value is missing, has another shape, or is off by more than the tolerance.
        """
        flat = {name: numbers(value) for name, value in expected.items()}
        sizes = [t.abs().amax().item() for ts in flat.values() for t in ts if t.numel()]
        floor = max(least, FLOOR * max(filter(math.isfinite, sizes), default=0.0))
        for name, tensors in flat.items():
            where = f"parameter {name!r}{', ' if how else ''}{how}"
            if name not in actual:
                raise self.failed(law, where, "there is no value")
            given = numbers(actual[name])
            if not tensors or len(given) != len(tensors):
                kinds = f"{type(actual[name]).__name__} and {type(expected[name]).__name__}"
                why = f"values of type {kinds} hold {len(given)} and {len(tensors)} tensors"
                raise self.failed(law, where, why)
            for one, other in zip(given, tensors, strict=True):
                if one.shape != other.shape:
                    why = f"the shapes are {list(one.shape)} and {list(other.shape)}"
                    raise self.failed(law, where, why)
                error = relative_error(one, other, floor)
                if not error <= self.tolerance:
                    why = f"the largest relative error is {error:.3g}"
                    raise self.failed(law, where, f"{why}; {self.tolerance:.0e} is allowed", error)
                self.comparisons.append(Comparison(law, where, error))

    def failed(self, law: str, where: str, why: str, error: float = math.inf) -> CheckFailed:
        """Make the error that says which law is broken where, and what to do."""
        hint = HINTS.get(law, "compare on a smaller model; if an error remains, report it as a bug")
        return CheckFailed(f"{self.subject}: {law} was compared.", where, why, hint, error)


def numbers(value: Any) -> list[Tensor]:
    """Return every number in a value, as tensors."""
    if isinstance(value, (int, float)):
        return [torch.tensor(float(value))]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in numbers(item)]
    return [tensor.detach() for tensor in tensors_in(value)]


def relative_error(one: Tensor, other: Tensor, floor: float) -> float:
    """Return the largest error, divided by the largest entry of ``other`` or by ``floor``."""
    if one.numel() == 0:
        return 0.0
    one, other = (each.to(torch.promote_types(each.dtype, torch.float64)) for each in (one, other))
    agree = (one == other) | (one.isnan() & other.isnan())
    error = torch.where(agree, 0.0, (one - other).abs()).amax().item()
    if math.isnan(error):
        return math.inf
    scale = max(other.nan_to_num(0.0, 0.0, 0.0).abs().amax().item(), floor)
    return error / scale if scale else (math.inf if error else 0.0)
