"""Curvature of losses that take what a function before them has made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packprop
from packprop.extensions import DiagGGNExact


def test_a_softmax_over_another_axis_than_the_classes_is_none() -> None:
    """The axis of classes is told from numbers that are constant along it, also if it is as long as others."""
    torch.manual_seed(0)
    model, x = packprop.extend(nn.Linear(3, 16)).double(), torch.randn(5, 3).double()
    y = torch.randint(4, (5, 4))
    with packprop.backpack(DiagGGNExact()):
        F.nll_loss(model(x).view(5, 4, 4).log_softmax(2).transpose(1, 2), y).backward()
    found = model.weight.diag_ggn_exact
    with packprop.backpack(DiagGGNExact()):
        F.cross_entropy(model(x).view(5, 4, 4).transpose(1, 2), y).backward()
    torch.testing.assert_close(found, model.weight.diag_ggn_exact)
    loss = F.nll_loss(model(x).view(5, 4, 4).log_softmax(1).transpose(1, 2), y)
    with packprop.backpack(DiagGGNExact()), pytest.raises(packprop.PackpropError, match="no log_softmax over"):
        loss.backward()
