"""coverage(model, batch): what is refused, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.applications.reports.coverage import coverage
from packprop.errors import BadInput
from packprop.testing import check_model
from tests.cases.models.wrapping import Apply, Raw
from tests.references.running import assert_rows_of_terms
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
    assert found.refusal is not None
    assert "'0.weight'" in found.refusal.where
    assert "scale_grad_by_freq" in found.refusal.why
    assert not family(found, "gradients of samples").applies


def test_a_table_that_its_forward_pass_writes_to() -> None:
    """It is as it was after the report, and rows are those of the values that the pass has written."""
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2)).double()
    before, x = model[0].weight.detach().clone(), torch.tensor([0, 2, 2, 4])
    assert coverage(model, x).complete
    assert torch.equal(model[0].weight, before)
    terms = F.mse_loss(model(x), torch.ones(4, 2).double(), reduction="none") / 8
    assert_rows_of_terms(terms, F.mse_loss(model(x), torch.ones(4, 2).double()), model.parameters())


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (2 * gradient * x).sum(0)


def test_a_function_of_the_users_is_a_use() -> None:
    model = Raw(lambda self, x: Doubled.apply(x, self.w) * self.w, w=(3,)).double()
    x = torch.randn(SIZE, 3).double()
    found = coverage(model, x)
    assert found.complete
    assert found.parameters["w"].state == "used"
    assert {name for name, _ in of(found, "w")} == {"DoubledBackward", "mul"}
    terms = F.mse_loss(model(x), torch.zeros_like(x), reduction="none") / x.numel()
    assert_rows_of_terms(terms, F.mse_loss(model(x), torch.zeros_like(x)), model.parameters())


def test_a_use_that_is_hidden_is_named() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 3), backend="aot_eager"), nn.Linear(3, 2))
    found = coverage(model, torch.randn(SIZE, 4))
    torch._dynamo.reset()
    (name, *_) = found.parameters
    assert found.parameters[name].state == "not recorded"
    assert set(found.parameters[name].missing) == {"CompiledFunctionBackward"}
    assert found.refusal is not None
    assert "torch.compile" in found.refusal.why
    assert "not recorded" in str(found)


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


def test_under_disable() -> None:
    """The graph is there all the same."""
    with packprop.disable():
        found = coverage(linear_model(), torch.randn(SIZE, 4))
    assert found.complete
    assert found.samples == SIZE


def test_inference_mode() -> None:
    """No parameter is used there, as far as graphs tell."""
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    calls = (
        lambda: coverage(model, x),
        lambda: packprop.plan(model, nn.CrossEntropyLoss(), (x, y), packprop.extensions.BatchGrad()),
        lambda: check_model(model, nn.CrossEntropyLoss(), x, y),
    )
    for call in calls:
        with torch.inference_mode(), pytest.raises(BadInput, match=r"torch.inference_mode\(\)"):
            call()
