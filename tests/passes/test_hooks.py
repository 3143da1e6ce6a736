"""Extension hooks: when they are called, what they may free, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from tests.cases import BY_NAME, Case
from tests.references.law_cases import SIZE, each_case, each_row
from tests.references.running import ROWS, Row, assert_near, backward, forward, make_all, results
from tests.selection import one_in


def own_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold trainable parameters themselves."""
    return [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]


@one_in(5)
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "all"])
@each_case
def test_hook_sees_each_module_once_when_it_is_ready(case: Case, rows: list[Row]) -> None:
    problem = case.problem(SIZE, case.reductions[0])
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                assert all(hasattr(parameter, row.attribute) for row in rows)

    loss = forward(problem, case.record)
    with packprop.backpack(*make_all(rows), extension_hook=hook):
        loss.backward()
    with_parameters = [m for m in seen if m in set(own_modules(problem.model))]
    assert len(with_parameters) == len(set(with_parameters))
    owned = {id(p) for m in with_parameters for p in m.parameters(recurse=False)}
    assert owned >= {id(p) for p in problem.parameters.values()}


@one_in(2)
@each_row
def test_hook_may_free_what_it_has_read(row: Row) -> None:
    problem = BY_NAME["conv2d-deep"].problem(SIZE)
    taken: dict[str, Any] = {}
    names = {id(p): k for k, p in problem.parameters.items()}

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if hasattr(parameter, row.attribute):
                taken[names[id(parameter)]] = getattr(parameter, row.attribute)
                delattr(parameter, row.attribute)

    loss = forward(problem)
    with packprop.backpack(row(), extension_hook=hook):
        loss.backward()
    assert taken.keys() == problem.parameters.keys()
    assert not any(hasattr(p, row.attribute) for p in problem.parameters.values())


def test_trace_by_hook_equals_the_sum_of_the_diagonal() -> None:
    """What the hook is meant for: reduce each module's result, then free it."""
    problem, other = (BY_NAME["conv2d-deep"].problem(SIZE) for _ in range(2))
    trace = torch.zeros((), dtype=torch.float64)

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            trace.add_(parameter.diag_ggn_exact.sum())
            del parameter.diag_ggn_exact

    loss = forward(problem)
    with packprop.backpack(extensions.DiagGGNExact(), extension_hook=hook):
        loss.backward()
    backward(other, extensions.DiagGGNExact())
    expected = sum(d.sum() for d in results(other, "diag_ggn_exact").values())
    assert_near(trace, expected, "trace")


def test_hook_error_reaches_the_user_and_ends_the_pass() -> None:
    problem = BY_NAME["linear-deep"].problem(SIZE)

    def hook(module: nn.Module) -> None:
        raise KeyError("mine")

    loss = forward(problem)
    with (
        pytest.raises(KeyError, match="mine"),
        packprop.backpack(extensions.BatchGrad(), extension_hook=hook),
    ):
        loss.backward()
    backward(problem, extensions.BatchGrad())
    results(problem, "grad_batch")
