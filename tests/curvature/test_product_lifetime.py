"""Products after the pass: while the values are those of the pass, and refused once they have changed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.curvature import products
from packprop.errors import PackpropError
from tests.cases import BY_NAME
from tests.references.running import assert_near, backward
from tests.selection import one_in, thorough


def test_products_outlive_the_pass_and_others() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.weight"]
    vectors = torch.randn(2, *weight.shape, dtype=torch.float64)
    first, kept = weight.hmp(vectors), weight.hmp
    backward(problem, extensions.HMP(), extensions.BatchGrad())
    problem.total().backward()
    assert torch.equal(kept(vectors), first)
    assert weight.hmp is not kept


def test_dropout_is_that_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Dropout(), nn.Linear(20, 2)))
    lossfunc = packprop.extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    weight = model[0].weight
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    vector = torch.randn_like(weight)
    (expected,) = torch.autograd.grad(slope, weight, vector, retain_graph=True)
    with packprop.backpack(extensions.HMP()):
        loss.backward()
    assert_near(weight.hmp(vector), expected, "hmp", 1e-6)


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_old_values_are_refused(make: Any) -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    asked = make()
    backward(problem, asked)
    weight = problem.parameters["0.weight"]
    product = getattr(weight, asked.savefield)
    with torch.no_grad():
        problem.parameters["4.weight"].add_(1.0)
    with pytest.raises(PackpropError, match="changed in place"):
        product(torch.zeros_like(weight))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_parameters_that_share_memory_are_told_apart(make: Any) -> None:
    """Recurrent layers on a GPU keep all weights in one piece of memory, and so do some optimizers."""
    problem = BY_NAME["linear-deep"].problem(3)
    flat = torch.cat([p.detach().flatten() for p in problem.parameters.values()])
    for p, part in zip(
        problem.parameters.values(), flat.split([p.numel() for p in problem.parameters.values()]), strict=True
    ):
        p.data = part.view_as(p)
    backward(problem, make())
    upstream, weight = (problem.parameters[name] for name in ("0.weight", "4.weight"))
    products = [getattr(each, make().savefield) for each in (upstream, weight)]
    upstream.data.add_(1.0)
    products[1](torch.zeros_like(weight))
    weight.data.add_(1.0)
    with pytest.raises(PackpropError, match="changed in place"):
        products[0](torch.zeros_like(upstream))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_values_that_were_put_elsewhere_are_refused(make: Any) -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    problem.parameters["4.weight"].data = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(PackpropError, match="changed in place"):
        getattr(weight, make().savefield)(torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_a_step_through_data_is_refused(make: Any, frozen: bool) -> None:
    """Programs for the older library step through ``parameter.data``: PyTorch counts no change then."""
    problem = BY_NAME["linear-deep"].problem(3)
    changed = problem.parameters["4.weight"].requires_grad_(not frozen)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    product = getattr(weight, make().savefield)
    product(torch.zeros_like(weight))
    changed.data.add_(1e-3)
    with pytest.raises(PackpropError, match="changed in place"):
        product(torch.zeros_like(weight))


def test_an_optimizer_step_and_a_change_of_the_inputs_are_refused() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.weight"]
    problem.inputs.mul_(2)
    with pytest.raises(PackpropError, match="inputs or other tensors") as caught:
        weight.hmp(torch.ones_like(weight))
    assert caught.value.where == "parameter '0.weight'"
    backward(problem, extensions.HMP())
    weight.hmp(torch.ones_like(weight))
    torch.optim.SGD(problem.model.parameters(), lr=0.1).step()
    with pytest.raises(PackpropError, match="parameters were changed in place"):
        weight.hmp(torch.ones_like(weight))


def test_nothing_is_zero_in_inference_mode() -> None:
    """PyTorch records no graph there, so that second derivatives would be zero, then and later."""
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight, outputs = problem.parameters["0.weight"], problem.model(problem.inputs)
    known = products.hvp(problem.total(), [weight], [torch.ones_like(weight)])[0]
    loss = problem.total()
    for asked, call in (
        (extensions.HMP(), lambda: weight.hmp(torch.ones_like(weight))),
        (extensions.HMP(), lambda: products.jvp(outputs, [weight], [torch.ones_like(weight)])),
        (extensions.DiagHessian(), loss.backward),
        (extensions.BatchDiagHessian(), loss.backward),
    ):
        refused = pytest.raises(PackpropError, match=r"torch\.inference_mode")
        with refused, packprop.backpack(asked), torch.inference_mode():
            call()
    assert_near(weight.hmp(torch.ones_like(weight)), known, "hmp")


def stepping_models() -> list[Any]:
    layers = {
        "linear": [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)],
        "normalised": [
            nn.Linear(3, 4),
            nn.LayerNorm(4),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4).eval(),
            nn.Linear(4, 2),
        ],
        "convolution": [
            nn.Unflatten(1, (1, 3)),
            nn.Conv1d(1, 2, 2),
            nn.Tanh(),
            nn.GroupNorm(1, 2),
            nn.Conv1d(2, 2, 1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ],
        "weight norm": [
            nn.Linear(3, 4),
            nn.Tanh(),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            nn.Linear(4, 2),
        ],
    }
    return [pytest.param(value, id=key) for key, value in layers.items()]


@one_in(2)
@pytest.mark.parametrize("layers", stepping_models()[:3])
@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_each_parameter_is_stepped_after_its_product(make: Any, layers: list[nn.Module]) -> None:
    """As conjugate gradients do, block by block: what a block's product reads lies downstream of it."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(*layers).double())
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(5, 3).double()), torch.randint(2, (5,)))
    with packprop.backpack(make()):
        loss.backward(retain_graph=True)
    parameters = list(model.parameters())
    vectors = [torch.randn(2, *p.shape).double() for p in parameters]
    field = make().savefield
    expected = [getattr(p, field)(v) for p, v in zip(parameters, vectors, strict=True)]
    with packprop.backpack(make()):
        loss.backward(retain_graph=True)
    for p, v, right in zip(parameters, vectors, expected, strict=True):
        assert_near(getattr(p, field)(v), right, "product")
        assert_near(getattr(p, field)(v), right, "again")
        p.data.add_(torch.randn_like(p))
    with pytest.raises(PackpropError, match="changed in place"):
        getattr(parameters[0], field)(vectors[0])


