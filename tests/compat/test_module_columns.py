"""Columns that extensions for single modules get: the same for all modules, in BackPACK's number and order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packprop.compat.own import ModuleExtension, SecondOrderBackpropExtension
from tests.compat.module_extensions import Gate, run
from tests.compat.programs import installed, near, vectors


class GateRows(ModuleExtension):
    """What each column makes of each sample, at a gate."""

    def __init__(self) -> None:
        super().__init__(["weight"])
        self.seen: list[Tensor] = []

    def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
        self.seen.append(columns)
        rows = columns * module.input0
        return rows if extension.savefield.startswith("sqrt") else rows.square().sum((0, 1))


def gated() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Tanh(), nn.Linear(4, 3))


def gram(model: nn.Module, field: str) -> Tensor:
    """All layers against all layers: right only where all columns belong to one draw."""
    rows = torch.cat([getattr(p, field).flatten(2) for p in model.parameters()], 2).flatten(0, 1)
    return rows.T @ rows


@installed
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
@pytest.mark.parametrize("own_generator", [False, True])
def test_one_draw_for_all_layers(loss: nn.Module, own_generator: bool) -> None:
    """A layer with a module extension gets the columns that the other layers get."""
    from backpack import backpack, extend
    from backpack.extensions import KFAC, DiagGGNMC, SqrtGGNMC

    model, (x, y) = extend(gated()), vectors()
    extend(loss)
    target = y if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(5, 3)

    def once(own: bool) -> None:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(8) if own_generator else None
        root, diagonal = SqrtGGNMC(6, generator=generator), DiagGGNMC(6, generator=generator)
        if own:
            root.set_module_extension(Gate, GateRows())
            diagonal.set_module_extension(Gate, GateRows())
        with backpack(KFAC(2), root, diagonal):
            loss(model(x), target).backward()

    once(False)
    expected = gram(model, "sqrt_ggn_mc")
    once(True)
    near(gram(model, "sqrt_ggn_mc").diagonal(), expected.diagonal())
    near(gram(model, "sqrt_ggn_mc"), expected)
    for p in model.parameters():
        near(p.diag_ggn_mc, p.sqrt_ggn_mc.square().sum((0, 1)))


@installed
def test_extensions_of_ones_own_may_draw_too() -> None:
    """Random numbers that a module extension takes change no column of the others."""
    from backpack.extensions import SqrtGGNMC

    class Noisy(GateRows):
        def weight(self, *arguments: Any) -> Tensor:
            torch.randn(3)
            return super().weight(*arguments)

    model, (x, y) = gated(), vectors()
    extension, own = SqrtGGNMC(3), Noisy()
    extension.set_module_extension(Gate, own)
    run(model, x, y, extension)
    hidden = model[1](model[0](x))
    slope = (1 - hidden.tanh().square())[None]
    near(own.seen[0], (model[3].bias.sqrt_ggn_mc @ model[3].weight) * slope)


@installed
def test_a_pass_that_failed_leaves_no_draws() -> None:
    """The next pass through the context makes its own."""
    from backpack import backpack, extend
    from backpack.extensions import SqrtGGNMC

    class Failing(GateRows):
        def weight(self, *arguments: Any) -> Tensor:
            if not self.seen:
                self.seen.append(arguments[-1])
                raise KeyError("of one's own")
            return super().weight(*arguments)

    model, (x, y) = extend(gated()), vectors()
    loss, extension, own = extend(nn.CrossEntropyLoss()), SqrtGGNMC(8), Failing()
    extension.set_module_extension(Gate, own)
    with backpack(extension):
        with pytest.raises(KeyError):
            loss(model(x), y).backward()
        loss(model(x), y).backward()
    failed, made = own.seen
    assert not torch.equal(failed, made)
    hidden = model[1](model[0](x))
    near(made, (model[3].bias.sqrt_ggn_mc @ model[3].weight) * (1 - hidden.tanh().square()))


def softmax_columns(outputs: Tensor) -> Tensor:
    """``sqrt(p_k) (e_k - p)`` at ``[n, c, t]`` over the root of terms, one for each class and position."""
    samples, classes, positions = outputs.shape
    p = outputs.softmax(1)
    columns = torch.zeros(classes, positions, *outputs.shape)
    for entry in range(classes):
        for position in range(positions):
            at = -p[:, :, position].clone()
            at[:, entry] += 1
            columns[entry, position, :, :, position] = at * p[:, entry, position, None].sqrt()
    return columns.flatten(0, 1) / (samples * positions) ** 0.5


@installed
def test_there_is_a_column_for_every_class() -> None:
    """As in BackPACK, whether an extension of the catalogue hands them on or one of one's own asks for them."""
    from backpack.extensions import KFLR, BatchDiagGGNExact, DiagGGNExact, SqrtGGNExact

    kinds = {kind: GateRows() for kind in (DiagGGNExact, SqrtGGNExact, BatchDiagGGNExact, KFLR)}
    extensions = [SecondOrderBackpropExtension("own", {Gate: (alone := GateRows())}, fail_mode="SILENT")]
    for kind, own in kinds.items():
        extensions.append(kind())
        extensions[-1].set_module_extension(Gate, own)
    model, (x, y) = nn.Sequential(nn.Linear(4, 3), Gate(3)), vectors()
    run(model, x, y, *extensions)
    expected = softmax_columns(model(x)[..., None]).squeeze(-1)
    for own in (alone, *kinds.values()):
        near(own.seen[0], expected)


@installed
def test_columns_with_positions_come_class_by_class() -> None:
    """Under cross entropy of ``[n, c, *t]`` in the order of the loss's input, as in BackPACK."""
    from backpack.extensions import SqrtGGNExact

    model, x = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh()), torch.randn(4, 2, 5)
    target = torch.randint(3, (4, 4))
    run(model, x, target, SqrtGGNExact())
    output = model(x)
    columns = softmax_columns(output)
    for number, column in enumerate(columns):
        for sample in range(4):
            (row,) = torch.autograd.grad(output[sample], model[0].weight, column[sample], retain_graph=True)
            near(model[0].weight.sqrt_ggn_exact[number, sample], row)
