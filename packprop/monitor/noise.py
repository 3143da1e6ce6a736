"""The gradient noise scale, estimated from per-sample gradients, with a confidence interval.

# NOTE [Gradient noise scale]
Samples are independent draws, with gradients ``g_i`` of mean ``G`` and covariance ``S``. The simple noise scale
of McCandlish et al. (2018, arXiv:1812.06162, equation 2.9) is ``tr S / |G|^2``: the number of samples at which
the noise of a batch's gradient is as large as its signal. It estimates the critical batch size. From N samples
with mean ``g``, as in their appendix A.1 with batches of 1 and of N,

    tr S  is estimated by  (sum_i |g_i|^2 - N |g|^2) / (N - 1)
    |G|^2 is estimated by  (N |g|^2 - 1/N sum_i |g_i|^2) / (N - 1)

Both are unbiased; their ratio is not. So over several steps packprop adds up numerators and denominators
separately. The second may be negative if the signal could be zero: then there is no estimate of the ratio.

Leaving out one sample changes both in a known way, which also takes ``g_i . g``. So their covariance comes from
the jackknife (Efron and Stein 1981) over samples, or over steps. The interval of the ratio is that of Fieller
(1954): all ratios that Student's test would not reject. It has no upper end if the denominator may be zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

FEWEST = 3
"""Samples, or steps, that an interval needs at least."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval.

    Args:
        value: The estimate; ``None`` if there is none.
        low: The lower end; ``None`` if there is no interval.
        high: The upper end; ``None`` if there is none.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates from the samples of one step; see NOTE [Gradient noise scale].

    Args:
        noise: Trace of the covariance of samples' gradients, ``tr S``.
        signal: Squared norm of the expected gradient, ``|G|^2``; may be negative.
        spread: Covariance of the two ``[2, 2]``, by the jackknife over samples; ``None`` if it is not known.
        samples: The number of samples.
    """

    noise: float
    signal: float
    spread: Tensor | None
    samples: int

    @property
    def is_finite(self) -> bool:
        """Tell whether both are numbers."""
        return math.isfinite(self.noise) and math.isfinite(self.signal)

    def scale(self, confidence: float) -> Interval:
        """Return the noise scale, in samples, with its interval over the samples of the step."""
        known = self.spread if self.samples >= FEWEST else None
        return ratio(self.noise, self.signal, known, self.samples - 1, confidence)


def gradient_noise(squares: Tensor, mean_square: float, products: Tensor | None = None) -> GradientNoise | None:
    """Estimate noise and signal from the gradients of N samples; return ``None`` for fewer than two.

    Args:
        squares: Squared norms of samples' gradients ``[n]``.
        mean_square: Squared norm of their mean.
        products: Inner products of samples' gradients with their mean ``[n]``; for the spread.

    Example:
        >>> gradients = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
        >>> found = gradient_noise(gradients.square().sum(1), 4.0)
        >>> found.noise, found.signal
        (2.0, 3.0)
    """
    count = len(squares)
    if count < 2:
        return None
    squares = squares.double().cpu()
    noise, signal = _estimates(
        squares.sum(), torch.tensor(mean_square, dtype=torch.float64, device="cpu"), count
    )
    spread = None
    if products is not None and count >= FEWEST:
        products = products.double().cpu()
        without = (count**2 * mean_square - 2 * count * products + squares) / (count - 1) ** 2
        pairs = torch.stack(_estimates(squares.sum() - squares, without, count - 1))
        spread = torch.cov(pairs, correction=0) * (count - 1)
    return GradientNoise(float(noise), float(signal), spread, count)


def _estimates(total: Tensor, mean_square: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Estimate noise and signal from the summed squared norms and the squared norm of the mean."""
    noise = (total - count * mean_square) / (count - 1)
    return noise, (count * mean_square - total / count) / (count - 1)


def smoothed_scale(steps: Sequence[GradientNoise], confidence: float) -> Interval:
    """Return the noise scale over several steps: summed noise over summed signal, with an interval.

    One step alone has its own interval.
    """
    if len(steps) == 1:
        return steps[0].scale(confidence)
    pairs = torch.tensor([[step.noise, step.signal] for step in steps], dtype=torch.float64, device="cpu").T
    noise, signal = pairs.mean(1).tolist()
    spread = torch.cov(pairs) / len(steps) if len(steps) >= FEWEST else None
    return ratio(noise, signal, spread, len(steps) - 1, confidence)


def ratio(
    numerator: float, denominator: float, spread: Tensor | None, freedom: int, confidence: float
) -> Interval:
    """Return a ratio of two means that is not negative, with the interval of Fieller (1954).

    Args:
        numerator: The one mean.
        denominator: The other.
        spread: Their covariance ``[2, 2]``; ``None`` for no interval.
        freedom: Degrees of freedom of the covariance.
        confidence: The probability with which the interval holds the ratio of the expectations.

    Example:
        >>> ratio(2.0, 1.0, torch.zeros(2, 2), 10, 0.95)
        Interval(value=2.0, low=2.0, high=2.0)
        >>> ratio(2.0, -1.0, None, 10, 0.95)
        Interval(value=None, low=None, high=None)
    """
    value = max(numerator, 0.0) / denominator if denominator > 0 else None
    if spread is None or not bool(spread.isfinite().all()):
        return Interval(value)
    width = student_quantile((1 + confidence) / 2, freedom) ** 2
    (of_numerator, shared), (_, of_denominator) = spread.tolist()
    # all r with (numerator - r denominator)^2 <= width * (variance of the left side): a r^2 - 2 b r + c <= 0
    a = denominator**2 - width * of_denominator
    b = numerator * denominator - width * shared
    c = numerator**2 - width * of_numerator
    discriminant = b * b - a * c
    if a > 0:
        root = math.sqrt(max(discriminant, 0.0))
        low, high = (b - root) / a, (b + root) / a
        if high < 0:  # a negative denominator that is not due to chance: no ratio is plausible
            return Interval(value)
        return Interval(value, max(low, 0.0), high)
    if discriminant <= 0 or a == 0:
        return Interval(value, 0.0)
    low, high = sorted(((b - math.sqrt(discriminant)) / a, (b + math.sqrt(discriminant)) / a))
    return Interval(value, high if low <= 0 < high else 0.0)


@functools.lru_cache(maxsize=128)  # every layer and most steps need the same ones
def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution, above the median.

    The distribution function is a finite sum (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).

    Example:
        >>> round(student_quantile(0.975, 4), 4)
        2.7764
    """
    high = 2.0
    if freedom > 400:  # the sum is long, and the normal distribution near
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    while student_distribution(high, freedom) < probability:
        high *= 2
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_distribution(middle, freedom) < probability else (low, middle)
    return high


def student_distribution(value: float, freedom: int) -> float:
    """Return the probability that a variable with Student's distribution is below a positive value."""
    angle = math.atan(value / math.sqrt(freedom))
    term = math.cos(angle) if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    within = math.sin(angle) * total if freedom > 1 else 0.0
    if freedom % 2:
        within = 2 / math.pi * (angle + within)
    return 0.5 + within / 2
