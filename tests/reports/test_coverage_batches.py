"""coverage(model, batch): what goes in, and that nothing of the user's is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.applications.reports.coverage import coverage
from packprop.engine.recording.marks import EXTENDED, HANDLES
from tests.cases import BY_NAME
from tests.cases.models.wrapping import Apply
from tests.reports.covered import SIZE, linear_model, of


def test_every_form_of_a_batch() -> None:
    model = Apply(lambda self, x, y: self.layer(x) * y, layer=nn.Linear(3, 2))
    x, y = torch.randn(SIZE, 3), torch.randn(SIZE, 2)
    for batch in (((x, y), None), [(x, y)], {"x": x, "y": y}):
        assert coverage(model, batch).samples == SIZE
    assert coverage(model.layer, (x, y)).samples == coverage(model.layer, x).samples == SIZE


@pytest.mark.parametrize("batch", ["text", (1, 2, 3), None])
def test_a_batch_that_is_none(batch: Any) -> None:
    with pytest.raises(packprop.BadInput, match="which part of it is the input of the model") as caught:
        coverage(linear_model(), batch)
    assert "((a, b), targets)" in caught.value.instead


def test_a_model_that_is_none() -> None:
    with pytest.raises(packprop.BadInput, match="extend"):
        coverage(nn.Linear, torch.randn(SIZE, 4))  # type: ignore[arg-type]  # wrong on purpose


def test_a_model_that_is_not_initialised() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(packprop.BadInput, match="not initialised"):
        coverage(model, torch.randn(SIZE, 4))
    assert nn.parameter.is_lazy(model.weight)
    assert HANDLES not in vars(model)


# What it leaves alone


class Busy(nn.Module):
    """A model with state: it counts calls, remembers inputs, draws numbers, and normalises over the batch.

    It makes a buffer, a table and a layer when it is first called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", None)
        self.calls, self.last = 0, None
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.seen += len(x)
        if self.mask is None:
            self.mask = torch.ones(x.shape[1])
            self.register_buffer("table", torch.zeros(x.shape[1]), persistent=False)
            self.act = nn.Tanh()
        self.last = F.dropout(self.norm(x))
        return self.layer(self.last)


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_attributes_and_random_state_are_put_back(fails: bool) -> None:
    model = Busy()
    buffers = {name: (b, b.clone(), b._version) for name, b in model.named_buffers()}
    state, attributes, saved = torch.get_rng_state(), set(vars(model)), list(model.state_dict())
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
    assert (model.mask, model.sizes, model._non_persistent_buffers_set) == (None, [], set())
    assert (list(model.state_dict()), [*dict(model.named_children())]) == (saved, ["norm", "layer"])
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
