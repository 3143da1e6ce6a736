"""Dense curvature matrices by autograd, and the cases that products are compared on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packprop import extensions
from tests.cases import BY_NAME, CASES, ONE_OF_EACH, Case
from tests.references.oracle import Problem
from tests.references.running import Row, assert_near

SMOKE = [case for case in CASES if "smoke" in case.tags]
PRODUCTS = [Row(extensions.HMP, "hmp", 1), Row(extensions.GGNMP, "ggnmp", 2)]
# PyTorch has no second derivatives of the others.
TWICE = list(
    dict.fromkeys(
        case
        for case in [*SMOKE, *ONE_OF_EACH]
        if case.name not in ("embedding-bag-sum", "multi-margin", "multilabel-margin", "ctc")
    )
)
NOT_ELEMENTWISE = (
    *("logaddexp", "solve", "vision-transformer-hand-written", "vision-transformer-library"),
    *("rnn", "rnn-relu", "gru", "lstm", "rnn-cell-loop", "rnn-relu-cell-loop"),
    *("lstm-cell-loop", "gru-cell-loop", "experts-grouped"),
    *("weight-norm", "tied-transpose", "module-twice"),
    "divide",  # by 2 + w: the function of the parameter curves itself; one that is divided is in CHAINS
)
NUMERATORS = ("divide-reversed", "divide-numerator")
CHAINS = [
    *(
        BY_NAME[name]
        for name in ("linear-deep", "conv2d-deep", "autoencoder", "doubled", "mse-map", *NUMERATORS)
    ),
    *(
        case
        for case in TWICE
        if case in ONE_OF_EACH
        and case.name not in NOT_ELEMENTWISE
        and not case.refuses_curvature
        and case.order == 2
    ),
]


def block(problem: Problem, name: str) -> Tensor:
    """The dense Hessian block of one parameter, of the whole loss, row by row."""
    parameter = problem.parameters[name]
    (slope,) = torch.autograd.grad(
        problem.total(), parameter, create_graph=True, allow_unused=True, materialize_grads=True
    )
    rows = [
        torch.autograd.grad(g, parameter, retain_graph=True, allow_unused=True, materialize_grads=True)[
            0
        ].flatten()
        if slope.requires_grad
        else torch.zeros_like(slope).flatten()
        for g in slope.flatten()
    ]
    return symmetric(torch.stack(rows))


def symmetric(hessian: Tensor) -> Tensor:
    """Check that a Hessian is symmetric, since not all second derivatives of PyTorch are right; return it."""
    assert_near(hessian, hessian.T, "the transposed Hessian", 1e-9)
    return hessian


def check(product: Any, dense: Tensor, shape: torch.Size, what: str) -> None:
    vectors = torch.randn(3, *shape, dtype=torch.float64)
    expected = (vectors.flatten(1) if shape else vectors[:, None]) @ dense
    found = product(vectors)
    assert found.shape == vectors.shape
    assert_near(found, expected.view_as(vectors), what, floor=1e-3)
    assert_near(product(vectors[1]), expected.view_as(vectors)[1], f"{what}, one vector", floor=1e-3)


def products_for(case: Case) -> list[Row]:
    """The products that are defined for a case; the Hessian of normalised weights is wrong in PyTorch."""
    curved, wrong = case.order == 2 and not case.refuses_curvature, case.name == "weight-norm"
    return [row for row in PRODUCTS if (curved if row.order == 2 else not wrong)]
