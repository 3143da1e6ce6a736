"""What must hold between quantities, and from one backward pass to the next, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.tensors.nesting import tensors_in
from tests.cases import BY_NAME, CASES, Case, map_tensors
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
    rows_for,
)

# One of each structure, each way of sharing, and the whole models.
LAW_CASES = [
    case
    for case in CASES
    if "smoke" in case.tags
    or case.name
    in {
        "linear-3d-square",
        "conv2d-groups",
        "convtranspose2d-options",
        "layernorm-shared",
        "embedding-positions",
        "embedding-bag-mean",
        "prelu-channels",
        "class-token-through-layer",
        "einsum-quadratic",
        "weight-norm",
        "tied-transpose",
        "windows",
        "time-first-inside",
        "lstm",
        "cdist",
        "own-coupled",
        "mse-map",
        "ce-map-weights-ignore-smoothing",
        "flattened-attention-mse",
        "none-then-weighted-mean",
        "two-forward-passes",
    }
]
SIZE = 4
each_case = pytest.mark.parametrize("case", LAW_CASES, ids=lambda case: case.name)
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@each_case
def test_first_order_follows_from_the_rows(case: Case) -> None:
    problem = case.problem(SIZE, case.reductions[0])
    backward(problem, *make_all([r for r in ROWS if r.order == 1]), record=case.record)
    for name, parameter in problem.parameters.items():
        rows = parameter.grad_batch
        flat = rows.flatten(1)
        assert_near(rows.sum(0), parameter.grad, name)
        assert_near(parameter.batch_l2, flat.square().sum(1), name)
        assert_near(parameter.sum_grad_squared, rows.square().sum(0), name)
        assert_near(parameter.variance, rows.var(0, correction=0), name)
        assert_near(parameter.batch_dot, flat @ flat.T, name)
        assert_near(parameter.batch_dot.diagonal(), parameter.batch_l2, name)
        assert (parameter.variance >= 0).all()


@each_case
def test_second_order_follows_from_the_root(case: Case) -> None:
    problem = case.problem(SIZE, case.reductions[0])
    backward(problem, *make_all([r for r in ROWS if r.order == 2]), record=case.record)
    for name, parameter in problem.parameters.items():
        exact, drawn = parameter.sqrt_ggn_exact.square(), parameter.sqrt_ggn_mc.square()
        assert_near(parameter.diag_ggn_exact_batch, exact.sum(0), name)
        assert_near(parameter.diag_ggn_exact, exact.sum((0, 1)), name)
        assert_near(parameter.diag_ggn_mc_batch, drawn.sum(0), name)
        assert_near(parameter.diag_ggn_mc, drawn.sum((0, 1)), name)


@pytest.mark.parametrize(
    "case", [c for c in LAW_CASES if c.reductions == ("mean", "sum")], ids=lambda case: case.name
)
def test_mean_and_sum_differ_by_the_divisor(case: Case) -> None:
    """Gradients scale with the loss, and so does curvature (not with its square)."""
    mean, total = case.problem(SIZE, "mean"), case.problem(SIZE, "sum")
    divisor = (total.total() / mean.total()).item()
    for problem in (mean, total):
        backward(problem, *make_all(rows_for(case)), record=case.record)
    for attribute, power in (
        ("grad_batch", 1),
        ("batch_l2", 2),
        ("variance", 2),
        ("diag_ggn_exact", 1),
        ("diag_ggn_mc", 1),
        ("sqrt_ggn_mc", 0.5),
    ):
        scaled = {k: v * divisor**power for k, v in results(mean, attribute).items()}
        assert_all_near(results(total, attribute), scaled, attribute)


@pytest.mark.parametrize("kept", [[0], [3, 1], [2, 0, 3, 1], [-1, 0]], ids=str)
@pytest.mark.parametrize("row", [r for r in ROWS if r.subsampling], ids=lambda row: row.name)
@each_case
def test_subsampling_takes_rows_in_list_order(case: Case, row: Row, kept: list[int]) -> None:
    """Rows of the listed samples, in list order, with the scale of the full batch."""
    whole, part = case.problem(SIZE, case.reductions[0]), case.problem(SIZE, case.reductions[0])
    backward(whole, row(generator()), record=case.record)
    asked = row(generator(), subsampling=kept)
    backward(part, asked, record=case.record)
    axis = 0 if row.attribute == "grad_batch" else 1
    index = torch.tensor(kept) % SIZE
    expected = {k: v.index_select(axis, index) for k, v in results(whole, row.attribute).items()}
    assert_all_near(results(part, row.attribute), expected, row.attribute)


@each_case
def test_order_of_samples_does_not_matter(case: Case) -> None:
    """The same samples in another order give the same rows in that order."""
    original, shuffled = (case.problem(SIZE, case.reductions[0]) for _ in range(2))
    order = torch.tensor([2, 0, 3, 1])
    inputs, targets = (map_tensors(lambda t: t[order], tree) for tree in (shuffled.inputs, shuffled.targets))
    backward(original, extensions.BatchGrad(), record=case.record)
    extend(shuffled)
    loss = case.whole(shuffled.model, shuffled.loss, inputs, targets)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    expected = {k: v[order] for k, v in results(original, "grad_batch").items()}
    assert_all_near(results(shuffled, "grad_batch"), expected, "grad_batch")


def own_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold trainable parameters themselves."""
    return [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "all"])
