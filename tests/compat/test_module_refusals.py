"""Modules and extensions that are refused, by errors that say why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor, nn

from packprop.compat.own import BackpropExtension, ModuleExtension
from packprop.errors import PackpropError, PackpropWarning
from packprop.extensions import BatchGrad
from tests.compat.module_extensions import Fourth, LinearSquares, Propagated, run
from tests.compat.programs import installed, mlp, vectors


@installed
def test_a_module_with_a_part_called_output() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(x)

    model, (x, y) = Block(), vectors()
    part = model.output
    run(model, x, y, Fourth())
    assert model.output is part
    assert part.weight.fourth.shape == (3, 4)
    with pytest.raises(PackpropError, match="rename the attribute"):
        run(model, x, y, BackpropExtension("nothing", {Block: ModuleExtension()}, fail_mode="SILENT"))


@installed
def test_a_module_that_is_called_twice() -> None:
    shared = nn.Linear(4, 4)
    model, (x, y) = nn.Sequential(shared, nn.Tanh(), shared), vectors()
    with pytest.raises(PackpropError) as error:
        run(model, x, y % 4, Fourth())
    assert "keeps the tensors of one call" in str(error.value)
    assert "instead: call the module once before backward()" in str(error.value)
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    run(model, x, y % 4, Fourth())  # nothing is asked of the module that is called twice


@installed
def test_a_parameter_of_two_modules() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), vectors()
    model[2].weight = model[0].weight
    with pytest.raises(PackpropError, match="another module has the same parameter"):
        run(model, x, y % 4, Fourth())


@installed
def test_tensors_that_were_changed_in_place() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), vectors()
    with pytest.raises(PackpropError, match="changed in place"):
        run(model, x, y, Fourth())


@installed
def test_fail_modes() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), vectors()
    with pytest.raises(NotImplementedError) as error:
        run(model, x, y, Fourth("ERROR"))
    assert "a module of type CrossEntropyLoss" in str(error.value)
    with pytest.warns(UserWarning, match="no module extension for LayerNorm") as noted:
        run(model, x, y, Fourth("WARNING"))
    assert len([w for w in noted if "module extension" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, x, y, Fourth("SILENT"))
    assert hasattr(model[0].weight, "fourth")
    with pytest.raises(ValueError, match="'SILENT'"):
        Fourth("QUIET")


@installed
def test_what_is_said_of_a_class_is_not_overwritten() -> None:
    extension = Fourth()
    with pytest.raises(ValueError, match="pass overwrite=True"):
        extension.set_module_extension(nn.Linear, LinearSquares())
    other = LinearSquares()
    extension.set_module_extension(nn.Linear, other, overwrite=True)
    assert extension.module_extensions == {nn.Linear: other}


@installed
def test_an_extension_without_a_method() -> None:
    class Incomplete(ModuleExtension):
        pass

    with pytest.raises(NotImplementedError, match="def weight"):
        Incomplete(params=["weight"])
    with pytest.warns(UserWarning, match=r"does not override backpropagate\(\)"):
        Incomplete().backpropagate(Fourth(), nn.Linear(1, 1), (), (), None)


@installed
def test_nothing_was_propagated() -> None:
    class Broken(Propagated):
        def __init__(self) -> None:
            super().__init__()
            del self.module_extensions[nn.Sigmoid]
            self._fail_mode = "SILENT"

    model, (x, y) = mlp(), vectors()
    with pytest.raises(PackpropError, match="nothing was propagated to its output"):
        run(model, x, y, Broken())


@installed
def test_an_extension_that_is_called_itself() -> None:
    class Called(BackpropExtension):
        def __call__(self, module: nn.Module, g_inp: Any, g_out: Any) -> None:
            found[type(module).__name__] = [tuple(x.shape) for x in (module.output, g_out[0])]

    found: dict[str, Any] = {}
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Called("called", {}))
    assert found == {"CrossEntropyLoss": [(), ()], "Linear": [(5, 5)] * 2, "Sigmoid": [(5, 5)] * 2}


@installed
def test_a_loss_that_is_gone() -> None:
    """The last loss module may be a temporary; an earlier one that is gone is an error where needed."""
    from backpack import backpack, extend

    model, (x, y) = extend(mlp()), vectors()
    for extension, refused in ((Propagated(), True), (Fourth(), False)):
        output = model(x)
        loss = extend(nn.CrossEntropyLoss())(output, y) + extend(nn.CrossEntropyLoss())(output, y)
        with backpack(extension):
            if refused:
                with pytest.raises(PackpropError, match="keep it in a variable"):
                    loss.backward()
            else:
                loss.backward()


@installed
def test_extensions_without_columns_say_so() -> None:
    from backpack.extensions import KFAC, BatchGrad

    extension = KFAC(3)
    assert extension.get_num_mc_samples() == 3
    assert extension.expects_backpropagation_quantities()
    assert not BatchGrad().expects_backpropagation_quantities()
    with pytest.raises(NotImplementedError, match="not columns of a root"):
        BatchGrad().seed  # noqa: B018  # asking for it is the test


@installed
def test_two_extensions_for_modules_with_one_attribute() -> None:
    """The last one wins, and a warning names both; an extension that is given twice is one."""
    model, (x, y) = nn.Sequential(nn.Linear(4, 4)), vectors()
    other, same = Fourth("SILENT"), Fourth("SILENT")
    other.savefield = "fourth"
    with pytest.warns(PackpropWarning, match="both saved as 'fourth'"):
        run(model, x, y % 4, other, same)
    own = Fourth("SILENT")
    own.savefield = "grad_batch"
    with pytest.warns(PackpropWarning, match=r"Fourth.* and BatchGrad.* are both saved as 'grad_batch'"):
        run(model, x, y % 4, BatchGrad(), own)
    assert model[0].weight.grad_batch.shape == (len(x), 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, x, y % 4, same, same)
