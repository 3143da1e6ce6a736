"""Functions that are linear by parts have no second derivative of their own, whatever PyTorch says of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions, operators, products
from packprop.compat import hessianfree
from tests.selection import one_in


class Applied(nn.Module):
    """A function as a layer, perhaps inside a checkpoint."""

    def __init__(self, function: Callable[[Tensor], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.function, x, use_reentrant=False)
        return self.function(x)


def assert_equal(found: Tensor, known: Tensor) -> None:
    """Equal, but for rounding: PyTorch has a sixth in single precision in its hard sigmoid."""
    torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-6 * max(1.0, known.abs().max().item()))


def network(bend: Callable[[Tensor], Tensor], checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), Applied(bend, checkpointed), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[2].weight *= 12  # on both sides of the kinks
    return model


def hardsigmoid(x: Tensor) -> Tensor:
    return (x / 6 + 0.5).clamp(0, 1)


BENDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "hardsigmoid": (F.hardsigmoid, hardsigmoid),
    "hardsigmoid-in-place": (lambda x: F.hardsigmoid(x * 1.0, inplace=True), hardsigmoid),
    "squeeze-and-excitation": (
        lambda x: x * F.hardsigmoid(x.mean(1, True)),
        lambda x: x * hardsigmoid(x.mean(1, True)),
    ),
    "hardswish": (F.hardswish, lambda x: x * hardsigmoid(x)),
    "relu6": (F.relu6, lambda x: x.clamp(0, 6)),
}


@one_in(3)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", BENDS)
def test_every_second_derivative(name: str, checkpointed: bool) -> None:
    """Blocks, diagonals and whole matrices are those of the function made of ``clamp``."""
    bend, by_hand = BENDS[name]
    model, plain = network(bend, checkpointed), network(by_hand)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    parameters, same = list(model.parameters()), list(plain.parameters())
    value = F.mse_loss(plain(x), y)
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(value, same, create_graph=True)])
    rows = [torch.autograd.grad(each, same, retain_graph=True, materialize_grads=True) for each in flat]
    hessian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    outputs = plain(x)
    jacobian = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(each, same, retain_graph=True)])
            for each in outputs.flatten()
        ]
    )
    ggn = jacobian.mT @ jacobian * (2 / outputs.numel())

    def evaluate() -> tuple[Tensor, Tensor]:
        made = model(x)
        return made, F.mse_loss(made, y)

    eye = torch.eye(len(hessian)).double()
    assert_equal(operators.hessian(lambda: evaluate()[1], parameters) @ eye, hessian)
    assert_equal(operators.ggn(evaluate, parameters) @ eye, ggn)
    vectors = [torch.randn_like(parameter) for parameter in parameters]
    along = torch.cat([vector.flatten() for vector in vectors])
    assert_equal(products.jvp(model(x), parameters, vectors).flatten(), jacobian @ along)
    product = hessianfree.hessian_vector_product(evaluate()[1], parameters, vectors)
    assert_equal(torch.cat([part.flatten() for part in product]), hessian @ along)

    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    asked = [extensions.HMP(), extensions.GGNMP(), extensions.DiagHessian(), extensions.DiagHessianMC()]
    with packprop.backpack(*asked):
        loss(model(x), y).backward()
    start = 0
    for parameter in parameters:
        own = slice(start, start + parameter.numel())
        start += parameter.numel()
        unit = torch.eye(parameter.numel()).double().view(-1, *parameter.shape)
        assert_equal(parameter.hmp(unit).flatten(1), hessian[own, own])
        assert_equal(parameter.ggnmp(unit).flatten(1), ggn[own, own])
        assert_equal(parameter.diag_h.flatten(), hessian[own, own].diagonal())
        assert parameter.diag_h_mc.isfinite().all()


def test_pytorch_cannot_differentiate_the_hard_sigmoid_twice() -> None:
    """If this fails, PyTorch has been mended, and ``DIFFERENTIABLE_ONCE`` can go."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.hardsigmoid(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(slope.sum(), x)
