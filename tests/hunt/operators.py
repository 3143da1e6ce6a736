"""Every differentiable function of PyTorch's own list between two layers, compared with plain autograd.

What goes into a function are its own sample inputs, moved a little by a layer in front of it, so that they
stay where it is differentiable; tensors that it takes besides become parameters. Another layer and a squared
error come behind it. A row of a sample is the gradient of its own term; samples that enter the terms of others
are mixed, and have to be refused.
"""

from __future__ import annotations

import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.tensors.nesting import map_tensors, tensors_in
from packprop.errors import PackpropError
from tests.hunt.outcomes import FLOOR, Outcome, doubles

LARGEST = 600
"""Entries of an input or output."""

SAMPLES_OF_EACH = 3
"""So many sample inputs are taken of each function."""

TOLERANCE = 1e-6


def functions() -> list[Any]:
    """PyTorch's list. It imports a library for its own tests, of which it needs a class to derive from."""
    if "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return [each for each in op_db if each.supports_autograd and torch.float64 in each.dtypes]


@dataclass
class Program:
    """One function with one sample input.

    Attributes:
        name: what reports call it.
        function: the function.
        sample: its arguments, as PyTorch's list gives them.
    """

    name: str
    function: Any
    sample: Any

    def model(self) -> nn.Module:
        """A fresh model, always of the same values."""
        torch.manual_seed(1)
        return Between(self.function, self.sample)


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Any, sample: Any) -> None:
        super().__init__()
        self.function, self.given = function, sample.input
        self.first = nn.Linear(3, sample.input[0].numel())
        self.operands = nn.ParameterList()
        self.arguments = map_tensors(self._operand, (tuple(sample.args), dict(sample.kwargs)))
        self.last: nn.Module = nn.Identity()
        with torch.no_grad():
            width = self(torch.zeros(len(self.given), 3)).shape[1]
        self.last = nn.Linear(width, 2)

    def _operand(self, tensor: Tensor) -> Any:
        if tensor.dtype != torch.float64 or not tensor.numel() or not tensor.requires_grad:
            return tensor.detach()
        self.operands.append(nn.Parameter(tensor.detach().clone()))
        return _Place(len(self.operands) - 1)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, _Place):
            return self.operands[value.number] + 0
        if isinstance(value, dict):
            return {key: self._filled(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._filled(each) for each in value)
        return value

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(2)
        moved = 0.01 * self.first(x).tanh().view(self.given.shape)
        args, kwargs = self._filled(self.arguments)
        made = self.function(self.given.detach() + moved, *args, **kwargs)
        out = next(each for each in tensors_in(made) if each.is_floating_point() or each.is_complex())
        out = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
        if out.shape[:1] == x.shape[:1]:
            return self.last(out.reshape(len(x), -1))
        return self.last(moved.reshape(len(x), -1) * out.abs().mean())


@dataclass(frozen=True)
class _Place:
    number: int


def programs(names: str = "") -> Iterator[Program | str]:
    """Programs of functions whose names begin so; the name of a function of which no sample input fits."""
    for each in functions():
        found = 0
        name = f"{each.name}.{each.variant_test_name}" if each.variant_test_name else each.name
        if not name.startswith(names):
            continue
        torch.manual_seed(0)
        for sample in each.sample_inputs("cpu", torch.float64, requires_grad=True):
            given = sample.input
            if not isinstance(given, Tensor) or given.layout != torch.strided or not given.requires_grad:
                continue
            if not given.dim() or not 1 < len(given) < 9 or not 0 < given.numel() <= LARGEST:
                continue
            program = Program(f"{name} {list(given.shape)} #{found}", each.op, sample)
            if not _is_of_use(program):
                continue
            yield program
            found += 1
            if found == SAMPLES_OF_EACH:
                break
        if not found:
            yield name


def _is_of_use(program: Program) -> bool:
    """Whether plain autograd runs it, and the result is finite and depends on the input."""
    try:
        model = program.model()
        out = model(torch.randn(len(program.sample.input), 3))
        if out.numel() > LARGEST or not bool(out.isfinite().all()):
            return False
        (gradient,) = torch.autograd.grad(out.square().sum(), [model.first.weight], allow_unused=True)
    except Exception:
        return False
    return gradient is not None and bool(gradient.isfinite().all())


@dataclass
class Truth:
    """What plain autograd says: rows, the diagonal of the GGN and a product, of each parameter by its name."""

    rows: dict[str, Tensor]
    diagonal: dict[str, Tensor]
    product: dict[str, Tensor]
    mixed: bool


def truth_of(program: Program, x: Tensor, targets: Tensor) -> Truth:
    """The rows of each sample's own term, and whether samples enter the terms of others."""
    model = program.model()
    handed: list[Tensor] = []
    model.first.register_forward_hook(lambda _, __, out: handed.append(out))
    out = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    options: Any = dict(retain_graph=True, allow_unused=True, materialize_grads=True)
    terms = (out - targets).square().sum(1) / out.numel()
    rows = [torch.autograd.grad(term, parameters, **options) for term in terms]
    jacobian = [torch.autograd.grad(entry, parameters, **options) for entry in out.flatten()]
    mixed = False
    for n in range(len(x)):
        for entry in out[n]:
            (at,) = torch.autograd.grad(entry, [handed[0]], **options)
            mixed = mixed or bool((at[torch.arange(len(x)) != n].abs() > 1e-12).any())
    scale = 2 / out.numel()
    found = Truth({}, {}, {}, mixed)
    for place, name in enumerate(names):
        found.rows[name] = torch.stack([row[place] for row in rows])
        own = torch.stack([each[place] for each in jacobian])
        found.diagonal[name] = scale * own.square().sum(0)
        flat = own.reshape(len(own), -1)
        found.product[name] = scale * (flat.T @ flat.sum(1)).view(own.shape[1:])
    return found


def examine(program: Program) -> list[Outcome]:
    """What packprop makes of one program, pass by pass."""
    torch.manual_seed(3)
    x = torch.randn(len(program.sample.input), 3)
    targets = torch.randn(len(x), 2)
    truth = truth_of(program, x, targets)
    outcomes = []
    for quantity, asked in {
        "gradients": [extensions.BatchGrad(), extensions.BatchL2Grad()],
        "curvature": [extensions.DiagGGNExact()],
        "products": [extensions.GGNMP()],
    }.items():
        model = packprop.extend(program.model())
        loss = packprop.extend(nn.MSELoss())
        try:
            with packprop.backpack(*asked):
                loss(model(x), targets).backward()
            wrong = _wrong(model, quantity, truth)
            outcomes.append(Outcome(quantity, "wrong" if wrong else "right", wrong))
        except PackpropError as error:
            outcomes.append(Outcome(quantity, "refused", error.why.splitlines()[0][:90], str(error)))
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:110]
            outcomes.append(Outcome(quantity, "crashed", said, traceback.format_exc()))
    return outcomes


