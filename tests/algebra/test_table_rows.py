"""Statistics of a table go through the rows that were looked up: no sample needs a table of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from packprop import backpack, extend
from packprop.engine.algebra import cells
from packprop.engine.algebra.statistics import moments, sq_norm, sum_sq
from packprop.engine.algebra.structures import Lookup, rows
from packprop.extensions import BatchGrad, SumGradSquared, Variance
from tests.selection import thorough

SAMPLES, POSITIONS, ENTRIES, WIDTH = 4, 6, 9, 3


def looked_up(columns: int, highest: int = ENTRIES, entries: int = ENTRIES) -> Lookup:
    """Return a look-up in which samples meet the same rows, some of them several times."""
    cotangent = torch.randn(columns, SAMPLES, POSITIONS, WIDTH, dtype=torch.float64)
    return Lookup(torch.randint(highest, (SAMPLES, POSITIONS)), cotangent, entries, torch.float64)


def test_a_table_that_is_smaller_than_a_sequence_is_formed() -> None:
    structure = looked_up(1, 3, entries=3)
    expected = rows(structure)[0]
    torch.testing.assert_close(moments(structure).mean, expected.mean(0))
    torch.testing.assert_close(sum_sq(structure), expected.square().sum(0))
    assert "by_row" not in vars(structure)


def test_indices_of_32_bits() -> None:
    model = extend(nn.Sequential(nn.Embedding(ENTRIES, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 2)).double())
    x, y = torch.randint(ENTRIES, (SAMPLES, 2)), torch.randint(2, (SAMPLES,))
    values = []
    for index in (x, x.int()):
        with backpack(SumGradSquared(), Variance()):
            nn.functional.cross_entropy(model(index), y).backward()
        values.append((model[0].weight.sum_grad_squared, model[0].weight.variance))
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("highest", [1, 3, ENTRIES])
def test_squares_are_those_of_tables(columns: int, highest: int) -> None:
    """Positions of one row add up before they are squared, in each column and sample by itself."""
    structure = looked_up(columns, highest)
    expected = rows(structure).square()
    torch.testing.assert_close(sum_sq(structure), expected.sum((0, 1)))
    torch.testing.assert_close(sq_norm(structure), expected.sum((0, 2, 3)))


@pytest.mark.parametrize("highest", [1, 3, ENTRIES])
def test_moments_are_those_of_tables(highest: int) -> None:
    """Samples that do not look a row up have a gradient of zero there, which deviates from the mean as well."""
    structure = looked_up(1, highest)
    gradients = rows(structure)[0]
    found = moments(structure)
    assert found.samples == SAMPLES
    torch.testing.assert_close(found.mean, gradients.mean(0))
    torch.testing.assert_close(found.deviation, (gradients - gradients.mean(0)).square().sum(0))


def test_moments_of_nearly_equal_gradients_are_not_rounding_noise() -> None:
    """Deviations are summed, not differences of large squares: they keep digits and are never negative."""
    small = 1e-3 * torch.randn(1, SAMPLES, 1, WIDTH)
    structure = Lookup(torch.zeros(SAMPLES, 1, dtype=torch.long), 1000 + small, ENTRIES, torch.float32)
    gradients = rows(structure)[0].double()
    expected = (gradients - gradients.mean(0)).square().sum(0)
    found = moments(structure).deviation
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=1e-9)


def test_an_empty_sequence() -> None:
    structure = Lookup(torch.zeros(2, 0, dtype=torch.long), torch.zeros(1, 2, 0, WIDTH), ENTRIES, torch.float32)
    assert not sum_sq(structure).any()
    assert not moments(structure).deviation.any()


@thorough
def test_a_large_table_takes_all_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each sample would fill a chunk; rows do not, also beside quantities that need the tables."""
    counted: list[int] = []

    def noted(structure: Lookup) -> Tensor:
        counted.append(len(structure.index))
        return cells._lookup_sum_sq(structure)

    monkeypatch.setitem(cells.FAST_CELLS["sum_sq"], Lookup, noted)
    model = extend(nn.Sequential(nn.Embedding(2**14, 256), nn.Flatten(), nn.Linear(512, 2)))
    x, y = torch.randint(2**14, (3, 2)), torch.randint(2, (3,))
    with backpack(SumGradSquared(), BatchGrad(), Variance()):
        nn.functional.cross_entropy(model(x), y).backward()
    assert counted == [3]
    weight = model[0].weight
    gradients = weight.grad_batch
    torch.testing.assert_close(weight.sum_grad_squared, gradients.square().sum(0))
    torch.testing.assert_close(weight.variance, gradients.var(0, unbiased=False), rtol=1e-4, atol=1e-8)
