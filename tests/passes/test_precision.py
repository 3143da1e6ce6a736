"""Mixed and low precision: against the float64 oracle, sums in float32, a scaler's factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from tests.references.oracle import Oracle, Problem
from tests.references.running import (
    ROWS,
    Row,
    as_tensors,
    check_exact,
    check_sampled,
    generator,
    make_all,
    results,
)
from tests.selection import one_in

# Errors are over the largest entry of a tensor. Activations, cotangents and results were rounded several
# times: some units in the last place of the precision.
UNITS = 12
LOW = {torch.bfloat16: UNITS * 2.0**-8, torch.float16: UNITS * 2.0**-11}


def network(dtype: torch.dtype) -> nn.Sequential:
    """Linear and convolution layers, normalisation, a nonlinearity, with values that ``dtype`` can hold."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(12),
        nn.Linear(12, 4),
        nn.Linear(4, 3),
    )
    return model.to(dtype)


def problem(dtype: torch.dtype, held: torch.dtype, reduction: str = "mean", size: int = 5) -> Problem:
    """The network in ``dtype``, all of whose numbers can be held in ``held``."""
    model = network(held).to(dtype)
    torch.manual_seed(1)
    inputs = torch.randn(size, 1, 4).to(held).to(dtype)
    targets = torch.randint(3, (size,))
    loss = nn.CrossEntropyLoss(reduction=reduction)
    divisor = size if reduction == "mean" else 1
    return Problem.of_batch(model, loss, inputs, targets, divisor)


def compare(found: Problem, oracle: Oracle, tolerance: float) -> None:
    for row in ROWS:
        if not row.sampled:
            check_exact(found, oracle, row, tolerance)
    check_sampled(found, oracle, tolerance=tolerance)


def backward(found: Problem, rows: list[Row], factor: Any = 1.0) -> None:
    packprop.extend(found.model)
    packprop.extend(found.loss)
    with packprop.backpack(*make_all(rows)):
        (found.total() * factor).backward()


