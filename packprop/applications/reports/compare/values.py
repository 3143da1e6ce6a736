"""The contents of a comparison, apart from printing and drawing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from packprop.applications.reports.compare.differences import Difference
from packprop.applications.reports.profile.shown import Shown

FORMAT = "comparison of profiles, format 1"
"""The description in a file."""


@dataclass(frozen=True)
class ComparisonValues(Shown):
    """Two profiles of one model side by side.

    NOTE [Uncertainty of differences] explains the errors.

    Args:
        names: The names of the profiles.
        paired: Says that both have the same samples, which are compared one by one.
        samples: Samples of each.
        losses: Mean loss of each.
        settings: Their settings, as far as they differ: name -> (first, second).
        layers: Layer name -> quantity -> difference, in the model's order.
        total: Quantity -> difference, in all parameters together.
    """

    names: tuple[str, str]
    paired: bool
    samples: tuple[int, int]
    losses: tuple[float, float]
    settings: dict[str, tuple[Any, Any]]
    layers: dict[str, dict[str, Difference]]
    total: dict[str, Difference]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dictionaries."""
        return {"format": FORMAT, **dataclasses.asdict(self)}
