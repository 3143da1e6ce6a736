"""One family, first and second order, against loops over samples in plain autograd."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import packprop
from benchmarks.families.family import SAMPLES, Family
from packprop import extensions
from packprop.errors import PackpropError

COLUMNS = 24
"""Entries of a sample's output that the loss reads, at most."""

DRAWS = 2
"""Monte Carlo draws."""


class Outcome(NamedTuple):
    """What became of one order of one family.

    Attributes:
        state: ``"right"``, ``"refused"``, ``"wrong"``, or ``"fails"`` where the model itself does not run.
        detail: The largest relative error, or the reason.
    """

    state: str
    detail: str


class Doubled(TorchFunctionMode):
    """Single precision that a model asks for by name becomes double: its rounding would hide errors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Problem:
    """A family's model and data, and a loss of a part of its output."""

    def __init__(self, family: Family) -> None:
        torch.manual_seed(0)
        dtype = torch.float64 if family.double else torch.float32
        self.family = family
        self.model = family.model().eval().to(dtype)
        for parameter in self.model.parameters():  # weights that begin as zeros or ones hide what is wrong
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data.add_(0.05 * torch.randn_like(parameter))
        self.inputs = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in family.inputs().items()
        }
        self.tolerance = 1e-8 if family.double else 5e-3
        with torch.no_grad():
            shape = self.output(self.model, self.inputs).shape
        if shape[0] != SAMPLES:
            raise ValueError(f"outputs of shape {list(shape)}")
        self.chosen = torch.randperm(shape[1:].numel())[:COLUMNS]
        self.target = torch.randn(SAMPLES, len(self.chosen), dtype=dtype)

    def output(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """What the model returns, of which the loss reads a part."""
        return self.family.output(model(**inputs))

    def read(self, output: Tensor) -> Tensor:
        """The part that the loss reads ``[n, c]``."""
        return output.flatten(1)[:, self.chosen]

    def sample(self, n: int) -> dict[str, Tensor]:
        """The inputs of one sample."""
        return {name: value[n : n + 1] for name, value in self.inputs.items()}

    def backward(self, *asked: Any) -> dict[str, nn.Parameter]:
        """One pass; returns the trainable parameters."""
        model = packprop.extend(self.model)
        with packprop.record():
            loss = nn.functional.mse_loss(self.read(self.output(model, self.inputs)), self.target)
        with packprop.backpack(*asked):
            loss.backward()
        return {name: p for name, p in model.named_parameters() if p.requires_grad}


def jacobians(problem: Problem) -> list[dict[str, Tensor]]:
    """Derivatives of what the loss reads of each sample alone ``[c, *p]``."""
    plain = packprop.restore(copy.deepcopy(problem.model))
    parameters = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    found = []
    for n in range(SAMPLES):
        read = problem.read(problem.output(plain, problem.sample(n)))[0]
        rows = [
            torch.autograd.grad(
                entry, list(parameters.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for entry in read
        ]
        found.append(dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True)))
    return found


def require_one_gradient(problem: Problem, slopes: list[dict[str, Tensor]]) -> None:
    """Refuse a model of which PyTorch itself has other gradients for a sample alone than in the batch."""
    plain = packprop.restore(copy.deepcopy(problem.model))
    parameters = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    read = problem.read(problem.output(plain, problem.inputs))
    whole = torch.autograd.grad(
        read.sum(), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    for name, gradient in zip(parameters, whole, strict=True):
        if error(sum(slope[name].sum(0) for slope in slopes), gradient, 1e-3) > 10 * problem.tolerance:
            raise ValueError(
                f"PyTorch's gradients of {name} for single samples do not sum to that of the batch"
            )


def error(found: Tensor, expected: Tensor, floor: float = 1e-9) -> float:
    """The largest error, relative to the largest entry, or to ``floor`` if that is larger."""
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().amax() / expected.abs().amax().clamp(min=floor)).item()


def first_order(problem: Problem, slopes: list[dict[str, Tensor]]) -> float:
    """Gradients of single samples, and their norms."""
    parameters = problem.backward(extensions.BatchGrad(), extensions.BatchL2Grad())
    with torch.no_grad():
        read = problem.read(problem.output(problem.model, problem.inputs))
    arriving = 2 * (read - problem.target) / problem.target.numel()
    worst, largest = 0.0, max(slope.abs().amax().item() for slope in slopes[0].values())
    floor = 1e-6 * largest * arriving.abs().amax().item()  # what is zero but for rounding
    for name, parameter in parameters.items():
        expected = torch.stack(
            [torch.einsum("c,c...->...", arriving[n], slopes[n][name]) for n in range(SAMPLES)]
        )
        if not hasattr(parameter, "grad_batch"):  # no path to the loss
            assert not expected.abs().amax() > 1e-6 * floor, f"{name} has no values"
            continue
        norms = expected.flatten(1).square().sum(1)
        errors = error(parameter.grad_batch, expected, floor), error(parameter.batch_l2, norms, floor**2)
        worst = max(worst, *errors)
    return worst


def second_order(problem: Problem, slopes: list[dict[str, Tensor]]) -> float:
    """Draws of GGN columns lie in the span of the Jacobian; diagonals and factors follow from them."""
    parameters = problem.backward(
        extensions.SqrtGGNMC(mc_samples=DRAWS),
        extensions.DiagGGNMC(mc_samples=DRAWS),
        extensions.KFAC(mc_samples=DRAWS),
    )
    parameters = {name: p for name, p in parameters.items() if hasattr(p, "sqrt_ggn_mc")}
    worst = 0.0
    for n, slope in enumerate(slopes):
        jacobian = torch.cat([slope[name].flatten(1) for name in parameters], 1)
        columns = torch.cat([p.sqrt_ggn_mc[:, n].flatten(1) for p in parameters.values()], 1)
        basis, values, _ = torch.linalg.svd(jacobian.T.double(), full_matrices=False)
        basis = basis[:, values > values.amax() * (1e-10 if problem.family.double else 1e-5)]
        worst = max(worst, error(basis @ (basis.T @ columns.T.double()), columns.T.double()))
    for name, parameter in parameters.items():
        flat = parameter.sqrt_ggn_mc.flatten(2)
        worst = max(worst, error(parameter.diag_ggn_mc.flatten(), flat.square().sum((0, 1))))
        if len(parameter.kfac) == 1 and parameter.kfac[0].dim() < 2:  # a diagonal in place of a large block
            worst = max(worst, error(parameter.kfac[0].flatten(), flat.square().sum((0, 1))))
        elif len(parameter.kfac) == 1:
            worst = max(worst, error(parameter.kfac[0], torch.einsum("vnp,vnq->pq", flat, flat)))
        elif name.endswith("weight") and name.removesuffix("weight") + "bias" in parameters:
            bias = parameters[name.removesuffix("weight") + "bias"]
            same = bias.sqrt_ggn_mc.flatten(2)
            if len(bias.kfac) == 1 and parameter.kfac[0].shape == bias.kfac[0].shape:
                worst = max(worst, error(parameter.kfac[0], torch.einsum("vnp,vnq->pq", same, same)))
    return worst


def precision(family: Family) -> AbstractContextManager[Any]:
    """The precision that a family is checked in."""
    return Doubled() if family.double else nullcontext()


def outcomes(family: Family) -> tuple[Outcome, Outcome]:
    """First and second order."""
    try:
        with precision(family):
            problem = Problem(family)
            slopes = jacobians(problem)
            require_one_gradient(problem, slopes)
    except Exception as failure:  # what the library does not run is no matter of packprop's
        fails = Outcome("fails", f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}")
        return fails, fails

    def judged(compare: Any) -> Outcome:
        try:
            with precision(family):
                worst = compare(problem, slopes)
        except PackpropError as refusal:
            return Outcome("refused", f"{refusal.where}: {refusal.why}")
        except Exception as failure:
            return Outcome("wrong", f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}")
        return Outcome("right" if worst <= problem.tolerance else "wrong", f"{worst:.0e}")

    return judged(first_order), judged(second_order)
