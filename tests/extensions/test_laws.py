"""What must hold between quantities, whatever the model."""

from __future__ import annotations

import pytest
import torch

import packprop
from packprop import extensions
from tests.cases import Case, map_tensors
from tests.references.law_cases import LAW_CASES, SIZE, each_case
from tests.references.running import (
    ROWS,
    Row,
    assert_all_near,
    assert_near,
    backward,
    extend,
    generator,
    make_all,
    results,
    rows_for,
)
from tests.selection import STRUCTURES, often, one_in


@one_in(2)
@each_case
def test_first_order_follows_from_the_rows(case: Case) -> None:
    problem = case.problem(SIZE, case.reductions[0])
    backward(problem, *make_all([r for r in ROWS if r.order == 1]), record=case.record)
    for name, parameter in problem.parameters.items():
        rows = parameter.grad_batch
        flat = rows.flatten(1)
        assert_near(rows.sum(0), parameter.grad, name)
        assert_near(parameter.batch_l2, flat.square().sum(1), name)
        assert_near(parameter.sum_grad_squared, rows.square().sum(0), name)
        assert_near(parameter.variance, rows.var(0, correction=0), name)
        assert_near(parameter.batch_dot, flat @ flat.T, name)
        assert_near(parameter.batch_dot.diagonal(), parameter.batch_l2, name)
        assert (parameter.variance >= 0).all()


@one_in(3)
@each_case
def test_second_order_follows_from_the_root(case: Case) -> None:
    problem = case.problem(SIZE, case.reductions[0])
    backward(problem, *make_all([r for r in ROWS if r.order == 2]), record=case.record)
    for name, parameter in problem.parameters.items():
        exact, drawn = parameter.sqrt_ggn_exact.square(), parameter.sqrt_ggn_mc.square()
        assert_near(parameter.diag_ggn_exact_batch, exact.sum(0), name)
        assert_near(parameter.diag_ggn_exact, exact.sum((0, 1)), name)
        assert_near(parameter.diag_ggn_mc_batch, drawn.sum(0), name)
        assert_near(parameter.diag_ggn_mc, drawn.sum((0, 1)), name)


@one_in(5)
@pytest.mark.parametrize(
    "case", [c for c in LAW_CASES if c.reductions == ("mean", "sum")], ids=lambda case: case.name
)
def test_mean_and_sum_differ_by_the_divisor(case: Case) -> None:
    """Gradients scale with the loss, and so does curvature (not with its square)."""
    mean, total = case.problem(SIZE, "mean"), case.problem(SIZE, "sum")
    divisor = (total.total() / mean.total()).item()
    for problem in (mean, total):
        backward(problem, *make_all(rows_for(case)), record=case.record)
    for attribute, power in (
        ("grad_batch", 1),
        ("batch_l2", 2),
        ("variance", 2),
        ("diag_ggn_exact", 1),
        ("diag_ggn_mc", 1),
        ("sqrt_ggn_mc", 0.5),
    ):
        scaled = {k: v * divisor**power for k, v in results(mean, attribute).items()}
        assert_all_near(results(total, attribute), scaled, attribute)


@one_in(5)
@often(lambda case, row, kept: kept == [3, 1] and case.name in STRUCTURES)
@pytest.mark.parametrize("kept", [[0], [3, 1], [2, 0, 3, 1], [-1, 0]], ids=str)
@pytest.mark.parametrize("row", [r for r in ROWS if r.subsampling], ids=lambda row: row.name)
@each_case
def test_subsampling_takes_rows_in_list_order(case: Case, row: Row, kept: list[int]) -> None:
    """Rows of the listed samples, in list order, with the scale of the full batch."""
    whole, part = case.problem(SIZE, case.reductions[0]), case.problem(SIZE, case.reductions[0])
    backward(whole, row(generator()), record=case.record)
    asked = row(generator(), subsampling=kept)
    backward(part, asked, record=case.record)
    axis = 0 if row.attribute == "grad_batch" else 1
    index = torch.tensor(kept) % SIZE
    expected = {k: v.index_select(axis, index) for k, v in results(whole, row.attribute).items()}
    assert_all_near(results(part, row.attribute), expected, row.attribute)


@one_in(3)
@each_case
def test_order_of_samples_does_not_matter(case: Case) -> None:
    """The same samples in another order give the same rows in that order."""
    original, shuffled = (case.problem(SIZE, case.reductions[0]) for _ in range(2))
    order = torch.tensor([2, 0, 3, 1])
    inputs, targets = (map_tensors(lambda t: t[order], tree) for tree in (shuffled.inputs, shuffled.targets))
    backward(original, extensions.BatchGrad(), record=case.record)
    extend(shuffled)
    loss = case.whole(shuffled.model, shuffled.loss, inputs, targets)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    expected = {k: v[order] for k, v in results(original, "grad_batch").items()}
    assert_all_near(results(shuffled, "grad_batch"), expected, "grad_batch")
