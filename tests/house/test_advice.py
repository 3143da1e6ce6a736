"""What errors advise leads somewhere: a program that is refused, and the same with the advice followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import backpack, extend, extensions
from packprop.errors import PackpropError

X, Y = torch.randn(5, 3), torch.randint(2, (5,))
P = torch.rand(5, 2)


def run(extension: Any, loss: Callable[[Tensor], Tensor], outputs: int = 2) -> None:
    """One pass over a small network; the parameter of its first layer gets what was asked for."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))
    with packprop.record():
        value = loss(model(X))
    with backpack(extension):
        value.backward()
    assert hasattr(model[0].weight, extension.savefield)


class _Squares(nn.Module):
    def forward(self, f: Tensor, targets: Tensor) -> Tensor:
        return (f - targets).square().sum()


def variance(f: Tensor) -> Tensor:
    return F.gaussian_nll_loss(f[:, :1], P[:, :1], f[:, 1:].exp())


ADVICE: dict[str, tuple[Callable[[], None], str, str, Callable[[], None]]] = {
    "a predicted variance: DiagHessian": (
        lambda: run(extensions.DiagGGNExact(), variance),
        "argument 2 of gaussian_nll_loss",
        "DiagHessian, BatchDiagHessian, HMP",
        lambda: run(extensions.DiagHessian(), variance),
    ),
    "a predicted variance: BatchDiagHessian": (
        lambda: run(extensions.SqrtGGNExact(), variance),
        "requires gradients",
        "DiagHessian, BatchDiagHessian, HMP",
        lambda: run(extensions.BatchDiagHessian(), variance),
    ),
    "a predicted variance: HMP": (
        lambda: run(extensions.GGNMP(), variance),
        "requires gradients",
        "DiagHessian, BatchDiagHessian, HMP",
        lambda: run(extensions.HMP(), variance),
    ),
    "targets with gradients": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.cross_entropy(f, f.softmax(1))),
        "requires gradients",
        "detach it",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.cross_entropy(f, f.softmax(1).detach())),
    ),
    "no recorded loss, inside record()": (
        lambda: run(extensions.DiagGGNExact(), lambda f: f.square().sum()),
        "no recorded loss",
        "module without parameters",
        lambda: run(extensions.DiagGGNExact(), lambda f: extend(_Squares())(f, P)),
    ),
    "log-probabilities": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.nll_loss(f, Y)),
        "no log_softmax",
        "cross_entropy, or what log_softmax",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.nll_loss(f.log_softmax(1), Y)),
    ),
    "a divergence of anything": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.kl_div(f, P)),
        "no log_softmax",
        "give it what log_softmax makes of logits",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.kl_div(f.log_softmax(1), P)),
    ),
    "probabilities": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.binary_cross_entropy(f.softmax(1), P)),
        "no sigmoid",
        "binary_cross_entropy_with_logits",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.binary_cross_entropy_with_logits(f, P)),
    ),
    "rates": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.poisson_nll_loss(F.softplus(f), P, log_input=False)),
        "no exponential",
        "log_input=True",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.poisson_nll_loss(F.softplus(f).log(), P)),
    ),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", ADVICE)
def test_advice_leads_somewhere(name: str) -> None:
    refused, said, advised, followed = ADVICE[name]
    with pytest.raises(PackpropError, match=said) as caught:
        refused()
    assert advised in caught.value.instead
    followed()
