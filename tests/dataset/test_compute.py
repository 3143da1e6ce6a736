"""Quantities over a whole data set: what `compute` gives is what one big batch would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from tests.cases import Case
from tests.dataset.small import EXACT, SIZE, SPLIT_CASES, compute, part, small
from tests.references.oracle import Oracle
from tests.references.running import as_tensors, assert_all_near, assert_near
from tests.selection import STRUCTURES, often, one_in, thorough


@one_in(5)
@often(lambda case, reduction: reduction == "mean" or case.name in STRUCTURES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_batches_of_any_size_are_one_loss(case: Case, reduction: str) -> None:
    problem = case.problem(SIZE, reduction)
    oracle = Oracle(problem)
    cuts = [(0, 3), (3, 4), (4, SIZE)]
    data = [(part(problem.inputs, *cut), part(problem.targets, *cut)) for cut in cuts]
    asked = [make() for make in EXACT]
    found = compute(problem.model, problem.loss, data, *asked)
    assert (found.samples, found.reduction) == (SIZE, reduction)
    assert found.loss == pytest.approx(problem.total().item(), rel=1e-12)
    for extension in asked:
        expected = getattr(oracle, extension.savefield)
        assert_all_near(found[extension], expected, extension.savefield)


def test_there_are_cases_of_every_loss() -> None:
    names = " ".join(case.name for case in SPLIT_CASES)
    assert all(loss in names for loss in ("ce-", "mse-", "bce-", "ignore", "smoothing", "weight"))
    assert len(SPLIT_CASES) > 20


@pytest.mark.parametrize("cuts", [[7], [2, 5], [1] * 7], ids=str)
def test_kronecker_factors_over_batches(cuts: list[int]) -> None:
    """B is known in expectation only, so its trace is compared; A is compared entry by entry."""
    model, (x, y) = small()
    data = list(zip(x.split(cuts), y.split(cuts), strict=True))
    source = torch.Generator().manual_seed(0)
    kfac = extensions.KFAC(mc_samples=500, generator=source)
    found = compute(model, nn.CrossEntropyLoss(), data, kfac, extensions.DiagGGNExact())
    cotangents, inputs = found[kfac]["0.weight"]
    assert_near(inputs, x.T @ x / len(x), "A")
    exact = found["diag_ggn_exact"]["0.bias"]
    assert cotangents.diagonal().sum().item() == pytest.approx(exact.sum().item(), rel=0.1)


def test_a_factor_on_the_loss_scales_everything() -> None:
    model, (x, y) = small()
    asked = [make() for make in EXACT]
    loss = nn.CrossEntropyLoss()
    once = compute(model, loss, (x, y), *asked, batch_size=3)
    thrice = compute(model, lambda f, t: 3 * loss(f, t), (x, y), *asked, batch_size=3)
    assert thrice.loss == pytest.approx(3 * once.loss)
    powers = {"batch_l2": 2, "sum_grad_squared": 2, "variance": 2}
    for savefield, by_name in once.items():
        scaled = {k: v * 3.0 ** powers.get(savefield, 1) for k, v in by_name.items()}
        assert_all_near(thrice[savefield], scaled, savefield)


@one_in(2)
@pytest.mark.parametrize("loss", [nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_without_a_rule_for_curvature(loss: type[nn.Module], reduction: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()).double()
    x, y = torch.randn(SIZE, 3).double(), torch.rand(SIZE, 2).double()
    asked = [extensions.BatchGrad(), extensions.Variance()]
    expected = compute(model, loss(reduction=reduction), [(x, y)], *asked)
    found = compute(model, loss(reduction=reduction), (x, y), *asked, batch_size=3)
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)


@pytest.mark.filterwarnings("error")
def test_a_batch_without_terms_counts_for_nothing() -> None:
    """The mean over such a batch alone is 0/0; the mean over the data set is defined."""
    model, (x, y) = small()
    y[3:5] = -100
    asked = [make() for make in EXACT]
    expected = compute(model, nn.CrossEntropyLoss(), [(x, y)], *asked)
    parts = [(x[:3], y[:3]), (x[3:5], y[3:5]), (x[5:], y[5:])]
    found = compute(model, nn.CrossEntropyLoss(), parts, *asked)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)
    nothing = compute(model, nn.CrossEntropyLoss(), parts[1:2], extensions.BatchGrad())
    assert torch.tensor(nothing.loss).isnan()
    assert nothing["grad_batch"]["0.weight"].isnan().all()


@thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    """Values have the precision that a pass gives them, and are merged in at least that of float32."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype), nn.CrossEntropyLoss()
    x, y = torch.randn(512, 3, dtype=dtype), torch.randint(2, (512,))
    asked = [extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance(), extensions.KFLR()]
    found = packprop.compute(model, loss, (x, y), asked, batch_size=1, progress=False)
    once = packprop.extend(model)(x)
    with packprop.backpack(*asked):
        packprop.extend(loss)(once, y).backward()
    for extension in asked:
        for name, value in found[extension].items():
            expected = as_tensors(getattr(model.get_parameter(name), extension.savefield))
            for mine, other in zip(as_tensors(value), expected, strict=True):
                assert mine.dtype == other.dtype
                assert_near(mine, other, f"{extension.name} of {name}", 0.02)
    assert found.loss == pytest.approx(float(loss(once.double(), y)), rel=torch.finfo(dtype).eps)
