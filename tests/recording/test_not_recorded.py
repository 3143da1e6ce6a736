"""Passes that were not recorded, or only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.refusals import batch, check, each_row, network, refused, untouched
from tests.references.running import FIRST_ORDER, SECOND_ORDER, Row
from tests.versions import needs_unwrapping


def warned(loss: Tensor, row: Row, model: nn.Module) -> None:
    """One warning that says what to do, and a plain backward pass."""
    attributes = {name: set(vars(p)) for name, p in model.named_parameters()}
    expects = pytest.warns(packprop.PackpropWarning, match=r"extend\(model\) first")
    with expects as caught, packprop.backpack(row()):
        loss.backward(retain_graph=True)
    assert len(caught) == 1
    assert attributes == {name: set(vars(p)) for name, p in model.named_parameters()}
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@each_row
def test_a_model_that_was_never_extended(row: Row) -> None:
    model = network()
    x, y = batch()
    warned(packprop.extend(nn.CrossEntropyLoss())(model(x), y), row, model)


@each_row
def test_a_model_that_was_extended_after_its_forward_pass(row: Row) -> None:
    model = network()
    x, y = batch()
    out = model(x)
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, row(), model=model), "'0.weight'", "extend(")


@each_row
def test_a_forward_pass_under_disable(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.disable():
        out = model(x)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, row(), model=model), "'0.weight'", "disable()")


def test_a_pass_to_inputs_that_no_extended_parameter_is_among() -> None:
    """What is asked of the parameters of another model is none of the extended one's business."""
    model, other = packprop.extend(network()), network()
    x, y = batch()
    with packprop.disable():
        loss = F.cross_entropy(model(x) + other(x), y)
    expects = pytest.warns(packprop.PackpropWarning, match=r"extend\(model\) first")
    with expects, packprop.backpack(extensions.BatchGrad()):
        loss.backward(inputs=list(other.parameters()))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


