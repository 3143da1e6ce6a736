"""Replays leave what ordinary passes leave: every extension, on models and losses of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.cases import BY_NAME, Case
from tests.compiled.steps import batch, check_call, compiled, left_on, network, quietly, replays, settle
from tests.references.running import ExactEKFAC, assert_near, rows_for
from tests.selection import often, one_in, thorough

EXTENSIONS = [
    extensions.BatchGrad(),
    extensions.BatchGrad(subsampling=[0, 3]),
    extensions.BatchL2Grad(),
    extensions.SumGradSquared(),
    extensions.Variance(),
    extensions.BatchDotGrad(),
    extensions.DiagGGNExact(),
    extensions.BatchDiagGGNExact(),
    extensions.SqrtGGNExact(),
    extensions.DiagGGNMC(mc_samples=2),
    extensions.BatchDiagGGNMC(),
    extensions.SqrtGGNMC(),
    extensions.KFAC(),
    extensions.KFAC(fisher="empirical"),
    extensions.KFLR(),
    extensions.KFRA(),
    extensions.HBP(),
    extensions.EKFAC(),
    ExactEKFAC(),
    extensions.DiagHessian(),
    extensions.BatchDiagHessian(),
    extensions.DiagHessianMC(),
    extensions.BatchJacobian(),
]
FEW = (extensions.BatchGrad, extensions.Variance, extensions.KFAC, extensions.EKFAC, extensions.DiagHessian)
# Shared positions, tied and computed parameters, checkpoints, losses of other kinds, functions without rule.
CASES = [
    "conv2d",
    "embedding",
    "layernorm",
    "lstm",
    "weight-norm",
    "tied-transpose",
    "module-twice",
    "checkpoint",
    "mse-shared",
    "bce-weight-per-sample",
]


@one_in(5)
@often(lambda extension: type(extension) in FEW)
@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_each_extension(extension: Any) -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    step = compiled(model, extension)
    settle(step)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        check_call(step, model, loss, *batch(), extension)
    assert replays(step) == 2


class Whole(nn.Module):
    """A case as a module that computes its loss."""

    def __init__(self, case: Case, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.case, self.model, self.loss = case, model, loss

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        return self.case.whole(self.model, self.loss, inputs, targets)


@thorough
@often(lambda name: name in ("conv2d", "tied-transpose"))
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_model(name: str) -> None:
    case = BY_NAME[name]
    problem = case.problem(3)
    left_out = (ExactEKFAC, extensions.EKFAC, extensions.BatchDiagGGNMC, extensions.SqrtGGNMC)
    rows = [row for row in rows_for(case) if row.make not in left_out]
    source = torch.Generator()
    whole = Whole(case, problem.model, problem.loss)
    step = packprop.compile(whole, None, *(row(source) for row in rows), backend="eager")
    given = (problem.inputs, problem.targets)
    for _ in range(4):
        problem.model.zero_grad()
        with torch.no_grad():
            for parameter in problem.model.parameters():
                parameter.mul_(1.01)
        source.manual_seed(0)
        loss = quietly(step, given)
    assert replays(step) == 1
    fields = [row.attribute for row in rows]
    replayed = left_on(problem.model, fields)
    problem.model.zero_grad()
    source.manual_seed(0)
    assert_near(step._pass.run(given, None), loss, "loss")
    for what, tensors in left_on(problem.model, fields).items():
        for own, other in zip(replayed[what], tensors, strict=True):
            assert_near(own, other, what)
