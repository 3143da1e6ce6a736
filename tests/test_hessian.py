"""Hessian diagonals of every case against the oracle, by every way that they can be taken."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from packprop import extensions
from packprop.errors import PackpropError
from tests.cases import BY_NAME, CASES, Case
from tests.oracle import Oracle
from tests.running import assert_all_near, assert_near, backward, results

# What PyTorch itself has no second derivatives of.
NOT_TWICE = {"cdist": "_cdist_backward", "multi-margin": "multi_margin_loss_backward"}
EVERY = [
    pytest.param(case, size, reduction, id=f"{case.name}-n{size}-{reduction}")
    for case in CASES
    if not case.refuses and case.name not in NOT_TWICE and not case.name.startswith("embedding-bag")
    for size in case.sizes
    for reduction in case.reductions
]


@pytest.mark.parametrize(("case", "size", "reduction"), EVERY)
def test_every_case(case: Case, size: int, reduction: str | None) -> None:
    problem = case.problem(size, reduction)
    oracle = Oracle(case.problem(size, reduction))
    with sdpa_kernel(SDPBackend.MATH):
        backward(problem, extensions.DiagHessian(), extensions.BatchDiagHessian(), record=case.record)
        expected, batch = oracle.diag_h, oracle.diag_h_batch
    assert_all_near(results(problem, "diag_h"), expected, "diag_h", 1e-9)
    assert_all_near(results(problem, "diag_h_batch"), batch, "diag_h_batch", 1e-9)
    assert all(p.diag_h.dtype == torch.float64 for p in problem.parameters.values())


@pytest.mark.parametrize("name", NOT_TWICE)
def test_what_cannot_be_differentiated_twice_is_named(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    with pytest.raises(PackpropError, match=NOT_TWICE[name]):
        backward(problem, extensions.DiagHessian())


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name.startswith("embedding-bag")])
def test_what_pytorch_refuses_but_the_way_does_not_need(name: str) -> None:
    """embedding_bag has no double backward, but is linear in its table: compared with differences."""
    problem = BY_NAME[name].problem(3)
    backward(problem, extensions.BatchDiagHessian())
    step = 1e-6
    for key, parameter in problem.parameters.items():
        rows = []
        for flat in range(parameter.numel()):
            entry = parameter.data.view(-1)
            sides = []
            for shift in (step, -2 * step, step):
                entry[flat] += shift
                problem.model.zero_grad()
                sides.append(Oracle(problem).grad_batch[key].flatten(1)[:, flat])
            rows.append((sides[0] - sides[1]) / (2 * step))
        expected = torch.stack(rows, 1).view(3, *parameter.shape)
        assert_near(results(problem, "diag_h_batch")[key], expected, key, 1e-6, 1e-2)
