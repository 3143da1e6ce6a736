"""Losses whose Hessian is decomposed, in bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.low_precision import NEAR, SIZE, observed, problem
from tests.references.oracle import Problem
from tests.references.running import as_tensors, assert_all_near, assert_near, generator, results
from tests.selection import one_in


class Coupled(nn.Module):
    """A convex loss without a rule, whose Hessian is a full matrix."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        length = (input.square().sum(1) + 1).sqrt()
        return length.sum() + (input - target).square().sum() / 4


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "SmoothL1Loss": (lambda: nn.SmoothL1Loss(beta=3.0), Tensor.clone),
    "HuberLoss": (lambda: nn.HuberLoss(delta=3.0), Tensor.clone),
    "SoftMarginLoss": (nn.SoftMarginLoss, Tensor.sign),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, Tensor.abs),
    "Coupled": (Coupled, Tensor.clone),
}


def under_loss(name: str, dtype: torch.dtype, held: torch.dtype, mixed: bool) -> Problem:
    """The values of GGN extensions under one of these losses."""
    found, (make, target_of) = problem("linear", dtype, held), LOSSES[name]
    torch.manual_seed(2)
    targets, source = target_of(torch.randn(SIZE, 3).to(held).to(dtype)), generator()
    drawn = (make(2, generator=source) for make in (extensions.SqrtGGNMC, extensions.DiagGGNMC))
    asked = (extensions.DiagGGNExact(), extensions.KFLR(), *drawn)
    return observed(found, make(), targets, asked, held, mixed)


@one_in(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["parameters", "autocast"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_losses_without_a_rule(dtype: torch.dtype, name: str, mixed: bool) -> None:
    """PyTorch decomposes no matrices in low precision: their Hessians are taken in float32."""
    exact = under_loss(name, torch.float64, dtype, mixed=False)
    found = under_loss(name, torch.float32 if mixed else dtype, dtype, mixed)
    for attribute in ("diag_ggn_exact", "kflr"):
        expected = results(exact, attribute)
        for key, saved in results(found, attribute).items():
            for mine, other in zip(as_tensors(saved), as_tensors(expected[key]), strict=True):
                assert_near(mine, other, f"{attribute} of {key}", NEAR[dtype])
    drawn = {key: root.float().square().sum((0, 1)) for key, root in results(found, "sqrt_ggn_mc").items()}
    assert_all_near(results(found, "diag_ggn_mc"), drawn, "diag_ggn_mc", NEAR[dtype])


class Weighted(Coupled):
    """It multiplies by a constant of its own in low precision, and takes no other."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        scales = torch.eye(3, dtype=torch.bfloat16)
        scaled: Tensor = input @ scales
        return super().forward(scaled, target)


def test_a_loss_that_takes_low_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "Weighted", (Weighted, Tensor.clone))
    exact = under_loss("Coupled", torch.float64, torch.bfloat16, mixed=False)
    found = under_loss("Weighted", torch.bfloat16, torch.bfloat16, mixed=False)
    for key, expected in results(exact, "diag_ggn_exact").items():
        assert_near(results(found, "diag_ggn_exact")[key], expected, key, NEAR[torch.bfloat16])


@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.SqrtGGNExact])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_many_classes(dtype: torch.dtype, extension: type[extensions.DiagGGNExact]) -> None:
    """Each would be a few percent off, and their sum with it, if they were computed in this precision."""
    torch.manual_seed(0)
    layer, loss = packprop.extend(nn.Linear(4, 1000)).to(dtype), packprop.extend(nn.CrossEntropyLoss())
    logits = layer((0.2 * torch.randn(2, 4)).to(dtype))
    with packprop.backpack(extension()):
        loss(logits, torch.tensor([3, 700])).backward()
    p = logits.detach().double().softmax(1)
    expected = ((p - p.square()).sum() / 2).item()
    saved = getattr(layer.bias, extension.savefield).double()
    found = saved if extension is extensions.DiagGGNExact else saved.square()
    assert found.sum().item() == pytest.approx(expected, rel=3e-3)
