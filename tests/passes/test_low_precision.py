"""Every extension on parameters of bfloat16 and float16, and under autocast, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions, operators
from packprop.engine.algebra import kronecker
from packprop.engine.tensors.nesting import tensors_in
from tests.references.low_precision import MODELS, NEAR, observed, problem
from tests.references.oracle import Oracle, Problem
from tests.references.running import (
    HESSIANS,
    ROWS,
    as_tensors,
    assert_all_near,
    assert_near,
    backward,
    check_exact,
    check_sampled,
    generator,
    make_all,
    results,
)
from tests.selection import often, one_in

# Of the catalogue, what the table of references does not have; on chains only where paths may not meet.
OTHERS = {
    "BatchJacobian": extensions.BatchJacobian,
    "Projected": extensions.Projected,
    "DiagHessianMC": lambda: extensions.DiagHessianMC(3, generator()),
    "HMP": extensions.HMP,
    "GGNMP": extensions.GGNMP,
    "PCHMP": extensions.PCHMP,
    "KFRA": extensions.KFRA,
    "HBP": extensions.HBP,
}
CHAINS = {"KFRA": "linear convolution", "HBP": "linear convolution", "PCHMP": "linear convolution"}
GRADIENTS = ("BatchGrad", "BatchJacobian", "SqrtGGNExact", "SqrtGGNMC", "FreshSqrtGGNMC")


def test_every_extension_is_compared() -> None:
    compared = {row.name for row in [*ROWS, *HESSIANS]} | OTHERS.keys()
    assert compared >= {*extensions.__all__} - {"Extension", "Row"}


def require_precision(found: Problem, row: Any, dtype: torch.dtype) -> None:
    """Gradients side by side have the parameters' precision; everything else at least that of float32."""
    expected = dtype if row.name in GRADIENTS else torch.float32
    for name, value in results(found, row.savefield).items():
        tensors = [] if callable(value) else [*tensors_in(value)]
        assert {tensor.dtype for tensor in tensors} <= {expected}, f"{row.name} of {name}"


def compare(found: Problem, reference: Problem, tolerance: float, dtype: torch.dtype) -> None:
    """Compare all that the table of references has with loops over samples in float64."""
    asked = make_all([*ROWS, *HESSIANS])
    packprop.extend(found.model)
    packprop.extend(found.loss)
    loss = found.total()
    with torch.autocast("cpu", enabled=False), packprop.backpack(*asked):
        loss.backward()
    oracle = Oracle(reference)
    for extension in asked:
        require_precision(found, extension, dtype)
    for row in [*ROWS, *HESSIANS]:
        if not row.sampled:
            check_exact(found, oracle, row, tolerance)
    check_sampled(found, oracle, tolerance=tolerance)


@one_in(3)
@often(lambda dtype, name: dtype == torch.bfloat16)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_parameters_in_low_precision(dtype: torch.dtype, name: str) -> None:
    compare(problem(name, dtype, dtype), problem(name, torch.float64, dtype), NEAR[dtype], dtype)


@one_in(3)
@often(lambda dtype, name: dtype == torch.bfloat16)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_parameters_in_single_precision_under_autocast(dtype: torch.dtype, name: str) -> None:
    found, reference = problem(name, torch.float32, dtype), problem(name, torch.float64, dtype)
    with torch.autocast("cpu", dtype=dtype):
        compare(found, reference, NEAR[dtype], torch.float32)


def values_of(name: str, model: str, dtype: torch.dtype, held: torch.dtype, mixed: bool) -> Problem:
    """The values of one extension that is not in the table of references."""
    found = problem(model, dtype, held)
    return observed(found, found.loss, found.targets, [OTHERS[name]()], held, mixed)


@one_in(3)
@often(lambda dtype, name, mixed: dtype == torch.bfloat16)
@pytest.mark.parametrize("mixed", [False, True], ids=["parameters", "autocast"])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_what_is_no_row_of_the_table(dtype: torch.dtype, name: str, mixed: bool) -> None:
    """In float64 it is compared with its definition elsewhere; here low precision with that."""
    extension = OTHERS[name]()
    for model in CHAINS.get(name, " ".join(MODELS)).split():
        exact = values_of(name, model, torch.float64, dtype, mixed=False)
        found = values_of(name, model, torch.float32 if mixed else dtype, dtype, mixed)
        require_precision(found, extension, torch.float32 if mixed else dtype)
        saved, expected = (results(each, extension.savefield) for each in (found, exact))
        for parameter, value in expected.items():
            if callable(value):
                vectors = torch.randn(2, *found.parameters[parameter].shape)
                expected[parameter], saved[parameter] = value(vectors.double()), saved[parameter](vectors)
                assert saved[parameter].dtype == torch.float32  # the vectors'
        for place in range(max(len(as_tensors(value)) for value in expected.values())):
            assert_all_near(
                {k: as_tensors(v)[place] for k, v in saved.items() if len(as_tensors(v)) > place},
                {k: as_tensors(v)[place] for k, v in expected.items() if len(as_tensors(v)) > place},
                name,
                # entries of a product with random signs are sums in which others cancel
                NEAR[dtype] * (2 if name == "DiagHessianMC" else 1),
            )


