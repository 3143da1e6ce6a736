"""Jacobians of the model's output, whole and in chunks, under any reduction."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME, CASES, ONE_OF_EACH, Case
from tests.cases.case import call
from tests.references.oracle import Oracle
from tests.references.running import assert_near, backward, results
from tests.selection import one_in

# Cases where what the loss receives is the model's output as it is.
PLAIN = [c for c in CASES if "smoke" in c.tags and "flattened" not in c.tags]
PLAIN += [c for c in [*ONE_OF_EACH, BY_NAME["convtranspose2d-options"]] if c not in PLAIN]


@one_in(3)
@pytest.mark.covers("BatchJacobian")
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_against_the_oracle(case: Case) -> None:
    if (
        "linked" in case.tags
    ):  # curvature is that in what the model gives to a function; this is what it returns
        case = dataclasses.replace(case, output=call, score=lambda loss, output, target: loss(output, target))
    problem = case.problem(3, case.reductions[0])
    oracle = Oracle(case.problem(3, case.reductions[0]))
    backward(problem, extensions.BatchJacobian(), record=case.record)
    for name, jacobian in results(problem, "jac_batch").items():
        own = oracle.slices[name]
        expected = torch.stack([whole[:, own] for whole in oracle.jacobians])
        shape = problem.parameters[name].shape
        assert_near(jacobian, expected.reshape(3, -1, *shape), name, floor=1e-3)


@pytest.mark.parametrize("reduce", [torch.sum, torch.logsumexp, "loss"], ids=["sum", "logsumexp", "loss"])
def test_any_reduction_gives_the_same(reduce: object) -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = torch.func.vmap(
        torch.func.jacrev(lambda p, sample: torch.func.functional_call(model, p, (sample,))), (None, 0)
    )
    with packprop.disable():
        known = expected(dict(model.named_parameters()), x)
    with packprop.backpack(
        extensions.BatchJacobian(), extensions.BatchJacobian(outputs=[1], subsampling=[4, 0])
    ):
        output = model(x)
        if reduce == "loss":
            value = packprop.extend(nn.MSELoss())(output, torch.zeros_like(output))
        elif reduce is torch.sum:
            value = output.sum()
        else:
            value = output.logsumexp((0, 1)) ** 2
        value.backward()
    for name, parameter in model.named_parameters():
        assert parameter.jac_batch.shape == (2, 1, *parameter.shape)  # the one asked for last
        assert_near(parameter.jac_batch, known[name][[4, 0]][:, [1]], name)


def test_chunks_of_outputs() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.BatchJacobian())
    whole = results(problem, "jac_batch")
    for entry in range(3):
        backward(problem, extensions.BatchJacobian(outputs=[entry]))
        for name, part in results(problem, "jac_batch").items():
            assert_near(part[:, 0], whole[name][:, entry], name)


def test_whole_numbers_of_numpy() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.BatchJacobian(outputs=[2, 0]))
    known = results(problem, "jac_batch")
    backward(problem, extensions.BatchJacobian(outputs=np.array([2, 0])))
    for name, jacobian in results(problem, "jac_batch").items():
        assert_near(jacobian, known[name], name)


def test_bad_input() -> None:
    for wrong in ([], [0.5], [True]):
        with pytest.raises(BadInput, match="whole numbers"):
            extensions.BatchJacobian(outputs=wrong)
    with pytest.raises(BadInput, match="3 entries"):
        backward(BY_NAME["linear-deep"].problem(3), extensions.BatchJacobian(outputs=[3]))
    with pytest.raises(PackpropError, match="2 outputs"):
        backward(BY_NAME["two-forward-passes"].problem(3), extensions.BatchJacobian())
