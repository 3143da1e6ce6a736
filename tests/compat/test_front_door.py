"""The functions of BackPACK at the top: extensions, contexts, options."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.compat.custom_module.scale_module import ScaleModule
from packprop.engine.recording.switch import is_extended
from tests.compat.module_extensions import Fourth
from tests.compat.programs import (
    convolutional,
    dense_ggn,
    flat,
    images,
    installed,
    mlp,
    near,
    softmax_hessian,
    vectors,
)
from tests.references.running import assert_near, rows_of_terms


@installed
def test_extensions_are_those_of_packprop() -> None:
    from backpack import BackpropExtension as Base
    from backpack.extensions import BatchGrad, DiagGGNMC, SqrtGGNMC

    extension = BatchGrad([2, 0])
    assert isinstance(extension, Base)
    assert isinstance(extension, packprop.extensions.BatchGrad)
    assert extension.savefield == "grad_batch"
    assert extension.get_subsampling() == [2, 0]
    assert DiagGGNMC(mc_samples=7).get_num_mc_samples() == 7
    assert SqrtGGNMC(2, [1]).get_subsampling() == [1]
    again = pickle.loads(pickle.dumps(extension))
    assert type(again) is BatchGrad
    assert again.subsampling == [2, 0]


@installed
@pytest.mark.parametrize("wrong", [Fourth, packprop.extensions.BatchGrad, "BatchGrad"])
def test_what_is_no_extension(wrong: Any) -> None:
    from backpack import backpack

    with pytest.raises(ValueError, match="instead:"):
        backpack(wrong)


@installed
def test_what_is_in_force() -> None:
    from backpack import backpack, extend
    from backpack.context import CTX
    from backpack.extensions import BatchGrad, Variance

    assert CTX.get_active_exts() == ()
    assert CTX.get_extension_hook()(None) is None
    extension, hook = BatchGrad(), lambda module: None
    model, (x, y) = extend(mlp()), vectors()
    loss = F.cross_entropy(model(x), y)
    with backpack(extension, Fourth(), extension_hook=hook, debug=True, retain_graph=True):
        assert CTX.get_active_exts()[0] is extension
        assert CTX.is_extension_active(BatchGrad)
        assert CTX.is_extension_active(Fourth, Variance)
        assert not CTX.is_extension_active(Variance)
        assert CTX.get_extension_hook() is hook
        assert CTX.get_debug()
        assert CTX.get_retain_graph()
        loss.backward()
    assert not CTX.get_debug()
    CTX.remove_hooks()
    assert not is_extended(model)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


@installed
def test_disable() -> None:
    from backpack import backpack, disable, extend
    from backpack.extensions import BatchGrad

    Fourth()
    model, (x, y) = extend(mlp()), vectors()
    switch = disable()
    with switch:
        with switch:  # one object, entered twice
            pass
        assert not disable.should_store_io()
    assert disable.should_store_io()
    for _ in range(2):
        with switch:
            assert not disable.should_store_io()
            loss = F.cross_entropy(model(x), y)
    assert disable.should_store_io()
    assert not hasattr(model[0], "output")
    terms = F.cross_entropy(model(x), y, reduction="none") / len(x)
    expected = rows_of_terms(terms, model.parameters())
    with backpack(BatchGrad()):
        loss.backward()
    for parameter, rows in zip(model.parameters(), expected, strict=True):
        assert_near(parameter.grad_batch, rows, "rows")


@installed
def test_nothing_needs_to_be_converted() -> None:
    from backpack import backpack, convert_module_to_backpack, extend
    from backpack.custom_module.graph_utils import BackpackTracer
    from backpack.extensions import DiagGGNExact

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), ScaleModule(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.scale(self.inner(x).tanh()))

    model, (x, y) = Residual(), vectors()
    assert convert_module_to_backpack(model, False) is model
    assert extend(model, False, True) is model
    with backpack(DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    near(
        flat(p.diag_ggn_exact for p in model.parameters()),
        dense_ggn(model, x, softmax_hessian).diagonal() / 5,
    )
    nodes = [node.target for node in BackpackTracer().trace(model).nodes if node.op == "call_module"]
    assert nodes == ["inner", "scale", "head"]


@installed
def test_the_choice_for_convolutions() -> None:
    from backpack import backpack, extend
    from backpack.core.derivatives.convnd import weight_jac_t_save_memory
    from backpack.extensions import BatchGrad

    model, (x, y) = extend(convolutional()), images()
    found = []
    for save in (True, False):
        with weight_jac_t_save_memory(save_memory=save):
            assert weight_jac_t_save_memory.is_saving() is save
            with backpack(BatchGrad()):
                F.cross_entropy(model(x), y).backward()
        found.append(flat(p.grad_batch for p in model.parameters()))
    assert not weight_jac_t_save_memory.is_saving()
    near(*found)
    saving = weight_jac_t_save_memory()
    with saving:
        with saving:
            pass
        assert weight_jac_t_save_memory.is_saving()
    assert not weight_jac_t_save_memory.is_saving()


@installed
def test_options() -> None:
    from backpack.extensions.curvature import Curvature, ResidualModifications
    from backpack.extensions.secondorder.hbp import BackpropStrategy, ExpectationApproximation
    from backpack.extensions.secondorder.hbp.hbp_options import LossHessianStrategy

    assert [Curvature.HESSIAN, Curvature.GGN, Curvature.PCH_CLIP, Curvature.PCH_ABS] == Curvature.CHOICES
    assert Curvature.CHOICES == ["hessian", "ggn", "pch-clip", "pch-abs"]
    residual = torch.tensor([-2.0, 3.0])
    assert ResidualModifications.nothing(residual) is residual
    assert ResidualModifications.to_zero(residual) is None
    near(ResidualModifications.remove_negative_values(residual), torch.tensor([0.0, 3.0]))
    near(ResidualModifications.to_abs(residual), torch.tensor([2.0, 3.0]))
    assert BackpropStrategy.CHOICES == [BackpropStrategy.BATCH_AVERAGE, BackpropStrategy.SQRT]
    assert ExpectationApproximation.CHOICES == ["E[J^T E(H) J]", ExpectationApproximation.CHEN]
    assert LossHessianStrategy.CHOICES == ["exact", "sampling", "sum"]
