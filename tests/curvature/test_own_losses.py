"""Curvature of losses of the user's own belongs to the one call that the user made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import assert_near

CURVATURES = [
    extensions.DiagGGNExact(),
    extensions.KFLR(),
    extensions.GGNMP(),
    extensions.DiagHessian(),
    extensions.HMP(),
    extensions.BatchDiagGGNExact(),
]


class Masked(nn.Module):
    """A loss that draws a mask, counts its calls in a buffer that it multiplies by, and has a hook inside."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.masks: list[Tensor] = []
        self.fired = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        self.masks.append((torch.rand_like(x) < 0.5).to(x.dtype))
        difference = x - y
        if difference.requires_grad:
            difference.register_hook(self._seen)
        return (self.masks[-1] * self.count.clone() * torch.cosh(difference)).sum()

    def _seen(self, gradient: Tensor) -> None:
        self.fired += 1


@pytest.mark.parametrize("asked", CURVATURES, ids=lambda each: type(each).__name__)
def test_a_loss_is_called_once(asked: Any) -> None:
    torch.manual_seed(0)
    model, loss = packprop.extend(nn.Linear(3, 2).double()), packprop.extend(Masked())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    loss(model(x), y)  # the mask of this call has no part in what follows
    state = torch.get_rng_state()
    value = loss(model(x), y)
    after = torch.get_rng_state()
    assert not torch.equal(state, after)
    with packprop.backpack(asked):
        value.backward()
    assert (len(loss.masks), float(loss.count), loss.fired) == (2, 2.0, 1)
    assert torch.equal(torch.get_rng_state(), after)
    slope = (2 * loss.masks[-1] * torch.cosh(model(x) - y)).detach()  # [n, c], the second derivative
    blocks = torch.einsum("nc,ni,nj->cij", slope, x, x)
    weight = model.weight
    if isinstance(asked, extensions.DiagGGNExact | extensions.DiagHessian):
        name = "diag_h" if isinstance(asked, extensions.DiagHessian) else "diag_ggn_exact"
        assert_near(getattr(weight, name), blocks.diagonal(dim1=1, dim2=2), name)
    elif isinstance(asked, extensions.BatchDiagGGNExact):
        assert_near(weight.diag_ggn_exact_batch, torch.einsum("nc,ni->nci", slope, x**2), "rows")
    elif isinstance(asked, extensions.KFLR):
        assert_near(weight.kflr[0].diagonal(), slope.sum(0), "the factor of the outputs")
    else:
        product = weight.ggnmp if isinstance(asked, extensions.GGNMP) else weight.hmp
        vector = torch.randn(1, *weight.shape).double()
        assert_near(product(vector)[0], torch.einsum("cij,cj->ci", blocks, vector[0]), "product")
    assert len(loss.masks) == 2