@each_case
def test_hook_sees_each_module_once_when_it_is_ready(case: Case, rows: list[Row]) -> None:
    problem = case.problem(SIZE, case.reductions[0])
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                assert all(hasattr(parameter, row.attribute) for row in rows)

    loss = forward(problem, case.record)
    with packprop.backpack(*make_all(rows), extension_hook=hook):
        loss.backward()
    with_parameters = [m for m in seen if m in set(own_modules(problem.model))]
    assert len(with_parameters) == len(set(with_parameters))
    owned = {id(p) for m in with_parameters for p in m.parameters(recurse=False)}
    assert owned >= {id(p) for p in problem.parameters.values()}


@each_row
def test_hook_may_free_what_it_has_read(row: Row) -> None:
    problem = BY_NAME["conv2d-deep"].problem(SIZE)
    taken: dict[str, Any] = {}
    names = {id(p): k for k, p in problem.parameters.items()}

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if hasattr(parameter, row.attribute):
                taken[names[id(parameter)]] = getattr(parameter, row.attribute)
                delattr(parameter, row.attribute)

    loss = forward(problem)
    with packprop.backpack(row(), extension_hook=hook):
        loss.backward()
    assert taken.keys() == problem.parameters.keys()
    assert not any(hasattr(p, row.attribute) for p in problem.parameters.values())


def test_trace_by_hook_equals_the_sum_of_the_diagonal() -> None:
    """The use that the hook is for: reduce each module's result and let it go."""
    problem, other = (BY_NAME["conv2d-deep"].problem(SIZE) for _ in range(2))
    trace = torch.zeros((), dtype=torch.float64)

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            trace.add_(parameter.diag_ggn_exact.sum())
            del parameter.diag_ggn_exact

    loss = forward(problem)
    with packprop.backpack(extensions.DiagGGNExact(), extension_hook=hook):
        loss.backward()
    backward(other, extensions.DiagGGNExact())
    expected = sum(d.sum() for d in results(other, "diag_ggn_exact").values())
    assert_near(trace, expected, "trace")


def test_hook_error_reaches_the_user_and_ends_the_pass() -> None:
    problem = BY_NAME["linear-deep"].problem(SIZE)

    def hook(module: nn.Module) -> None:
        raise KeyError("mine")

    loss = forward(problem)
    with (
        pytest.raises(KeyError, match="mine"),
        packprop.backpack(extensions.BatchGrad(), extension_hook=hook),
    ):
        loss.backward()
    backward(problem, extensions.BatchGrad())
    results(problem, "grad_batch")


def cloned(problem: Problem, row: Row) -> dict[str, list[Tensor]]:
    """Copies of what was saved."""
    saved = results(problem, row.attribute)
    return {k: [t.clone() for t in as_tensors(v)] for k, v in saved.items()}


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@each_row
def test_precision_is_kept(row: Row, dtype: torch.dtype) -> None:
    """Results have the parameter's precision."""
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
            assert tensor.dtype == dtype
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
    assert model.weight.diag_ggn_exact.item() == 2 * 4096


def test_variance_of_equal_samples_is_zero_and_never_negative() -> None:
    """The difference of large squares would be negative or far too large."""
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
    """Rows of a sum do not depend on who else is in the batch."""
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
    """Everything scales with the loss, second order too."""
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