@pytest.mark.filterwarnings("error")
def test_an_extended_model_that_is_held_constant() -> None:
    """A pass through it to what is not extended, as in the other half of an adversarial step."""
    model = packprop.extend(network().requires_grad_(False))
    x, y = batch()
    shift = torch.zeros(3, requires_grad=True)
    with packprop.disable():
        loss = F.cross_entropy(model(x + shift), y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    torch.testing.assert_close(shift.grad, torch.autograd.grad(F.cross_entropy(model(x + shift), y), shift)[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("extended", [True, False])
def test_a_penalty_alone(extended: bool) -> None:
    """Its backward pass is plain, and leaves what the data's pass has computed."""
    model = network()
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad()):
        if extended:
            packprop.extend(model)
            packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        before = [p.grad_batch.sum(0) if extended else 0 for p in model.parameters()]
        sum((p**2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]  # sum() may be 0
    for p, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, gradient + 2 * p.detach())
        assert hasattr(p, "grad_batch") == extended


def test_a_penalty_alone_whose_constants_may_hold_samples() -> None:
    """The graph does not tell them from samples."""
    model = packprop.extend(network())
    x, _ = batch()
    penalty = (model[0].weight @ x.T).square().sum()
    check(refused(penalty, extensions.BatchGrad(), model=model), "'0.weight'", "penalty", "outside of `with")


@pytest.mark.filterwarnings("error")
def test_a_frozen_model_whose_inputs_are_differentiated() -> None:
    model = packprop.extend(network().requires_grad_(False))
    x, y = batch()
    x.requires_grad_(True)
    with packprop.backpack(extensions.DiagGGNExact()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    torch.testing.assert_close(x.grad, expected)


def ensemble(model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """Stacked parameters of three members, and what they make of a batch together."""
    members = [network() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(members)  # type: ignore[arg-type]  # any sequence does

    def call(own: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, (own, buffers), (x,))
        return out

    x, _ = batch()
    return parameters, torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)


@needs_unwrapping
@each_row
def test_an_ensemble_by_vmap(row: Row) -> None:
    """An extended model inside a transform is refused by name, with gradients untouched."""
    model = packprop.extend(network())
    parameters, outs = ensemble(model)
    loss = packprop.extend(nn.CrossEntropyLoss())
    root = torch.stack([loss(out, batch()[1]) for out in outs]).sum()
    with pytest.raises(PackpropError, match="vmap") as refusal, packprop.backpack(row()):
        root.backward()
    assert "Sequential" in refusal.value.where
    assert all(p.grad is None for p in parameters.values())


def test_an_ensemble_by_vmap_of_a_model_that_is_not_extended() -> None:
    """Nothing shows the transform, but a loss was recorded, and no use of what it is differentiated in."""
    with packprop.record():
        parameters, outs = ensemble(network())
        root = torch.stack([F.cross_entropy(out, batch()[1]) for out in outs]).sum()
    with pytest.warns(packprop.PackpropWarning, match="vmap"), packprop.backpack(extensions.BatchGrad()):
        root.backward()
    assert all(p.grad is not None for p in parameters.values())


@pytest.mark.filterwarnings("error")
def test_a_teacher_inside_a_transform() -> None:
    """What needs no gradient may run wherever it likes."""
    teacher, model = packprop.extend(network()), packprop.extend(network())
    x, _ = batch()
    with torch.no_grad():
        targets = torch.vmap(teacher)(x)
    slopes = torch.func.grad(lambda x: teacher(x).sum())(x)
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.MSELoss())(model(x), targets + slopes.detach().mean()).backward()
    assert all(hasattr(p, "grad_batch") for p in model.parameters())


def test_a_part_of_the_forward_pass_under_disable() -> None:
    model = packprop.extend(network())
    x, y = batch()
    hidden = model[0](x)
    with packprop.disable():
        out = model[2](model[1](hidden))
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, extensions.BatchGrad(), model=model), "disable()")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_was_not_recorded(row: Row) -> None:
    """Curvature needs the loss; gradients do not."""
    model = packprop.extend(network())
    x, y = batch()
    check(refused(F.cross_entropy(model(x), y), row(), model=model), "loss", "extend", "record()")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_module_that_was_not_extended(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    error = refused(nn.CrossEntropyLoss()(model(x), y), row(), model=model)
    check(error, "loss", "extend", "record()")


@pytest.mark.parametrize("row", FIRST_ORDER, ids=lambda row: row.name)
def test_gradients_need_no_recorded_loss(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(row()):
        F.cross_entropy(model(x), y).backward()
    assert all(hasattr(p, row.attribute) for p in model.parameters())


def test_a_backward_pass_outside_the_context_saves_nothing() -> None:
    model = packprop.extend(network())
    verify = untouched(model)
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        pass
    loss.backward()
    verify()


@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(lambda m: sum(p.square().sum() for p in m.parameters()), id="all"),
        pytest.param(lambda m: m[0].weight.norm(), id="one"),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["inside-record", "outside"])
@each_row
def test_weight_decay_in_the_loss(row: Row, penalty: Any, inside: bool) -> None:
    """A term that belongs to no sample: the quantity is there, and the gradient has both terms."""
    model = packprop.extend(network())
    x, y = batch()
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(row()):
        if inside:
            with packprop.record():
                loss = loss_function(model(x), y) + 0.1 * penalty(model)
        else:
            loss = loss_function(model(x), y) + 0.1 * penalty(model)
        loss.backward()
    with packprop.disable():
        whole = F.cross_entropy(model(x), y) + 0.1 * penalty(model)
    for p, expected in zip(
        model.parameters(), torch.autograd.grad(whole, list(model.parameters())), strict=True
    ):
        assert hasattr(p, row.attribute)
        torch.testing.assert_close(p.grad, expected)


def test_a_use_outside_of_the_forward_pass() -> None:
    model = packprop.extend(network())
    x, y = batch()
    out = F.linear(model[1](model[0](x)), model[2].weight)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, extensions.BatchGrad(), model=model), "record()", "weight")
