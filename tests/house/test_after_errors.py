"""After any error the next pass is as good as the first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.refusals import batch, network, refused
from tests.references.running import assert_near


def test_an_error_is_followed_by_a_good_pass() -> None:
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    refused(model(x).square().sum(), extensions.DiagGGNExact(), model=model)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss_function(model(x), y).backward()
    for parameter in model.parameters():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, "rows", 1e-5)


def test_results_of_an_earlier_pass_do_not_outlive_an_error() -> None:
    """A refused pass leaves the results of the last good one as they are."""
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(extensions.DiagGGNExact()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    before = {k: p.diag_ggn_exact.clone() for k, p in model.named_parameters()}
    with pytest.raises(PackpropError), packprop.backpack(extensions.DiagGGNExact()):
        model(2 * x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.diag_ggn_exact, before[name])


def test_errors_pickle() -> None:
    """Errors are sent between processes, by data loaders and test runners."""
    import pickle

    with pytest.raises(PackpropError) as caught:
        packprop.extend(nn.Linear)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)
