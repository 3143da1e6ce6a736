"""Extensions of one's own for single modules: what they see and return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.compat.custom_module.branching import SumModule
from packprop.compat.own import ModuleExtension, SecondOrderBackpropExtension
from tests.compat.module_extensions import (
    Fourth,
    Gate,
    GateGradients,
    Propagated,
    fourth_powers,
    gradient,
    run,
)
from tests.compat.programs import dense_ggn, flat, installed, mlp, near, softmax_hessian, vectors


@installed
@pytest.mark.parametrize("chosen", [None, [3, 1]])
def test_an_extension_of_ones_own(chosen: list[int] | None) -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Fourth(subsampling=chosen), packprop.extensions.BatchL2Grad())
    expected = fourth_powers(model, x, y, chosen or list(range(5)))
    for p, value in zip(model.parameters(), expected, strict=True):
        near(p.fourth, value)
        assert p.batch_l2.shape == (5,)
    near(flat(p.grad for p in model.parameters()), flat(gradient(model, x, y)))


@installed
def test_what_a_module_extension_sees() -> None:
    model, (x, y) = mlp(), vectors()
    own = Fourth()
    run(model, x, y, own)
    hidden = model[1](model[0](x))
    output = model[2](hidden)
    slopes = torch.autograd.grad(F.cross_entropy(output, y), [hidden, output])
    (module, given, made, g_inp, g_out), (first, first_given, *_) = own.of_linear.seen
    assert module is model[2]
    assert first is model[0]
    assert first_given is x
    near(given, hidden)
    near(made, output)
    near(g_inp, slopes[0])
    near(g_out, slopes[1])
    assert own.of_linear.seen[1][3] is None  # the data need no gradient


@installed
def test_module_extensions_replace_values_of_the_catalogue() -> None:
    from backpack.extensions import BatchGrad

    class Wrong(GateGradients):
        def weight(self, *arguments: Any) -> Tensor:
            return super().weight(*arguments) + 1

    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Linear(4, 3)), vectors()
    run(model, x, y, BatchGrad())
    expected = [p.grad_batch for p in model.parameters()]
    at_hook = {}
    for own in (GateGradients(), Wrong()):
        extension = BatchGrad()
        extension.set_module_extension(Gate, own)
        run(
            model, x, y, extension, hook=lambda m: at_hook.update({id(p): p.grad_batch for p in m.parameters()})
        )
        for p, value in zip(model.parameters(), expected, strict=True):
            near(p.grad_batch, value + (1 if p is model[1].weight and isinstance(own, Wrong) else 0))
            assert at_hook[id(p)] is p.grad_batch


@installed
def test_an_input_that_is_none_hides_no_input_behind_it() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, mask: None, y: Tensor) -> Tensor:
            return x + y

    class Branches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            left, right, joined = self
            out: Tensor = joined(left(x), None, right(x))
            return out

    model = Branches(nn.Linear(4, 3), nn.Linear(4, 3), Joined())
    (x, y), extension = vectors(), Propagated()
    extension.set_module_extension(Joined, extension.module_extensions[SumModule])
    run(model, x, y, extension)
    near(model[0].weight.propagated, model[1].weight.propagated)


@installed
def test_a_hook_that_deletes_what_it_read() -> None:
    from backpack.extensions import BatchGrad

    extension = BatchGrad()
    extension.set_module_extension(Gate, GateGradients())
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Linear(4, 3)), vectors()

    def drop(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            del p.grad_batch

    run(model, x, y, extension, hook=drop)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


@installed
def test_columns_at_a_module() -> None:
    """An extension of the catalogue hands on its columns; one that knows no loss gets those of the GGN."""
    from backpack.extensions import DiagGGNExact

    class GateDiagonal(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(["weight"])

        def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
            shapes.append(columns.shape)
            return (columns * module.input0).square().sum((0, 1))

    shapes: list[torch.Size] = []
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Tanh(), nn.Linear(4, 3)), vectors()
    extension = DiagGGNExact()
    extension.set_module_extension(Gate, GateDiagonal())
    own = SecondOrderBackpropExtension("own_diagonal", {Gate: GateDiagonal()}, fail_mode="SILENT")
    run(model, x, y, extension, own)
    expected = dense_ggn(model, x, softmax_hessian).diagonal() / 5
    near(flat(p.diag_ggn_exact for p in model.parameters()), expected)
    near(model[1].weight.own_diagonal, model[1].weight.diag_ggn_exact)
    assert shapes == [torch.Size([3, 5, 4])] * 2


@installed
def test_columns_of_some_samples() -> None:
    from backpack.extensions import SqrtGGNExact

    class Rows(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(["weight"])

        def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
            return columns * module.input0[extension.get_subsampling()]

    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Linear(4, 3)), vectors()
    run(model, x, y, packprop.extensions.SqrtGGNExact(subsampling=[4, 0]))
    expected = model[1].weight.sqrt_ggn_exact
    extension = SqrtGGNExact(subsampling=[4, 0])
    extension.set_module_extension(Gate, Rows())
    run(model, x, y, extension)
    near(model[1].weight.sqrt_ggn_exact, expected)
    assert expected.shape == (3, 2, 4)