# Sums, norms and statistics are handed over as they were added up


MANY = 512


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_sum_over_many_samples_keeps_what_each_of_them_adds(dtype: torch.dtype) -> None:
    """Of terms as small as these a sum in bfloat16 loses half; and no number of 8 or 11 digits is their sum."""
    model, loss = packprop.extend(nn.Linear(1, 1, bias=False)), packprop.extend(nn.MSELoss(reduction="sum"))
    nn.init.zeros_(model.weight)
    model.to(dtype)
    x, y = torch.ones(MANY, 1, dtype=dtype), torch.ones(MANY, 1, dtype=dtype)
    x[1::2], y[0] = 0.03125, 48.0
    asked = [
        extensions.SumGradSquared(),
        extensions.BatchL2Grad(),
        extensions.Variance(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
        extensions.KFLR(),
    ]
    with packprop.backpack(*asked):
        loss(model(x), y).backward()
    weight, rows = model.weight, (2 * x * y).double()
    plain = torch.zeros((), dtype=dtype)
    for term in rows.to(dtype).square():
        plain = plain + term[0]
    exact = {
        "sum_grad_squared": rows.square().sum(0, keepdim=True),
        "batch_l2": rows.square()[:, 0],
        "variance": rows.var(0, correction=0, keepdim=True),
        "diag_ggn_exact": 2 * x.double().square().sum(0, keepdim=True),
        "diag_h": 2 * x.double().square().sum(0, keepdim=True),
    }
    for attribute, expected in exact.items():
        value = getattr(weight, attribute)
        assert value.dtype == torch.float32
        # of a GGN only the root of the loss's Hessian, which is sqrt(2), was rounded
        tolerance = 1e-6 if attribute in ("sum_grad_squared", "batch_l2", "variance") else 1e-3
        torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=0.0)
    assert [factor.dtype for factor in weight.kflr] == [torch.float32] * 2
    torch.testing.assert_close(weight.kflr[1].double(), x.double().square().mean(0)[None], rtol=1e-6, atol=0.0)
    assert not torch.isclose(plain.double(), exact["sum_grad_squared"], rtol=1e-2)
    assert not torch.equal(weight.sum_grad_squared, weight.sum_grad_squared.to(dtype).float())


def test_what_half_precision_cannot_hold_is_finite() -> None:
    """Squares of gradients above 256 are above the largest number of float16."""
    model, loss = packprop.extend(nn.Linear(2, 1, bias=False).half()), nn.MSELoss(reduction="sum")
    nn.init.zeros_(model.weight)
    x, y = torch.ones(3, 2).half(), torch.full((3, 1), 300.0).half()
    with packprop.backpack(extensions.BatchL2Grad(), extensions.SumGradSquared(), extensions.BatchDotGrad()):
        packprop.extend(loss)(model(x), y).backward()
    weight = model.weight
    torch.testing.assert_close(weight.batch_l2, torch.full((3,), 2 * 600.0**2))
    torch.testing.assert_close(weight.sum_grad_squared, torch.full((1, 2), 3 * 600.0**2))
    torch.testing.assert_close(weight.batch_dot, torch.full((3, 3), 2 * 600.0**2))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


POSITIONS = 4096
SHARED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(1, 1, bias=False), torch.ones(2, POSITIONS, 1)),
    "convolution": (lambda: nn.Conv1d(1, 1, 1, bias=False), torch.ones(2, 1, POSITIONS)),
    "scale": (Scale, torch.ones(2, POSITIONS, 1)),
    "table": (lambda: nn.Embedding(1, 1), torch.zeros(2, POSITIONS, dtype=torch.long)),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_sum_over_many_positions_keeps_what_each_of_them_adds(dtype: torch.dtype, name: str) -> None:
    """A sum of ones in bfloat16 stops at 256, in float16 at 2048."""
    make, x = SHARED[name]
    model, loss = packprop.extend(make().to(dtype)), packprop.extend(nn.MSELoss(reduction="sum"))
    (weight,) = model.parameters()
    nn.init.zeros_(weight)
    out = model(x.to(dtype) if x.is_floating_point() else x)
    with packprop.backpack(extensions.BatchGrad(), extensions.BatchL2Grad()):
        loss(out, torch.full_like(out, -0.5)).backward()
    assert weight.grad_batch.flatten().tolist() == [POSITIONS] * 2
    assert weight.batch_l2.tolist() == [POSITIONS**2] * 2


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_values_for_no_samples_have_the_same_precision(dtype: torch.dtype) -> None:
    """In an empty batch, as Poisson sampling draws it."""
    model = packprop.extend(nn.Linear(3, 2).to(dtype))
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    with packprop.backpack(extensions.BatchL2Grad(), extensions.Variance(), extensions.BatchGrad()):
        loss(model(torch.ones(0, 3, dtype=dtype)), torch.ones(0, 2, dtype=dtype)).backward()
    for parameter in model.parameters():
        assert parameter.batch_l2.dtype == torch.float32
        assert parameter.variance.dtype == torch.float32
        assert parameter.grad_batch.dtype == dtype


