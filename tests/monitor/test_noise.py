"""The noise scale is unbiased, and its intervals hold the true value about as often as they say."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from packprop.monitor.noise import gradient_noise, ratio, smoothed_scale, student_quantile
from tests.selection import thorough

POPULATION = torch.Generator().manual_seed(0)
MEAN = torch.tensor([3.0, 2.0] + [0.0] * 4, dtype=torch.float64)
ROOT = torch.randn(6, 6, generator=POPULATION, dtype=torch.float64)
NOISE, SIGNAL = float((ROOT @ ROOT.T).trace()), float(MEAN.square().sum())


def estimated(count: int, generator: torch.Generator):  # type: ignore[no-untyped-def]  # a generator of long tuples
    rows = MEAN + torch.randn(count, 6, generator=generator, dtype=torch.float64) @ ROOT.T
    mean = rows.mean(0)
    found = gradient_noise(rows.square().sum(1), float(mean @ mean), rows @ mean)
    assert found is not None
    return found, rows


@thorough
@pytest.mark.parametrize("count", [2, 8])
def test_noise_and_signal_are_unbiased(count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    found = [estimated(count, generator)[0] for _ in range(4000)]
    for which, right in (("noise", NOISE), ("signal", SIGNAL)):
        values = torch.tensor([getattr(each, which) for each in found])
        error = values.std() / len(values) ** 0.5
        assert abs(values.mean() - right) < 4 * error
    biased = torch.tensor([each.signal + each.noise / count for each in found]).mean()  # |g|^2 itself
    assert biased > SIGNAL + 0.5 * NOISE / count


def test_the_jackknife_leaves_each_sample_out() -> None:
    found, rows = estimated(7, torch.Generator().manual_seed(2))
    pairs = []
    for index in range(7):
        rest = torch.cat([rows[:index], rows[index + 1 :]])
        without = gradient_noise(rest.square().sum(1), float(rest.mean(0).square().sum()))
        assert without is not None
        pairs.append([without.noise, without.signal])
    spread = torch.cov(torch.tensor(pairs, dtype=torch.float64).T, correction=0) * 6
    torch.testing.assert_close(found.spread, spread)


@thorough
def test_intervals_hold_the_true_value() -> None:
    generator = torch.Generator().manual_seed(3)
    right, over_samples, over_steps = NOISE / SIGNAL, 0, 0
    for _ in range(300):
        one = estimated(64, generator)[0].scale(0.95)
        several = smoothed_scale([estimated(16, generator)[0] for _ in range(8)], 0.95)
        for interval in (one, several):
            assert interval.low is not None
        over_samples += one.low <= right <= (one.high or float("inf"))
        over_steps += several.low <= right <= (several.high or float("inf"))
    assert 0.9 < over_samples / 300 <= 0.99
    assert 0.9 < over_steps / 300 <= 0.99


def test_a_ratio_over_zero_is_open_above() -> None:
    open_above = ratio(4.0, 0.1, torch.eye(2) * 0.25, 20, 0.95)
    assert open_above.high is None
    assert open_above.low is not None
    assert 0 < open_above.low < 40
    assert ratio(4.0, -0.1, None, 20, 0.95).value is None


def test_quantiles_of_students_distribution() -> None:
    for freedom in (1, 2, 3, 10, 31, 400, 401):
        for probability in (0.9, 0.975, 0.995):
            right = stats.t.ppf(probability, freedom)
            assert student_quantile(probability, freedom) == pytest.approx(right, rel=1e-6)


def test_one_sample_has_no_noise() -> None:
    assert gradient_noise(torch.ones(1), 1.0) is None
