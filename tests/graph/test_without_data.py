"""Tensors that samples cannot be found in: those without data, and rows of several lengths in one tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from packprop.types import Extension
from tests.references.refusals import batch, check, network

MAKERS = [extensions.BatchGrad, extensions.DiagGGNExact, extensions.KFAC, extensions.HMP]


@pytest.mark.parametrize("make", MAKERS)
def test_meta_tensors_are_refused(make: Callable[[], Extension]) -> None:
    model, loss = packprop.extend(network().to("meta")), packprop.extend(nn.CrossEntropyLoss())
    x, y = (each.to("meta") for each in batch())
    value = loss(model(x), y)
    with pytest.raises(PackpropError) as error, packprop.backpack(make()):
        value.backward()
    check(error.value, "parameter '", "meta device", "packprop.plan")


def test_coverage_of_meta_tensors_says_why_not() -> None:
    assert "meta device" in " ".join(
        str(packprop.coverage(network().to("meta"), batch()[0].to("meta"))).split()
    )


def test_nested_tensors_without_a_shape() -> None:
    """Forward and backward pass are what they are without packprop; there is nothing more."""
    rows = torch.nested.nested_tensor([torch.randn(3, 3), torch.randn(5, 3)])
    model = network()
    expected = torch.autograd.grad(model(rows).to_padded_tensor(0.0).sum(), [*model.parameters()])
    packprop.extend(model)
    value = model(rows).to_padded_tensor(0.0).sum()
    with pytest.raises(PackpropError) as error, packprop.backpack(extensions.BatchGrad()):
        value.backward()
    check(error.value, "nested tensor", "mask")
    value.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        assert not hasattr(parameter, "grad_batch")


def test_nested_inputs_of_a_layer() -> None:
    """A layer with nothing before it takes them as a constant without a shape."""
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    layer = packprop.extend(nn.Linear(3, 2))
    scores = torch.stack([each.sum(0) for each in layer(rows).unbind()])
    value = nn.functional.cross_entropy(scores, torch.tensor([0, 1]))
    with pytest.raises(PackpropError) as error, packprop.backpack(extensions.BatchGrad()):
        value.backward()
    check(error.value, "nested tensor", "mask")


@pytest.mark.parametrize("read", [lambda out: out.values(), lambda out: out.to_padded_tensor(0.0).mean(1)])
def test_nested_tensors_are_refused(read: Callable[[Tensor], Tensor]) -> None:
    """The lengths of their rows have no numbers."""
    rows = torch.nested.nested_tensor([torch.randn(3, 3), torch.randn(5, 3)], layout=torch.jagged)
    model, loss = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    scores = read(model(rows))
    value = loss(scores, torch.zeros(len(scores), dtype=torch.long))
    with pytest.raises(PackpropError) as error, packprop.backpack(extensions.BatchGrad()):
        value.backward()
    check(error.value, "linear of '0.weight'", "nested", "mask")