@one_in(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_models_in_low_precision(dtype: torch.dtype, reduction: str) -> None:
    """Results have the accuracy of the parameters' precision; their own is in ``test_low_precision.py``."""
    low = problem(dtype, dtype, reduction)
    backward(low, ROWS)
    compare(low, Oracle(problem(torch.float64, dtype, reduction)), LOW[dtype])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Under autocast results have the parameters' precision and the accuracy of the lower one."""
    mixed = problem(torch.float32, torch.float32)
    packprop.extend(mixed.model)
    packprop.extend(mixed.loss)
    with torch.autocast("cpu", dtype=dtype):
        loss = mixed.total()
    with packprop.backpack(*make_all(ROWS)):
        loss.backward()
    for row in ROWS:
        for value in results(mixed, row.attribute).values():
            assert all(tensor.dtype == torch.float32 for tensor in as_tensors(value))
    compare(mixed, Oracle(problem(torch.float64, torch.float32)), LOW[dtype])
    exact = problem(torch.float32, torch.float32)
    backward(exact, ROWS)
    with pytest.raises(AssertionError):  # the tolerance tells the two apart
        compare(mixed, Oracle(problem(torch.float64, torch.float32)), 1e-5)
    compare(exact, Oracle(problem(torch.float64, torch.float32)), 1e-5)


# Sums


FEATURES, SAMPLES = 1024, 1024


def alike(dtype: torch.dtype) -> nn.Linear:
    """Gradients of 2 and -2, a thousand entries for a thousand samples: sums that stall in bfloat16."""
    model = nn.Linear(FEATURES, 1, bias=False).to(dtype)
    nn.init.constant_(model.weight, 2.0**-8)
    return model


@one_in(2)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BatchL2Grad", 4.0 * FEATURES),
        ("SumGradSquared", 4.0 * SAMPLES),
        ("Variance", 4.0),
        ("BatchDotGrad", 4.0 * FEATURES),
        ("DiagGGNExact", 0.5 * SAMPLES),
        ("BatchDiagGGNExact", 0.5),
    ],
)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sums_are_accumulated_in_single_precision(dtype: torch.dtype, name: str, expected: float) -> None:
    """A sum of equal terms stops growing after 256 of them in bfloat16, after 2048 in float16."""
    model, loss = packprop.extend(alike(dtype)), packprop.extend(nn.MSELoss(reduction="sum"))
    x = torch.full((SAMPLES, FEATURES), 0.5, dtype=dtype)
    y = torch.tensor([0.0, 4.0], dtype=dtype).repeat(SAMPLES // 2).unsqueeze(1)
    extension = getattr(extensions, name)()
    with packprop.backpack(extension):
        loss(model(x), y).backward()
    value = getattr(model.weight, extension.savefield)
    rounding = 1e-3 if "GGN" in name else 0.0  # of the root of the loss's Hessian, which is sqrt(2)
    torch.testing.assert_close(value.abs(), torch.full_like(value, expected), rtol=rounding, atol=0.0)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sums_over_draws_are_accumulated_in_single_precision(dtype: torch.dtype) -> None:
    model, loss = packprop.extend(alike(dtype)), packprop.extend(nn.MSELoss(reduction="sum"))
    x = torch.full((SAMPLES, FEATURES), 0.5, dtype=dtype)
    source = generator()
    asked = [
        extensions.SqrtGGNMC(mc_samples=2, generator=source),
        extensions.DiagGGNMC(mc_samples=2, generator=source),
        extensions.BatchDiagGGNMC(mc_samples=2, generator=source),
        extensions.KFAC(mc_samples=2, generator=source),
    ]
    with packprop.backpack(*asked):
        loss(model(x), torch.zeros(SAMPLES, 1, dtype=dtype)).backward()
    weight, tolerance = model.weight, LOW[dtype]
    squares = weight.sqrt_ggn_mc.double().square()
    near = {"rtol": tolerance, "atol": 0.0}
    torch.testing.assert_close(weight.diag_ggn_mc.double(), squares.sum((0, 1)), **near)
    torch.testing.assert_close(weight.diag_ggn_mc_batch.double(), squares.sum(0), rtol=tolerance, atol=1e-2)
    b, a = weight.kfac
    assert torch.equal(a, torch.full_like(a, 0.25))
    torch.testing.assert_close(0.25 * b.double()[0, 0], squares.sum((0, 1)).mean(), **near)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_extension_says_what_it_adds_up_in(row: Row) -> None:
    assert "at least float32" in " ".join((row.make.__doc__ or "").split())


# A gradient scaler


DEGREES = {
    "grad_batch": [1.0],
    "batch_l2": [2.0],
    "sum_grad_squared": [2.0],
    "variance": [2.0],
    "batch_dot": [2.0],
    "diag_ggn_exact": [1.0],
    "diag_ggn_exact_batch": [1.0],
    "sqrt_ggn_exact": [0.5],
    "diag_ggn_mc": [1.0],
    "diag_ggn_mc_batch": [1.0],
    "sqrt_ggn_mc": [0.5],
    "kfac": [1.0, 0.0],
    "kflr": [1.0, 0.0],
    "ekfac": [1.0],
    "ekfac_exact": [1.0],
}


@one_in(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
def test_a_scalers_factor_is_carried(row: Row, mixed: bool) -> None:
    """Results belong to the scaled loss, as its gradient does; the factor is a power of two, so it is exact."""
    scale = 2.0**16
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def run(scaled: bool) -> dict[str, Any]:
        found = problem(torch.float32, torch.float32)
        packprop.extend(found.model)
        packprop.extend(found.loss)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss = found.total()
        with packprop.backpack(*make_all([row])):
            (scaler.scale(loss) if scaled else loss).backward()
        return results(found, row.attribute)

    plain, scaled = run(False), run(True)
    for name, value in plain.items():
        powers = DEGREES[row.attribute]
        for mine, other, degree in zip(as_tensors(scaled[name]), as_tensors(value), powers, strict=False):
            torch.testing.assert_close(mine, other * scale**degree, rtol=1e-5, atol=1e-5 * scale**degree)


def small_gradients(size: float, factor: float, loss_scale: float = 1.0) -> nn.Linear:
    """A model in float16 whose samples have gradients of ``2 * size**2`` in each entry, times ``factor``."""
    model = packprop.extend(nn.Linear(4, 1, bias=False).half())
    nn.init.constant_(model.weight, 0.0)
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    x, y = torch.full((8, 4), size).half(), torch.full((8, 1), size).half()
    asked = extensions.BatchGrad(), extensions.SumGradSquared()
    with packprop.backpack(*asked, loss_scale=loss_scale):
        (loss(model(x), y) * factor).backward()
    return model


def test_squares_are_there_that_half_precision_cannot_hold() -> None:
    """Squares of small gradients underflow in float16, and not in what they are handed over in."""
    exact = 8 * (2 * 2.0**-16) ** 2
    found = small_gradients(2.0**-8, 1.0).weight.sum_grad_squared
    assert torch.equal(found, torch.full((1, 4), exact))


def test_a_scaler_saves_what_half_precision_would_lose() -> None:
    """What is below float16 on its way through the model is lost, but not under a scaler's factor.

    That is taken off in the precision that values are added up in, where they do not underflow.
    """
    weight, scale, size = 2.0**-16, 2.0**16, 2.0**-12  # the weight that samples of a large mean have
    assert not small_gradients(size, weight).weight.sum_grad_squared.any()
    exact = 8 * (2 * size**2) ** 2
    scaled = small_gradients(size, weight * scale).weight
    assert torch.equal(scaled.sum_grad_squared, torch.full((1, 4), exact))
    meant = small_gradients(size, weight * scale, loss_scale=scale).weight
    assert torch.equal(meant.sum_grad_squared, torch.full((1, 4), exact * weight**2))
    assert not meant.grad_batch.any()  # it has the parameters' precision


def test_more_terms_than_half_precision_can_count() -> None:
    from packprop.engine.functions.losses.description import describe

    targets = torch.zeros(70_000, dtype=torch.long)
    logits = torch.zeros(70_000, 2, dtype=torch.float16)
    for weight in (None, torch.ones(2, dtype=torch.float16)):
        divisor = describe(torch.nn.functional.cross_entropy, (logits, targets, weight), {}).divisor
        assert float(divisor) == 70_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_in_half_precision(dtype: torch.dtype) -> None:
    from packprop.engine.algebra import kronecker

    factors = [2 * torch.eye(3, dtype=dtype), torch.eye(2, dtype=dtype)]
    vectors = torch.ones(3, 2, dtype=dtype)
    torch.testing.assert_close(kronecker.solve(factors, vectors, 0.0), vectors / 2)
    assert kronecker.solve(factors, vectors, 0.0).dtype == dtype
    torch.testing.assert_close(kronecker.inverse(factors, 0.0)[0], factors[0] / 4)
    assert float(kronecker.logdet(factors)) == pytest.approx(6 * 0.6931, rel=1e-2)


@pytest.mark.parametrize("kind", ["first", "second"])
def test_a_pass_inside_of_autocast_sums_in_single_precision_all_the_same(kind: str) -> None:
    """PyTorch advises against it, and many do it; the gradient is what autograd makes of it."""
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = packprop.extend(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)))
        x, y = torch.randn(16, 20), torch.randint(5, (16,))
        asked = {
            "first": [extensions.BatchDotGrad(), extensions.SumGradSquared(), extensions.Variance()],
            "second": [extensions.DiagGGNExact(), extensions.KFLR()],
        }[kind]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
            loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
            with packprop.backpack(*asked), torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                loss.backward()
                assert torch.is_autocast_enabled("cpu") == inside
        top = model[2]
        assert isinstance(top, nn.Linear)  # its cotangents come from the loss alone
        found.append([t for e in asked for t in as_tensors(getattr(top.weight, e.savefield))])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
