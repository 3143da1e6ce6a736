"""Modules that stand for functions: branching, padding, permuting and others."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packprop
from packprop.compat.custom_module.branching import Branch, Parallel, SumModule
from packprop.compat.custom_module.pad import Pad
from packprop.compat.custom_module.permute import Permute
from packprop.compat.custom_module.reduce_tuple import ReduceTuple
from packprop.compat.custom_module.scale_module import ScaleModule
from packprop.compat.custom_module.slicing import Slicing
from packprop.errors import BadInput
from tests.compat.programs import dense_ggn, flat, near, softmax_hessian


def test_modules_for_functions() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(Slicing((slice(None), slice(1, None), 0))(x), x[:, 1:, 0])
    assert torch.equal(Pad([1, 2], value=3.0)(x), F.pad(x, [1, 2], value=3.0))
    assert torch.equal(Pad((1, 1), mode="reflect")(x), F.pad(x, (1, 1), mode="reflect"))
    assert torch.equal(Permute(0, 2, 1)(x), x.permute(0, 2, 1))
    assert torch.equal(Permute(1, 2, init_transpose=True)(x), x.transpose(1, 2))
    assert ReduceTuple(1)((1, x)) is x
    assert torch.equal(ScaleModule(2.0)(x), 2 * x)
    assert torch.equal(SumModule()(x, x, x), 3 * x)
    left, right = Branch(nn.Tanh(), nn.ReLU())(x)
    assert torch.equal(left, x.tanh())
    assert torch.equal(right, x.relu())
    assert torch.equal(Parallel(nn.Tanh(), nn.ReLU())(x), x.tanh() + x.relu())
    named = OrderedDict(left=nn.Tanh(), right=nn.ReLU())
    assert list(Parallel(named).branch._modules) == ["left", "right"]
    product = Parallel(nn.Tanh(), nn.ReLU(), merge_module=nn.Bilinear(4, 4, 2))(x)
    assert product.shape == (2, 3, 2)


def test_modules_for_functions_refuse() -> None:
    with pytest.raises(BadInput, match="give a number"):
        ScaleModule("2")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(BadInput, match="bring all branches to one shape"):
        SumModule()(torch.ones(2), torch.ones(3))
    with pytest.raises(BadInput, match="tensors of equal shape"):
        SumModule()()


def test_modules_for_functions_are_seen_through() -> None:
    model = nn.Sequential(
        Pad((1, 1, 1, 1)),
        nn.Conv2d(1, 2, 3),
        Parallel(nn.Identity(), nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Sigmoid(), ScaleModule(0.3))),
        Permute(0, 2, 3, 1),
        Slicing((slice(None), slice(1, 4))),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    x, y = torch.randn(3, 1, 4, 4), torch.tensor([0, 2, 1])
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with packprop.backpack(packprop.extensions.DiagGGNExact()):
        loss.backward()
    near(
        flat(p.diag_ggn_exact for p in model.parameters()),
        dense_ggn(model, x, softmax_hessian).diagonal() / 3,
    )
