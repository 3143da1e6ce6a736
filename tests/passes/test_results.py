"""What must hold from one backward pass to the next, and what becomes of the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.tensors.nesting import tensors_in
from tests.cases import BY_NAME
from tests.references.law_cases import SIZE, each_row
from tests.references.oracle import Problem
from tests.references.running import (
    ROWS,
    Row,
    as_tensors,
    assert_all_near,
    assert_near,
    backward,
    extend,
    forward,
    generator,
    make_all,
    results,
)
from tests.selection import often, one_in


def cloned(problem: Problem, row: Row) -> dict[str, list[Tensor]]:
    """Copies of what was saved."""
    saved = results(problem, row.attribute)
    return {k: [t.clone() for t in as_tensors(v)] for k, v in saved.items()}


@one_in(2)
@each_row
def test_results_are_overwritten_and_survive_zero_grad(row: Row) -> None:
    problem = BY_NAME["conv2d-deep"].problem(SIZE)
    backward(problem, row(generator()))
    first = {k: [t.clone() for t in as_tensors(v)] for k, v in results(problem, row.attribute).items()}
    problem.model.zero_grad()
    torch.optim.SGD(problem.model.parameters(), lr=0.1).zero_grad()
    results(problem, row.attribute)
    backward(problem, row(generator()))
    for name, value in results(problem, row.attribute).items():
        for before, after in zip(first[name], as_tensors(value), strict=True):
            assert_near(after, before, name, 1e-13)
    loss = forward(problem)
    loss.backward()
    assert all(hasattr(p, row.attribute) for p in problem.parameters.values())


@one_in(2)
@each_row
def test_gradient_accumulates_while_results_do_not(row: Row) -> None:
    problem = BY_NAME["linear-deep"].problem(SIZE)
    backward(problem, row(generator()))
    once = {k: p.grad.clone() for k, p in problem.parameters.items()}
    saved = {k: [t.clone() for t in as_tensors(v)] for k, v in results(problem, row.attribute).items()}
    backward(problem, row(generator()))
    for name, parameter in problem.parameters.items():
        assert_near(parameter.grad, 2 * once[name], name)
        now = as_tensors(getattr(parameter, row.attribute))
        for before, after in zip(saved[name], now, strict=True):
            assert_near(after, before, name, 1e-13)


@each_row
def test_results_belong_to_the_user(row: Row) -> None:
    """Writing into a result changes neither the model nor any other parameter's result."""
    problem = BY_NAME["linear-deep"].problem(SIZE)
    backward(problem, row(generator()))
    before = {k: p.detach().clone() for k, p in problem.parameters.items()}
    gradients = {k: p.grad.clone() for k, p in problem.parameters.items()}
    storages = [
        t.untyped_storage().data_ptr() for v in results(problem, row.attribute).values() for t in tensors_in(v)
    ]
    if row.attribute != "kfac":  # two factors of one layer may be one tensor
        assert len(storages) == len(set(storages))
    for value in results(problem, row.attribute).values():
        for tensor in tensors_in(value):
            tensor.fill_(7.0)
    for name, parameter in problem.parameters.items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(parameter.grad, gradients[name])


@one_in(3)
@often(lambda row, dtype: dtype != torch.float64)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@each_row
def test_precision_is_kept(row: Row, dtype: torch.dtype) -> None:
    """Results have the parameter's precision; in a lower one than float32 only gradients side by side have."""
    case = BY_NAME["linear-deep"]
    exact, rounded = case.problem(SIZE), case.problem(SIZE, "mean", dtype)
    if dtype == torch.bfloat16:  # the same numbers in both
        exact.model.load_state_dict(rounded.model.state_dict())
        exact.inputs.copy_(rounded.inputs)
    backward(exact, row(generator()))
    backward(rounded, row(generator()))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for name, value in results(rounded, row.attribute).items():
        expected = as_tensors(results(exact, row.attribute)[name])
        for tensor, reference in zip(as_tensors(value), expected, strict=True):
            low = dtype == torch.bfloat16 and row.name not in ("BatchGrad", "SqrtGGNExact", "SqrtGGNMC")
            assert tensor.dtype == (torch.float32 if low else dtype)
            assert tensor.device == rounded.parameters[name].device
            if not row.sampled:  # another precision draws other numbers
                assert_near(tensor, reference, name, tolerance)


