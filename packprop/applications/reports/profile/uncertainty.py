"""Uncertainty of a profile's values: bounds from the spread between samples.

The norm of the mean gradient is no mean over samples. By the triangle inequality its error is at most the norm
of the mean gradient's own error, which is ``sqrt(tr S / N)`` in root mean square, with ``S`` the covariance of
the samples' gradients. Signal to noise is the square of the norm over ``tr S``. To first order its relative
error is at most ``2 / sqrt(N signal_to_noise)`` plus the error of the mean squared norm over ``tr S``.
"""

from __future__ import annotations

import math

from torch import Tensor

from packprop.applications.reports.profile.layers import Layer
from packprop.applications.reports.profile.table import number_text

WIDE = 2.0
"""An interval reaches this many standard errors to either side."""


def standard_error(values: Tensor) -> float | None:
    """Return the standard error of the mean of ``[n]``; ``None`` for one sample."""
    return float(values.double().std()) / math.sqrt(len(values)) if len(values) > 1 else None


def error_bounds(layer: Layer, norms: Tensor | None) -> tuple[float | None, float | None]:
    """Return bounds on the standard errors of gradient norm and signal to noise; see the text above."""
    if norms is None or len(norms) < 2 or layer.gradient_norm is None:
        return None, None
    squares = norms.double().square()
    noise = max(0.0, float(squares.mean()) - layer.gradient_norm**2)
    of_norm = math.sqrt(noise / len(norms))
    if not layer.signal_to_noise or not noise:
        return of_norm, None
    of_squares = standard_error(squares) or 0.0
    relative = 2 / math.sqrt(len(norms) * layer.signal_to_noise) + of_squares / noise
    return of_norm, layer.signal_to_noise * relative


def signal_to_noise_interval(layer: Layer, norms: Tensor | None) -> tuple[float, float] | None:
    """Return signal to noise plus and minus twice its bound, at least 0; ``None`` if the bound is not known."""
    ratio, error = layer.signal_to_noise, error_bounds(layer, norms)[1]
    if ratio is None or error is None or not math.isfinite(ratio + error):
        return None
    return max(0.0, ratio - WIDE * error), ratio + WIDE * error


def rounded_text(value: float, error: float | None) -> str:
    """Return a number with the digits that its error supports: none after the error's first, at most three.

    >>> [rounded_text(0.00612, 0.0055), rounded_text(1593.0, 1259.0), rounded_text(41.27, 0.3)]
    ['6e-3', '2,000', '41.3']
    >>> [rounded_text(0.02, 0.5), rounded_text(2.0, None)]
    ['0.02', '2.00']
    """
    if not value or not math.isfinite(value) or error is None or not error > 0 or not math.isfinite(error):
        return number_text(value)
    place, top = math.floor(math.log10(error)), math.floor(math.log10(abs(value)))
    return _digits_text(value, min(max(top - place + 1, 1), 3))


def interval_text(low: float, high: float) -> str:
    """Return an interval to two digits, in words.

    >>> interval_text(334.2, 1712.0), interval_text(0.0, 0.0117), interval_text(39.7, math.inf)
    ('between 330 and 1,700', 'below 0.012', 'above 40')
    >>> interval_text(0.0, math.inf)
    'anywhere'
    """
    if low <= 0 and math.isinf(high):
        return "anywhere"
    if low <= 0:
        return f"below {_digits_text(high, 2)}"
    if math.isinf(high):
        return f"above {_digits_text(low, 2)}"
    return f"between {_digits_text(low, 2)} and {_digits_text(high, 2)}"


def range_text(low: float, high: float) -> str:
    """Return an interval as ``interval_text`` does, in signs.

    >>> range_text(334.2, 1712.0), range_text(0.0, 0.0117), range_text(39.7, math.inf)
    ('330 to 1,700', '< 0.012', '> 40')
    """
    words = interval_text(low, high).removeprefix("between ").replace(" and ", " to ")
    return words.replace("below", "<").replace("above", ">")


def _digits_text(value: float, digits: int) -> str:
    """Return a number with this many significant digits, and with an exponent if it is small."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    rounded, power = float(f"{mantissa}e{exponent}"), int(exponent)
    if power < -2:
        return f"{mantissa}e{power}"
    return f"{rounded:,.{max(0, digits - 1 - power)}f}"
