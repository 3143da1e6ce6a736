"""coverage(model, batch): what the table says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import packprop
from packprop.applications.reports.coverage import coverage
from packprop.applications.reports.coverage_values import Consumption
from tests.cases import BY_NAME, CASES, Case, call
from tests.cases.models.wrapping import Apply
from tests.references.running import backward
from tests.reports.covered import SIZE, family, linear_model, of
from tests.selection import one_in


def test_functions_structures_and_factors() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.LSTM(3, 2, batch_first=True))
    found = coverage(model, torch.randint(5, (SIZE, 2)))
    assert of(found, "0.weight") == [("embedding", "Lookup")]
    assert of(found, "1.weight") == [("layer_norm", "Scale")]
    assert of(found, "2.weight") == [("linear", "Outer")]
    assert of(found, "3.weight_hh_l0") == [("lstm", "Outer")]
    factors = {name: p.factors for name, p in found.parameters.items()}
    assert factors["0.weight"] == factors["2.weight"] == factors["3.weight_hh_l0"] == "B, A"
    assert factors["1.weight"] == factors["2.bias"] == factors["3.bias_hh_l0"] == "B"
    assert [p.layer for p in found.parameters.values()][:3] == [
        "Embedding",
        "LayerNorm",
        "LayerNorm",
    ]
    assert found.samples == SIZE
    assert found.complete


def is_plain(case: Case) -> bool:
    """Whether the loss is that of what the model returns, and extensions apply."""
    own = case.total is not None or case.output is not call or case.reductions == (None,)
    return not (own or case.refuses or case.record)


@one_in(5)
@pytest.mark.parametrize("case", [c for c in CASES if is_plain(c)][::3], ids=lambda case: case.name)
def test_says_what_a_backward_pass_then_does(case: Case) -> None:
    """Every parameter that a pass saves a value on is used, and the other way round."""
    problem = case.problem(SIZE)
    found = coverage(problem.model, (problem.inputs, problem.targets))
    backward(problem, packprop.extensions.BatchGrad())
    for name, parameter in problem.parameters.items():
        used = found.parameters[name].state == "used"
        assert used == hasattr(parameter, "grad_batch"), name


@pytest.mark.parametrize(
    "name", ["conv2d-deep", "tied-transpose", "weight-norm", "vision-transformer-hand-written"]
)
def test_factors_are_those_that_kfac_saves(name: str) -> None:
    problem = BY_NAME[name].problem(SIZE)
    found = coverage(problem.model, problem.inputs)
    backward(problem, packprop.extensions.KFAC())
    for name, parameter in problem.parameters.items():
        assert found.parameters[name].factors == ["", "B", "B, A"][len(parameter.kfac)]


def test_one_module_used_twice_and_tied_names() -> None:
    inner = nn.Linear(3, 3)
    model = nn.Sequential(inner, nn.Tanh(), inner, nn.Linear(3, 3))
    model[3].weight = inner.weight
    found = coverage(model, torch.randn(SIZE, 3))
    shared = found.parameters["0.weight"]
    assert shared.aliases == ("2.weight", "3.weight")
    assert of(found, "0.weight") == [("linear", "Outer")] * 3
    assert "linear x 3" in str(found)
    assert "0.weight = 2.weight = 3.weight" in " ".join(str(found).split())


def test_a_parametrised_weight_is_reached_through_what_makes_it() -> None:
    model = weight_norm(nn.Linear(3, 2))
    found = coverage(model, torch.randn(SIZE, 3))
    original = found.parameters["parametrizations.weight.original1"]
    assert original.uses == (Consumption("linear", "Outer", direct=False),)
    assert original.layer == "Linear"
    assert original.factors == "B"
    assert "Outer, then Dense" in str(found)


def test_frozen_and_unused_parameters_are_listed() -> None:
    model = Apply(lambda self, x: self.first(x), first=nn.Linear(3, 2), second=nn.Linear(3, 2))
    model.first.bias.requires_grad_(False)
    found = coverage(model, torch.randn(SIZE, 3))
    states = {name: p.state for name, p in found.parameters.items()}
    assert states == {
        "first.weight": "used",
        "first.bias": "frozen",
        "second.weight": "unused",
        "second.bias": "unused",
    }
    assert not found.complete
    assert "1 used, 1 frozen, 2 unused" in str(found)


def test_gradients_apply_and_curvature_depends_on_the_loss() -> None:
    found = coverage(linear_model(), torch.randn(SIZE, 4))
    listed = [name for family in found.families for name in family.extensions]
    rows = set(packprop.extensions.__all__) - {"Extension", "Row"}
    assert sorted(listed) == sorted(rows)
    assert all(family.applies for family in found.families)
    assert family(found, "gradients of samples").why == ""
    assert "recorded loss" in family(found, "GGN, exact").why


class Distances(nn.Module):
    """Distances to trained points: `torch.cdist` has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.head = nn.Parameter(torch.randn(6, 3)), nn.Linear(6, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cdist(x, self.points).sum(1))


def test_functions_without_a_rule_are_named() -> None:
    found = coverage(Distances(), torch.randn(SIZE, 4, 3))
    assert [use.fallback for use in found.parameters["points"].uses] == [True]
    assert [use.fallback for use in found.parameters["head.weight"].uses] == [False]
    assert found.fallback_share == 18 / 30
    (use,) = found.parameters["points"].uses
    assert use.function == "CdistBackward0"
    assert "called for each sample: CdistBackward0; 0.6 of all entries" in str(found)


def test_a_model_of_known_functions_calls_none_again() -> None:
    found = coverage(nn.Linear(3, 2), torch.randn(SIZE, 3))
    assert found.fallback_share == 0
    assert "called for each sample" not in str(found)
