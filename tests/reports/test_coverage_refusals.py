"""coverage(model, batch): what is refused, and why."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.reports.coverage import coverage
from tests.cases.models.wrapping import Apply, Raw
from tests.reports.covered import SIZE, family, linear_model, of


def test_a_layer_that_mixes_samples_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    found = coverage(model, torch.randn(SIZE, 4))
    assert found.mixers == ("'1' (BatchNorm1d)",)
    assert isinstance(found.refusal, packprop.PackpropError)
    assert not any(family.applies for family in found.families)
    assert of(found, "0.weight") == [("linear", "Outer")]  # the table is there all the same
    assert "mixes samples: '1' (BatchNorm1d)" in str(found)
    assert coverage(model.eval(), torch.randn(SIZE, 4)).complete


def test_samples_that_are_mixed_without_a_known_layer() -> None:
    model = Apply(lambda self, x: self.b(self.a(x) - self.a(x).mean(0)), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    found = coverage(model, torch.randn(SIZE, 3))
    assert found.refusal is not None
    assert "'a.weight'" in found.refusal.where
    assert found.samples == 0
    assert of(found, "a.weight") == [("linear", "Outer")] * 2


def test_a_refusal_of_a_rule() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True), nn.Linear(3, 2))
    found = coverage(model, torch.tensor([0, 2, 4]))
    assert found.parameters["0.weight"].state == "refused"
    assert "scale_grad_by_freq" in found.parameters["0.weight"].uses[0].refusal
    assert of(found, "1.weight") == [("linear", "Outer")]
    assert not family(found, "gradients of samples").applies


def test_a_table_that_is_rescaled_is_put_back() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    assert coverage(model, torch.tensor([0, 2, 4])).complete
    assert torch.equal(model[0].weight, before)


class Doubled(torch.autograd.Function):
    """A function of a user's own, without a rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (2 * gradient * x).sum(0)


def test_a_function_of_a_users_own_is_named() -> None:
    model = Raw(lambda self, x: Doubled.apply(x, self.w) * self.w, w=(3,))
    found = coverage(model, torch.randn(SIZE, 3))
    assert found.complete
    assert of(found, "w") == [("mul", "Scale"), ("DoubledBackward", "Dense")]
    assert [use.fallback for use in found.parameters["w"].uses] == [False, True]
    assert "called for each sample: DoubledBackward; 1 of all entries" in " ".join(str(found).split())


def test_a_loss_inside_the_model() -> None:
    def forward(loss: Any) -> nn.Module:
        return Apply(lambda self, x, y: loss(self.layer(x), y), layer=nn.Linear(3, 2))

    batch = ((torch.randn(SIZE, 3), torch.tensor([0, 1, 1])), None)
    assert family(coverage(forward(F.cross_entropy), batch), "GGN, exact").applies
    found = coverage(forward(lambda f, y: F.nll_loss(f, y)), batch)
    assert family(found, "gradients of samples").applies
    assert not family(found, "GGN, exact").applies
    assert "nll_loss" in family(found, "GGN, exact").why
    found = coverage(forward(lambda f, y: f.square().mean()), batch)
    assert not family(found, "GGN, exact").applies


def test_outputs_that_disagree_about_the_samples() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x)
        return self.b(hidden), hidden.mean(0)

    model = Apply(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    found = coverage(model, torch.randn(SIZE, 3))
    assert found.refusal is None
    assert found.samples == SIZE
    assert "first output alone" in family(found, "gradients of samples").why


def test_nothing_to_differentiate() -> None:
    model = linear_model().requires_grad_(False)
    found = coverage(model, torch.randn(SIZE, 4))
    assert {p.state for p in found.parameters.values()} == {"frozen"}
    assert not any(family.applies for family in found.families)
