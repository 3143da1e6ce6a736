"""What a comparison holds, apart from how it is printed and drawn."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from packprop.reports.compare.differences import Difference
from packprop.reports.profile.files import json_ready

FORMAT = "comparison of profiles, format 1"
"""What a file says that it is."""


@dataclass(frozen=True)
class ComparisonValues:
    """Two profiles of one model side by side.

    NOTE [Uncertainty of differences] says what the errors are.

    Args:
        names: What the profiles are called.
        paired: Whether both were made from the same samples, so that these are compared one by one.
        samples: Samples of each.
        losses: Mean loss of each.
        settings: What they were made with, where that differs: name -> (first, second).
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
        """Everything as plain numbers, strings, lists and dictionaries."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """``to_dict`` as text; ``null`` stands for what was not computed, is infinite or NaN."""
        return json.dumps(json_ready(self.to_dict()), indent=2, allow_nan=False) + "\n"
