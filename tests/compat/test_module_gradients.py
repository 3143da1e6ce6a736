"""Gradients at the inputs and outputs of a module, and differentiating what extensions save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.compat.custom_module.branching import Parallel, SumModule
from packprop.compat.own import BackpropExtension, ModuleExtension
from packprop.errors import PackpropError
from tests.compat.module_extensions import Fourth, run
from tests.compat.programs import installed, mlp, near, vectors


@installed
def test_gradients_at_inputs_come_through_the_module_alone() -> None:
    """One input of the sum is computed from the other one."""

    class Watching(ModuleExtension):
        def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
            found.extend([list(g_inp), g_inp[:1], len(g_inp), g_out[0]])

    found: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 5), Parallel(nn.Identity(), nn.Linear(5, 5)), nn.Linear(5, 3))
    x, y = vectors()
    run(model, x, y, BackpropExtension("nothing", {SumModule: Watching()}, fail_mode="SILENT"))
    (left, right), first, count, g_out = found
    near(left, g_out)
    near(right, g_out)
    assert first[0] is left
    assert count == 2


@installed
def test_one_tensor_twice_has_no_gradients_of_its_own() -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum = SumModule()

        def forward(self, x: Tensor) -> Tensor:
            return self.sum(x, x)

    class Watching(ModuleExtension):
        def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
            g_inp[0]

    model, (x, y) = nn.Sequential(nn.Linear(4, 3), Double()), vectors()
    with pytest.raises(PackpropError, match="one tensor enters it more than once"):
        run(model, x, y, BackpropExtension("nothing", {SumModule: Watching()}, fail_mode="SILENT"))


@installed
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_at_inputs_of_a_module_with_several_outputs(used: tuple[int, ...]) -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, x.square()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.several = nn.Linear(4, 3), Several()

        def forward(self, x: Tensor) -> Tensor:
            outputs = self.several(self.first(x))
            return torch.stack([outputs[place] for place in used]).sum(0)

    class Watching(ModuleExtension):
        def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
            near(g_inp[0], 2 * g_out[0] if used == (0,) else 2 * module.input0 * g_out[1])
            found.append(g_inp[0])

    found: list[Any] = []
    x, y = vectors()
    watching = BackpropExtension("nothing", {Several: Watching()}, fail_mode="SILENT")
    if len(used) > 1:
        with pytest.raises(PackpropError, match="depends on 2 of its outputs"):
            run(Model(), x, y, watching)
    else:
        run(Model(), x, y, watching)
        assert len(found) == 1


@installed
def test_values_are_differentiable() -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Fourth(), create_graph=True)
    found = torch.autograd.grad(model[0].weight.fourth.sum(), list(model.parameters()), allow_unused=True)
    rows = []
    for row, label in zip(x.split(1), y.split(1), strict=True):
        loss = F.cross_entropy(model(row), label) / 5
        rows.append(torch.autograd.grad(loss, model[0].weight, create_graph=True)[0])
    total = sum((row**4).sum() for row in rows)
    assert isinstance(total, Tensor)
    expected = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    for value, other in zip(found, expected, strict=True):
        near(value, other)


@installed
def test_values_are_constants_without_create_graph() -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Fourth())
    assert not model[0].weight.fourth.requires_grad