@thorough
@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_every_parameter_that_is_read_is_noticed(make: Any) -> None:
    """A product either is what it was, or is refused: after any change of any one parameter."""
    for param in stepping_models():
        torch.manual_seed(0)
        model = packprop.extend(nn.Sequential(*param.values[0]).double())
        loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(5, 3).double()), torch.randint(2, (5,)))
        parameters = [p for name, p in model.named_parameters() if "parametrizations" not in name]
        for changed in model.parameters():
            with packprop.backpack(make()):
                loss.backward(retain_graph=True)
            vectors = [torch.randn(2, *p.shape).double() for p in parameters]
            field = make().savefield
            before = changed.detach().clone()
            expected = [getattr(p, field)(v) for p, v in zip(parameters, vectors, strict=True)]
            with packprop.backpack(make()):
                loss.backward(retain_graph=True)
            changed.data.add_(torch.randn_like(changed))
            for p, v, right in zip(parameters, vectors, expected, strict=True):
                try:
                    found = getattr(p, field)(v)
                except PackpropError as error:
                    assert "changed in place" in error.why  # noqa: PT017  # the other right way
                else:
                    assert_near(found, right, "product")
            changed.data.copy_(before)


def test_a_model_with_products_says_why_it_cannot_be_pickled() -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    loss = packprop.extend(nn.MSELoss())(model(torch.ones(3, 2)), torch.zeros(3, 1))
    with packprop.backpack(extensions.HMP()):
        loss.backward()
    packprop.restore(model)
    with pytest.raises(PackpropError, match=r"del parameter\.hmp"):
        pickle.dumps(model)
    for parameter in model.parameters():
        del parameter.hmp
    assert pickle.loads(pickle.dumps(model)) is not model
