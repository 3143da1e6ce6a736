"""The fallback: no more than a loop over single samples, and never a wrong cut of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

import packprop
from packprop import extensions


class OfWeight(nn.Module):
    """A function of the inputs and a weight ``[3, 3]``."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(3, 3).double() + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Counted(TorchFunctionMode):
    """Counts the calls of some functions."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions, self.calls = functions, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in self.functions or func is torch.autograd.grad
        return func(*args, **(kwargs or {}))


def by_cases(x: Tensor, weight: Tensor) -> Tensor:
    """A function that decides on its inputs, which cannot be vectorised."""
    if has_torch_function((x, weight)):
        return handle_torch_function(by_cases, (x, weight), x, weight)  # type: ignore[no-any-return]
    return torch.stack([row.tanh() if row.sum() > 0 else row for row in (x @ weight.square()).unbind()])


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "cdist": lambda x, w: torch.cdist(x[:, None], w)[:, 0],
    "pow": lambda x, w: (x.abs() + 1)[:, None].pow(w),
    "three-operands": lambda x, w: torch.einsum("ni,ij,nj->nj", x, w, x),
    "samples-second": lambda x, w: torch.einsum("in,ij,jn->jn", x.T, w, x.T).T,
    "by-cases": by_cases,
}


def rows_of(model: OfWeight, x: Tensor) -> Tensor:
    """Gradients of single samples, of squares of all outputs, by one sample at a time."""
    samples = range(len(x))
    return torch.stack([torch.autograd.grad(model(x)[n].square().sum(), model.weight)[0] for n in samples])


def pass_over(model: OfWeight, x: Tensor) -> int:
    """Take gradients of single samples; returns how often functions and autograd were called for that."""
    with packprop.record():
        output = model(x)
        value = nn.functional.mse_loss(output, torch.zeros_like(output), reduction="sum")
    functions = torch.cdist, Tensor.pow, torch.einsum, by_cases
    with Counted(*functions) as counted, packprop.backpack(extensions.BatchGrad()):
        value.backward()
    return counted.calls


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_than_a_loop_over_samples(name: str) -> None:
    """Where a function can be vectorised, the number of calls does not grow; else each sample has its own."""
    model = packprop.extend(OfWeight(FUNCTIONS[name]))
    few, many = (torch.randn(count, 3).double() for count in (5, 20))
    calls = [pass_over(model, x) for x in (few, many)]
    torch.testing.assert_close(model.weight.grad_batch, rows_of(model, many))
    assert calls[1] == calls[0] or name == "by-cases"


@pytest.mark.parametrize("samples", [3, 5])
def test_no_input_is_cut_that_is_shared(samples: int) -> None:
    """A constant with as many entries as there are samples belongs to each of them as a whole."""
    shared = torch.randn(samples).double()
    model = packprop.extend(OfWeight(lambda x, w: torch.einsum("ni,ij,m->nj", x, w, shared)))
    x = torch.randn(samples, 3).double()
    pass_over(model, x)
    torch.testing.assert_close(model.weight.grad_batch, rows_of(model, x))
