"""The oracle and the cases hold together on their own, before packprop is asked anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases import CASES, Case
from tests.cases.building import regression
from tests.references.oracle import Oracle
from tests.selection import STRUCTURES, each_structure, often, one_in, paired

EVERY = paired(CASES)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@one_in(3)
@often(lambda case, size, reduction: size == case.sizes[-1] and case.name in STRUCTURES)
@pytest.mark.parametrize(("case", "size", "reduction"), EVERY)
def test_samples_make_up_the_whole(case: Case, size: int, reduction: str) -> None:
    """One-sample shares sum to the whole loss, and their gradients to its gradient."""
    problem = case.problem(size, reduction)
    shares = sum(problem.term(problem.output(n), n) for n in range(size))
    torch.testing.assert_close(shares, problem.total(), rtol=1e-12, atol=1e-13)
    oracle = Oracle(problem)
    for name, whole in oracle.whole_gradient.items():
        rows = oracle.grad_batch[name].sum(0)
        torch.testing.assert_close(rows, whole, rtol=1e-10, atol=1e-12 * (1 + whole.abs().max()))


@one_in(2)
@each_structure
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_are_small_and_say_something(case: Case) -> None:
    """A case has few numbers, and no parameter whose gradient vanishes for every sample."""
    problem = case.problem(3, case.reductions[0])
    assert sum(p.numel() for p in problem.parameters.values()) <= 300
    assert problem.output(0).numel() <= 16
    for name, rows in Oracle(problem).grad_batch.items():
        unread = case.name.endswith("-last-token") and ".experts." in name  # by a loss of the last token alone
        assert unread or rows.abs().max() > 0, name


def test_linear_regression_by_hand() -> None:
    """For one linear layer and squared error everything is known in closed form."""
    case = Case("by-hand", lambda: nn.Linear(3, 2), nn.MSELoss, regression((3,), (2,)))
    problem = case.problem(4, "mean")
    oracle, x, y = Oracle(problem), problem.inputs, problem.targets
    residual = problem.model(x) - y
    rows = torch.einsum("no,ni->noi", 2 * residual / y.numel(), x)
    torch.testing.assert_close(oracle.grad_batch["weight"], rows.detach())
    diagonal = 2 / y.numel() * x.square().sum(0).expand(2, 3)
    torch.testing.assert_close(oracle.diag_ggn_exact["weight"], diagonal)
    torch.testing.assert_close(oracle.diag_ggn_exact["bias"], torch.ones(2).double())
    output_factor, input_factor = oracle.kfac["weight"]
    torch.testing.assert_close(input_factor, x.T @ x / 4)
    torch.testing.assert_close(output_factor, torch.eye(2).double())
    torch.testing.assert_close(torch.kron(output_factor, input_factor), oracle.ggn_block["weight"])


@pytest.mark.parametrize("case", [c for c in CASES if c.refuses_curvature], ids=lambda c: c.name)
@pytest.mark.parametrize("size", [1, 3])
def test_refused_curvature_is_no_curvature(case: Case, size: int) -> None:
    """Where an error is expected, the loss Hessian is zero, has a negative eigenvalue, or is elsewhere."""
    if case.name in ("bce-of-softmax", "poisson-of-other-rates"):
        return  # it is one in what sigmoid or exp was given, and these are not there
    hessians = torch.stack(Oracle(case.problem(size)).hessians)
    smallest = torch.linalg.eigvalsh(hessians).min()
    assert smallest < -1e-3 or hessians.abs().max() == 0
