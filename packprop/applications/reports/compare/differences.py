"""Differences between two profiles, with their uncertainty.

# NOTE [Uncertainty of differences]
The samples of a profile stand for a larger population. A mean over samples (the mean norm of a sample's
gradient, the trace of the GGN) has the standard error ``s / sqrt(N)``, with ``s`` the standard deviation over
the N samples; draws of a Monte Carlo trace are part of that spread. If both profiles saw the same samples in
the same order, ``s`` is the standard deviation of the N differences. Otherwise the squares of errors add up.

The norm of the mean gradient and signal to noise have bounds: see ``reports/profile/uncertainty.py``.
The bounds of the two profiles add up, because their correlation is unknown: marked values differ clearly,
others may differ.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from packprop.applications.reports.profile.layers import Layer
from packprop.applications.reports.profile.shown import Shown
from packprop.applications.reports.profile.uncertainty import error_bounds, standard_error
from packprop.applications.reports.profile.values import ProfileValues

QUANTITIES = ("gradient norm", "mean sample norm", "signal to noise", "GGN trace")
"""The compared quantities, in the order of the columns."""

FORMAT = "comparison of profiles, format 1"
"""The name of the format, as JSON states it."""

CLEAR = 2.0
"""The number of standard errors from zero at which a difference is marked."""


@dataclass(frozen=True)
class Difference:
    """A quantity in two profiles.

    Args:
        first: Its value in the first profile; ``None`` if it was not computed.
        second: Its value in the second profile.
        first_error: Standard error of ``first``, or a bound on it.
        second_error: Standard error of ``second``, or a bound on it.
        error: Standard error of the difference, or a bound on it; ``None`` if it is not known.
    """

    first: float | None
    second: float | None
    first_error: float | None = None
    second_error: float | None = None
    error: float | None = None

    @property
    def change(self) -> float | None:
        """The second value less the first; ``None`` if one is missing."""
        return None if self.first is None or self.second is None else self.second - self.first

    @property
    def is_clear(self) -> bool:
        """Tell whether the change is more than two standard errors from zero."""
        return self.change is not None and self.error is not None and abs(self.change) > CLEAR * self.error


@dataclass(frozen=True)
class ComparisonValues(Shown):
    """Two profiles of one model side by side.

    NOTE [Uncertainty of differences] explains the errors.

    Args:
        names: The names of the profiles.
        paired: True if both have the same samples, which packprop then compares one by one.
        samples: Number of samples of each.
        losses: Mean loss of each.
        settings: The settings that differ: name -> (first, second).
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


def differences_of(
    first: ProfileValues, second: ProfileValues, layers: tuple[Layer, Layer], paired: bool
) -> dict[str, Difference]:
    """Compare every quantity of one layer in two profiles."""
    name = layers[0].name
    norms, traces = (
        (first.tensors.get(f"{kind}/{name}"), second.tensors.get(f"{kind}/{name}"))
        for kind in ("sample_gradient_norm", "sample_ggn_trace")
    )
    bounds = [error_bounds(layer, own) for layer, own in zip(layers, norms, strict=True)]
    return {
        "gradient norm": _bounded(*(layer.gradient_norm for layer in layers), *(bound[0] for bound in bounds)),
        "mean sample norm": _of_means(*norms, paired),
        "signal to noise": _bounded(
            *(layer.signal_to_noise for layer in layers), *(bound[1] for bound in bounds)
        ),
        "GGN trace": _of_means(*traces, paired),
    }


def _of_means(first: Tensor | None, second: Tensor | None, paired: bool) -> Difference:
    """Return the difference between two means over samples ``[n]``."""
    means = [None if each is None or not len(each) else float(each.double().mean()) for each in (first, second)]
    errors = [None if each is None else standard_error(each) for each in (first, second)]
    error = None
    if paired and first is not None and second is not None:
        error = standard_error(second.double() - first.double())
    elif errors[0] is not None and errors[1] is not None:
        error = math.hypot(errors[0], errors[1])
    return Difference(means[0], means[1], errors[0], errors[1], error)


def _bounded(
    first: float | None, second: float | None, first_error: float | None, second_error: float | None
) -> Difference:
    """Return the difference between two numbers whose errors are bounded, and may be correlated."""
    known = first_error is not None and second_error is not None
    error = first_error + second_error if known else None  # type: ignore[operator]  # both are numbers
    return Difference(first, second, first_error, second_error, error)
