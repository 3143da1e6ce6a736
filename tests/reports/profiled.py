"""A small network, and what its profile should say, by loops of autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import Profile
from packprop.applications.reports.profile import profile
from packprop.applications.reports.profile.layers import Layer

SIZE = 12


class Network(nn.Module):
    """A convolution, batch normalisation, a shift of its own, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.shift = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.head(x + self.shift)
        return out


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = Network().double()
    model.norm.running_mean.normal_()
    return model, (torch.randn(SIZE, 1, 4, 4).double(), torch.randint(3, (SIZE,)))


def quiet(model: nn.Module, loss: Any, data: Any, **options: Any) -> Profile:
    return profile(model, loss, data, progress=False, **options)


def flat_gradient(scalar: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(scalar, parameters, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])


@dataclasses.dataclass
class Expected:
    """What a row should say, from one backward pass for each sample and each output."""

    gradients: Tensor
    traces: Tensor

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> Expected:
        parameters = [model.get_parameter(name) for name in names]
        gradients, traces = [], []
        for n in range(len(x)):
            logits = model(x[n : n + 1])
            gradients.append(flat_gradient(F.cross_entropy(logits, y[n : n + 1]), parameters))
            jacobian = torch.stack([flat_gradient(entry, parameters) for entry in logits[0]])
            p = logits[0].detach().softmax(0)
            hessian = p.diag() - torch.outer(p, p)
            traces.append((jacobian.T @ hessian @ jacobian).trace())
        return cls(torch.stack(gradients), torch.stack(traces))

    def check(self, row: Layer) -> None:
        mean = self.gradients.mean(0)
        norms = self.gradients.norm(dim=1)
        covariance = (self.gradients - mean).T @ (self.gradients - mean) / len(norms)

        def close(value: Tensor) -> Any:
            return pytest.approx(value.item(), rel=1e-10)

        assert row.gradient_norm == close(mean.norm())
        assert row.sample_gradient_norm_median == close(norms.quantile(0.5))
        assert row.sample_gradient_norm_95 == close(norms.quantile(0.95))
        assert row.signal_to_noise == close(mean.square().sum() / covariance.trace())
        assert row.ggn_trace_exact == close(self.traces.mean())
        assert row.parameters == self.gradients.shape[1]


OWNED = {
    "(model)": ["shift"],
    "conv": ["conv.weight", "conv.bias"],
    "norm": ["norm.weight", "norm.bias"],
    "head": ["head.weight", "head.bias"],
}
ALL = [name for names in OWNED.values() for name in names]