def test_sums_over_many_samples_in_low_precision() -> None:
    """4096 equal terms summed in bfloat16 would stop growing at 256."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    loss_function = packprop.extend(nn.MSELoss(reduction="sum"))
    packprop.extend(model)
    x, y = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(4096, 1, dtype=torch.bfloat16)
    with packprop.backpack(extensions.SumGradSquared(), extensions.DiagGGNExact()):
        loss_function(model(x), y).backward()
    assert model.weight.sum_grad_squared.item() == 4 * 4096
    assert model.weight.diag_ggn_exact.item() == pytest.approx(2 * 4096, rel=1e-3)  # sqrt(2) was rounded


def test_variance_of_equal_samples_is_zero_and_never_negative() -> None:
    """Computed as a difference of large squares, it would be negative or far too large."""
    model = packprop.extend(nn.Linear(3, 2))
    loss_function = packprop.extend(nn.MSELoss())
    x = torch.randn(1, 3).expand(7, 3) * 1e3
    y = torch.zeros(7, 2)
    with packprop.backpack(extensions.Variance(), extensions.BatchGrad()):
        loss_function(model(x), y).backward()
    for parameter in model.parameters():
        assert (parameter.variance >= 0).all()
        assert parameter.variance.max() <= 1e-12 * parameter.grad_batch.square().max()


def test_result_of_one_sample_and_of_many_agree() -> None:
    """Per-sample results of a summed loss do not depend on the rest of the batch."""
    case = BY_NAME["vision-transformer-hand-written"]
    many = case.problem(SIZE, "sum")
    backward(many, extensions.BatchGrad(), extensions.BatchDiagGGNExact())
    for n in range(SIZE):
        one = case.problem(SIZE, "sum")
        extend(one)
        loss = one.loss(one.model(one.inputs[n : n + 1]), one.targets[n : n + 1])
        with packprop.backpack(extensions.BatchGrad(), extensions.BatchDiagGGNExact()):
            loss.backward()
        for attribute in ("grad_batch", "diag_ggn_exact_batch"):
            expected = {k: v[n : n + 1] for k, v in results(many, attribute).items()}
            assert_all_near(results(one, attribute), expected, attribute, 1e-9)


@one_in(3)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda loss: 3 * loss, id="scaled"),
        pytest.param(lambda loss: loss / 3, id="divided"),
        pytest.param(lambda loss: loss * torch.tensor(0.25), id="scaled-by-tensor"),
        pytest.param(lambda loss: loss + 1.0, id="shifted"),
        pytest.param(lambda loss: loss.clone(), id="cloned"),
        pytest.param(lambda loss: loss.reshape(1), id="reshaped"),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_happens_to_the_loss_afterwards(change: Callable[[Tensor], Tensor], reduction: str) -> None:
    """First and second order quantities scale with the factor that the loss is multiplied by."""
    plain, changed = (BY_NAME["conv2d-deep"].problem(SIZE, reduction) for _ in range(2))
    asked = ROWS
    one, zero = torch.ones(()).double(), torch.zeros(()).double()
    factor = (change(one) - change(zero)).item()
    backward(plain, *make_all(asked))
    loss = change(forward(changed))
    with packprop.backpack(*make_all(asked)):
        loss.backward()
    for attribute, power in (
        ("grad_batch", 1),
        ("batch_l2", 2),
        ("variance", 2),
        ("diag_ggn_exact", 1),
        ("sqrt_ggn_exact", 0.5),
        ("diag_ggn_mc", 1),
    ):
        expected = {k: v * factor**power for k, v in results(plain, attribute).items()}
        assert_all_near(results(changed, attribute), expected, attribute)


def test_gradient_given_to_backward_scales_everything() -> None:
    plain, changed = (BY_NAME["linear-deep"].problem(SIZE) for _ in range(2))
    backward(plain, *make_all(ROWS))
    backward(changed, *make_all(ROWS), gradient=torch.tensor(0.5, dtype=torch.float64))
    for attribute in ("grad_batch", "diag_ggn_exact", "diag_ggn_mc"):
        expected = {k: 0.5 * v for k, v in results(plain, attribute).items()}
        assert_all_near(results(changed, attribute), expected, attribute)
