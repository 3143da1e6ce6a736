"""What a check reports, and the error of one that failed."""

from __future__ import annotations

import pickle

import pytest
import torch

import packprop
from packprop.testing import CheckFailed, Report, check_extension, check_model
from packprop.testing.report import relative_error
from tests.testing.registered import absolute, classifier, made


def test_a_report_prints_and_counts() -> None:
    report = check_model(*classifier())
    assert isinstance(report, Report)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert "check_model(Sequential)" in lines[0]
    assert any("BatchDotGrad" in line and " 4 " in line for line in lines)
    assert sum(report.laws.values()) == len(report.comparisons)
    assert 0 < report.error < 1e-12


def test_a_failure_is_an_assertion_error_in_four_parts() -> None:
    with pytest.raises(AssertionError) as caught:
        check_extension(made(absolute), lambda rows: rows[0].sum(0), tolerance=1e-3)
    failure = caught.value
    assert isinstance(failure, CheckFailed)
    assert isinstance(failure, packprop.PackpropError)
    assert "0.001 is allowed" in failure.why or "1e-03 is allowed" in failure.why
    copied = pickle.loads(pickle.dumps(failure))
    assert (str(copied), copied.error) == (str(failure), failure.error)


def test_the_tolerance_is_obeyed() -> None:
    slightly = made(lambda s: s.rows.abs().sum((0, 1)) * (1 + 1e-6))
    with pytest.raises(CheckFailed):
        check_extension(slightly, lambda rows: rows.abs().sum((0, 1)))
    report = check_extension(slightly, lambda rows: rows.abs().sum((0, 1)), tolerance=1e-5)
    assert report.error == pytest.approx(1e-6, rel=0.01)


def test_imaginary_parts_count() -> None:
    assert relative_error(torch.tensor([1 + 1j]), torch.tensor([1 + 5j]), 0.0) == pytest.approx(4 / 26**0.5)


def test_values_that_are_not_finite_agree_with_themselves_alone() -> None:
    infinite = made(absolute, lambda self, values, samples: values[0] / 0)
    assert check_extension(infinite, lambda rows: rows.abs().sum((0, 1)) / 0).error < 1e-10
    with pytest.raises(CheckFailed):
        check_extension(infinite, lambda rows: rows.abs().sum((0, 1)))