# A gradient scaler


@one_in(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["parameters", "autocast"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_a_step_of_a_gradient_scaler(dtype: torch.dtype, mixed: bool) -> None:
    """With its scale as ``loss_scale`` values are those of the loss that is meant; else of its multiple."""
    scale = 2.0**10
    asked = [row for row in ROWS if not row.sampled]

    def run(scaler: torch.amp.GradScaler, known: bool) -> Problem:
        found = problem("linear", torch.float32 if mixed else dtype, dtype)
        packprop.extend(found.model)
        packprop.extend(found.loss)
        optimizer = torch.optim.SGD(found.model.parameters(), 0.1)
        before = {k: p.detach().clone() for k, p in found.parameters.items()}
        with torch.autocast("cpu", dtype=dtype, enabled=mixed):
            loss = found.total()
        options = {"loss_scale": scaler.get_scale()} if known else {}
        with packprop.backpack(*make_all(asked), **options):
            scaler.scale(loss).backward()
        if mixed or dtype != torch.float16:  # a scaler refuses gradients of float16 themselves
            scaler.step(optimizer)
            scaler.update()
            assert all(not torch.equal(p, before[k]) for k, p in found.parameters.items())
        return found

    plain = run(torch.amp.GradScaler("cpu", enabled=False), known=False)
    meant = run(torch.amp.GradScaler("cpu", init_scale=scale), known=True)
    multiple = run(torch.amp.GradScaler("cpu", init_scale=scale), known=False)
    for row in asked:
        degrees = {"batch_l2": 2, "sum_grad_squared": 2, "variance": 2, "batch_dot": 2, "sqrt_ggn_exact": 0.5}
        for name, value in results(plain, row.attribute).items():
            places = zip(
                as_tensors(value),
                as_tensors(results(meant, row.attribute)[name]),
                as_tensors(results(multiple, row.attribute)[name]),
                strict=True,
            )
            for place, (without, of_loss, of_multiple) in enumerate(places):
                degree = degrees.get(row.attribute, 1) if place == 0 else 0  # inputs have none
                what = f"{row.attribute} of {name}"
                assert of_loss.dtype == of_multiple.dtype == without.dtype
                assert_near(of_loss, without, what, NEAR[dtype])
                assert_near(of_multiple, without.float() * scale**degree, what, NEAR[dtype])


# What is done with values


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize(
    "made", [extensions.KFLR, lambda: extensions.EKFAC(fisher="exact")], ids=["factors", "eigen"]
)
def test_blocks_take_vectors_of_the_parameters_precision(made: Callable[[], Any], dtype: torch.dtype) -> None:
    """Products have the precision of the vectors, a gradient in bfloat16, and are rounded once."""
    extension, found = made(), problem("linear", dtype, dtype)
    backward(found, extension)
    for weight in found.parameters.values():
        block = getattr(weight, extension.savefield)
        whole = kronecker.dense(block).double()
        damped = whole + 0.1 * torch.eye(len(whole))
        for vectors in (weight.grad, torch.randn(2, *weight.shape, dtype=dtype)):
            flat = vectors.reshape(-1, len(whole)).double().mT
            for product, matrix in (
                (kronecker.multiply(block, vectors), whole),
                (kronecker.solve(block, vectors, 0.1), torch.linalg.inv(damped)),
            ):
                assert product.dtype == dtype
                expected = (matrix @ flat).mT.reshape(vectors.shape)
                assert_near(product, expected, "a product", torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_operators_of_blocks_round_no_vectors_to_the_parameters_precision(dtype: torch.dtype) -> None:
    found = problem("linear", dtype, dtype)
    backward(found, extensions.KFLR())
    weights = list(found.parameters.values())
    operator = operators.block_diagonal(weights, [weight.kflr for weight in weights], damping=0.1)
    assert operator.dtype == torch.float32
    dense = torch.block_diag(*(kronecker.dense(weight.kflr) for weight in weights))
    vector = torch.randn(len(dense))
    expected = dense @ vector + 0.1 * vector
    torch.testing.assert_close(operator @ vector, expected)
    assert (operator @ vector.to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_damping_of_an_operator_is_not_rounded_to_the_parameters_precision(dtype: torch.dtype) -> None:
    found = problem("linear", dtype, dtype)
    weights, vector = list(found.parameters.values()), torch.randn(57)
    for make in (
        lambda **damping: operators.hessian(found.total, weights, **damping),
        lambda **damping: operators.ggn(
            lambda: (out := found.model(found.inputs), found.loss(out, found.targets)), weights, **damping
        ),
    ):
        plain, damped = make() @ vector, make(damping=0.1) @ vector
        assert damped.dtype == torch.float32
        torch.testing.assert_close(damped - plain, 0.1 * vector, rtol=1e-5, atol=1e-6)
