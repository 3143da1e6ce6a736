"""Uncertainty of a profile's values: bounds from the spread between samples.

The norm of the mean gradient is no mean over samples. By the triangle inequality its error is at most the norm
of the mean gradient's own error, which is ``sqrt(tr S / N)`` in root mean square, with ``S`` the covariance of
the samples' gradients. Signal to noise is its square over ``tr S``; to first order its relative error is at
most ``2 / sqrt(N signal_to_noise)`` plus that of ``tr S``, which is that of the mean squared norm.
"""

from __future__ import annotations

import math

from torch import Tensor

from packprop.reports.profile.layers import Layer

WIDE = 2.0
"""An interval reaches so many standard errors to either side."""


def standard_error(values: Tensor) -> float | None:
    """Return the standard error of the mean of ``[n]``; ``None`` for one sample."""
    return float(values.double().std()) / math.sqrt(len(values)) if len(values) > 1 else None


def error_bounds(layer: Layer, norms: Tensor | None) -> tuple[float | None, float | None]:
    """Return bounds on the standard errors of gradient norm and signal to noise, as said above."""
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
    """Return twice the bound to either side of signal to noise, from 0 on; ``None`` if it is not known."""
    ratio, error = layer.signal_to_noise, error_bounds(layer, norms)[1]
    if ratio is None or error is None or not math.isfinite(ratio + error):
        return None
    return max(0.0, ratio - WIDE * error), ratio + WIDE * error
