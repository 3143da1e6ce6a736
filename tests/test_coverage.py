"""coverage(model, batch): what the table says, and that nothing of the user's is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import packprop
from packprop.recording.marks import EXTENDED, HANDLES
from packprop.reports.coverage import coverage
from packprop.reports.coverage_values import Consumption, Coverage
from tests.cases import BY_NAME, CASES, Case, call
from tests.cases.models.wrapping import Apply, Raw
from tests.references.running import backward

SIZE = 3


def covered(name: str) -> Coverage:
    problem = BY_NAME[name].problem(SIZE)
    return coverage(problem.model, (problem.inputs, problem.targets))


def of(found: Coverage, name: str) -> list[tuple[str, str]]:
    return [(use.function, use.structure) for use in found.parameters[name].uses]


def family(found: Coverage, name: str) -> Any:
    return next(family for family in found.families if family.name == name)


def linear_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


# What it says


def test_functions_structures_and_factors() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.LSTM(3, 2, batch_first=True))
    found = coverage(model, torch.randint(5, (SIZE, 2)))
    assert of(found, "0.weight") == [("embedding", "Lookup")]
    assert of(found, "1.weight") == [("layer_norm", "Scale")]
    assert of(found, "2.weight") == [("linear", "Outer")]
    assert of(found, "3.weight_hh_l0") == [("lstm", "Dense")]
    factors = {name: p.factors for name, p in found.parameters.items()}
    assert factors["0.weight"] == factors["2.weight"] == "B, A"
    assert factors["1.weight"] == factors["2.bias"] == factors["3.weight_hh_l0"] == "B"
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


# What is refused, and why


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
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    found = coverage(model, torch.tensor([0, 2, 4]))
    assert found.parameters["0.weight"].state == "refused"
    assert "max_norm" in found.parameters["0.weight"].uses[0].refusal
    assert not family(found, "gradients of samples").applies
    assert torch.equal(model[0].weight, before)


class Doubled(torch.autograd.Function):
    """A function that torch functions know nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (2 * gradient * x).sum(0)


def test_a_use_that_was_not_recorded_is_named() -> None:
    model = Raw(lambda self, x: Doubled.apply(x, self.w) * self.w, w=(3,))
    found = coverage(model, torch.randn(SIZE, 3))
    assert found.parameters["w"].state == "not recorded"
    assert found.parameters["w"].missing == ("DoubledBackward",)
    assert found.refusal is not None
    assert "not recorded: DoubledBackward" in " ".join(str(found).split())


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


def test_disabled_recording_is_said() -> None:
    with packprop.disable():
        found = coverage(linear_model(), torch.randn(SIZE, 4))
    assert found.refusal is not None
    assert "disable()" in found.refusal.why


# What goes in


def test_every_form_of_a_batch() -> None:
    model = Apply(lambda self, x, y: self.layer(x) * y, layer=nn.Linear(3, 2))
    x, y = torch.randn(SIZE, 3), torch.randn(SIZE, 2)
    for batch in (((x, y), None), [(x, y)], {"x": x, "y": y}):
        assert coverage(model, batch).samples == SIZE
    assert coverage(model.layer, (x, y)).samples == coverage(model.layer, x).samples == SIZE


@pytest.mark.parametrize("batch", ["text", (1, 2, 3), None])
def test_a_batch_that_is_none(batch: Any) -> None:
    with pytest.raises(packprop.BadInput, match="what of it goes into the model") as caught:
        coverage(linear_model(), batch)
    assert "((a, b), targets)" in caught.value.instead


def test_a_model_that_is_none() -> None:
    with pytest.raises(packprop.BadInput, match="extend"):
        coverage(nn.Linear, torch.randn(SIZE, 4))  # type: ignore[arg-type]


def test_a_model_that_is_not_initialised() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(packprop.BadInput, match="not initialised"):
        coverage(model, torch.randn(SIZE, 4))
    assert nn.parameter.is_lazy(model.weight)
    assert HANDLES not in vars(model)


# What it leaves alone


class Busy(nn.Module):
    """Counts, remembers, draws, and normalises over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        self.last = F.dropout(self.norm(x))
        return self.layer(self.last)


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_attributes_and_random_state_are_put_back(fails: bool) -> None:
    model = Busy()
    buffers = {name: (b, b.clone(), b._version) for name, b in model.named_buffers()}
    state, attributes = torch.get_rng_state(), set(vars(model))
    if fails:
        with pytest.raises(RuntimeError):
            coverage(model, torch.randn(SIZE, 4))
    else:
        found = coverage(model, torch.randn(SIZE, 3))
        assert of(found, "layer.weight") == [("linear", "Outer")]
    for name, buffer in model.named_buffers():
        before, value, version = buffers[name]
        assert buffer is before
        assert torch.equal(buffer, value)
        assert buffer._version == version
    assert (model.calls, model.last, set(vars(model))) == (0, None, attributes)
    assert model.training
    torch.set_rng_state(state)
    expected = torch.rand(3)
    torch.set_rng_state(state)
    x = torch.randn(SIZE, 3)
    torch.set_rng_state(state)
    coverage(model, x)
    assert torch.equal(torch.rand(3), expected)


def test_extends_for_a_while_only() -> None:
    model = linear_model()
    hooks = [copy.copy(m._forward_hooks) for m in model.modules()]
    coverage(model, torch.randn(SIZE, 4))
    assert not any(HANDLES in vars(m) for m in model.modules())
    assert [m._forward_hooks for m in model.modules()] == hooks
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model not in EXTENDED
    assert model(torch.randn(SIZE, 4)).grad_fn.metadata == {}


def test_what_was_extended_stays_extended() -> None:
    model = linear_model()
    packprop.extend(model[0])
    coverage(model, torch.randn(SIZE, 4))
    assert [HANDLES in vars(m) for m in model.modules()] == [False, True, False, False]
    assert model[0] in EXTENDED
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(SIZE, 4)), torch.randn(SIZE, 2))
    coverage(model, torch.randn(SIZE, 4))  # between forward and backward
    with packprop.backpack(packprop.extensions.BatchGrad()):
        loss.backward()
    assert model[0].weight.grad_batch.shape == (SIZE, 3, 4)


def test_no_gradient_is_left_and_nothing_is_saved() -> None:
    model = linear_model()
    x = torch.randn(SIZE, 4, requires_grad=True)
    with torch.no_grad():
        coverage(model, x)
    assert x.grad is None
    assert all(p.grad is None and not vars(p) for p in model.parameters())


def test_prints_within_100_columns() -> None:
    model = nn.Sequential(*(linear_model() for _ in range(3)))
    model = nn.ModuleDict({"a_rather_long_name_for_a_part_of_a_model": model})
    model.forward = lambda x: [m(x) for m in model["a_rather_long_name_for_a_part_of_a_model"]]
    found = coverage(model, torch.randn(SIZE, 4))
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("linear" in line for line in lines)


def test_inputs_on_other_axes() -> None:
    case = BY_NAME["time-first-inside"]
    problem = case.problem(SIZE)
    assert coverage(problem.model, problem.inputs).samples == SIZE