class OwnEntropy(nn.Module):
    """Cross entropy in operations that keep the precision of the input."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.sign * -x.log_softmax(1).gather(1, y[:, None]).mean()


@pytest.mark.parametrize("classes", [5, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype, classes: int) -> None:
    """Values have the precision of the loss; a Hessian is not refused for its rounding, but for its sign."""

    def diagonal(model: nn.Linear, sign: float = 1.0) -> Tensor:
        like = model.weight.dtype
        with packprop.backpack(extensions.DiagGGNExact()):
            packprop.extend(OwnEntropy(sign))(packprop.extend(model)(x.to(like)), y).backward()
        found: Tensor = model.weight.diag_ggn_exact
        return found.double()

    torch.manual_seed(0)
    low = nn.Linear(4, classes).to(dtype)
    exact = nn.Linear(4, classes).double()
    exact.load_state_dict({key: value.double() for key, value in low.state_dict().items()})
    x, y = torch.randn(6, 4).to(dtype), torch.randint(0, classes, (6,))
    expected = diagonal(exact)
    assert ((diagonal(low) - expected).abs() <= 4 * torch.finfo(dtype).eps * expected).all()
    with pytest.raises(PackpropError, match=r"not positive semi-definite.*\n.*float32"):
        diagonal(low, sign=-1.0)


@pytest.mark.parametrize(
    "asked", [extensions.BatchGrad(), extensions.DiagGGNExact()], ids=["rows", "curvature"]
)
def test_a_plan_changes_nothing_of_a_loss(asked: Any) -> None:
    model, loss = packprop.extend(nn.Linear(3, 2).double()), packprop.extend(Masked())
    value = loss(model(torch.randn(4, 3).double()), torch.randn(4, 2).double())
    with packprop.backpack(asked, memory="1GB"):
        value.backward()
    assert (len(loss.masks), float(loss.count), loss.fired) == (1, 1.0, 1)


class Coupled(nn.Module):
    """A loss with products of two samples: those that are some rows apart, or such that they cancel."""

    def __init__(self, apart: int) -> None:
        super().__init__()
        self.apart = apart

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        squares = 4 * (x - y).square().sum()
        if self.apart:
            return squares + (x * x.roll(self.apart, 0)).sum()
        return squares + ((x[0] - x[2]) * x[1]).sum()


@pytest.mark.parametrize("apart", [0, 1, 2, 3, 4])
def test_samples_that_meet_in_a_loss_are_seen_at_any_distance(apart: int) -> None:
    """The Hessian of the whole loss is there, with what stands between samples; a sample has none."""
    torch.manual_seed(0)
    model, loss = packprop.extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()), Coupled(apart)
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    weight, bias = model[0].weight, model[0].bias
    packprop.extend(loss)
    with packprop.backpack(extensions.DiagHessian()):
        loss(model(x), y).backward()

    def value(w: Tensor, b: Tensor) -> Tensor:
        result: Tensor = loss((x @ w.T + b).tanh(), y)
        return result

    dense = torch.autograd.functional.hessian(value, (weight.detach(), bias.detach()))
    for place, each in enumerate((weight, bias)):
        expected = dense[place][place].reshape(each.numel(), -1).diagonal().view_as(each)
        assert_near(each.diag_h, expected, "diagonal")
    asked = packprop.backpack(extensions.BatchDiagHessian())
    with asked, pytest.raises(PackpropError, match="mixes the samples"):
        loss(model(x), y).backward()


class Holding(nn.Module):
    """A loss that reads a buffer of the model, has a network in a list, and a generator of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = {"teachers": [nn.Linear(2, 2).double().requires_grad_(False)], "student": (model,)}
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        difference = self.held["teachers"][0](x - y).cosh() * self.held["student"][0].scale
        return (difference * torch.rand(x.shape, generator=self.generator)).sum()


def test_a_plan_copies_what_a_loss_holds() -> None:
    """Modules that stand in lists, the model itself, generators: what they hold stays as it is."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    model.register_buffer("scale", torch.rand(2).double())
    loss = packprop.extend(Holding(packprop.extend(model)))
    batch = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    state, value = loss.generator.get_state(), loss(model(batch[0]), batch[1])
    loss.generator.set_state(state)
    with packprop.backpack(extensions.DiagGGNExact()):
        loss(model(batch[0]), batch[1]).backward()
    expected, state = model.weight.diag_ggn_exact, loss.generator.get_state()
    with packprop.backpack(extensions.DiagGGNExact(), memory="1GB"):
        value.backward()
    assert_near(model.weight.diag_ggn_exact, expected, "diagonal")
    packprop.plan(model, loss, batch, extensions.DiagGGNExact())
    assert torch.equal(loss.generator.get_state(), state)


def test_a_compiled_step_replays_a_loss_of_ones_own() -> None:
    step = packprop.compile(nn.Linear(3, 2), OwnEntropy(), extensions.DiagGGNExact(), backend="eager")
    for _ in range(4):
        step(torch.randn(6, 3), torch.randint(2, (6,)))
    assert "1 replay" in str(step)