def _wrong(model: nn.Module, quantity: str, truth: Truth) -> str:
    """What differs from the truth, or nothing."""
    expectations = {"gradients": truth.rows, "curvature": truth.diagonal, "products": truth.product}[quantity]
    largest = max(float(each.abs().max()) for each in expectations.values() if each.numel())
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # nothing led to it
            if truth.rows[name].any():
                return f"{name} was left out"
            continue
        if quantity == "gradients":
            rows = truth.rows[name]
            pairs = [
                (parameter.grad_batch, rows),
                (parameter.batch_l2, rows.reshape(len(rows), -1).square().sum(1)),
            ]
        elif quantity == "curvature":
            pairs = [(parameter.diag_ggn_exact, truth.diagonal[name])]
        else:
            pairs = [(parameter.ggnmp(torch.ones_like(parameter)), truth.product[name])]
        for found, expected in pairs:
            size = max(1e-9, FLOOR * largest, float(expected.abs().max())) if expected.numel() else 1.0
            if found.shape != expected.shape:
                return f"{name} has another shape"
            if found.numel() and not float((found - expected).abs().max()) <= TOLERANCE * size:
                return f"{name} differs" + (", and the samples are mixed" if truth.mixed else "")
    if truth.mixed and quantity == "gradients":
        return "the samples are mixed, and that was not said"
    return ""


def hunt(names: str = "") -> Iterator[tuple[str, list[Outcome]]]:
    """Each program by its name, and what came of it; those whose names begin so."""
    with doubles():
        torch.set_default_dtype(torch.float64)
        warnings.simplefilter("ignore")
        for program in programs(names):
            if isinstance(program, str):
                yield program, [Outcome("program", "invalid", "no sample input fits")]
            else:
                yield program.name, examine(program)
