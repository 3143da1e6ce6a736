"""Every case with every extension, in two batch sizes and reductions, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import packprop
from packprop.engine.algebra import kernels, one_by_one
from packprop.engine.passes import gradient
from packprop.engine.passes.chunks import ChunkSizes
from packprop.errors import PackpropError
from tests.cases import CASES, Case
from tests.references.running import (
    ROWS,
    SECOND_ORDER,
    Row,
    as_tensors,
    assert_all_near,
    backward,
    check_exact,
    check_sampled,
    forward,
    make_all,
    reference,
    results,
    rows_for,
)
from tests.seeding import DEVICE
from tests.selection import STRUCTURES, each_structure, often, one_in, paired

EVERY = paired(case for case in CASES if not case.refuses)
SOME = {case.name for case in CASES[::3]}
SMOKE = [case for case in CASES if "smoke" in case.tags]


SINGLE = [c for c in CASES if not c.refuses and "float64-only" not in c.tags]
"""Cases that single precision is fit for."""


def check_everything(
    case: Case, size: int, reduction: str | None, dtype: torch.dtype, only: tuple[str, ...] = ()
) -> None:
    problem = case.problem(size, reduction, dtype)
    oracle = reference(case.name, size, reduction)
    rows = [row for row in rows_for(case) if not only or row.attribute in only]
    backward(problem, *make_all(rows), record=case.record)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    if DEVICE.type == "cuda" and case.name.startswith("weight-norm"):
        tolerance = max(tolerance, 1e-7)  # PyTorch's fused weight norm, whatever the precision
    gradients = {k: p.grad for k, p in problem.parameters.items()}
    assert_all_near(gradients, oracle.whole_gradient, "grad", tolerance)
    for row in rows:
        for value in results(problem, row.attribute).values():
            for tensor in as_tensors(value):
                assert tensor.dtype == dtype
                assert not tensor.requires_grad
        if not row.sampled:
            check_exact(problem, oracle, row, tolerance, case.dense)
    if SECOND_ORDER[0] in rows:  # then all of them are
        check_sampled(problem, oracle, case.dense, tolerance)
    for parameter in problem.model.parameters():
        if not parameter.requires_grad:
            assert not any(hasattr(parameter, row.attribute) for row in rows)


@pytest.mark.covers(by=rows_for)
@often(
    lambda case, size, **_: (case.name in STRUCTURES | SOME) if size == case.sizes[-1] else "smoke" in case.tags
)
@pytest.mark.parametrize(("case", "size", "reduction"), EVERY)
def test_everything_in_one_backward_pass(case: Case, size: int, reduction: str | None) -> None:
    check_everything(case, size, reduction, torch.float64)


@one_in(5)
@each_structure
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_single_precision(case: Case) -> None:
    check_everything(case, case.sizes[-1], case.reductions[0], torch.float32)


LARGE = [
    *(pytest.param(case, torch.float64, id=case.name) for case in SINGLE),
    *(pytest.param(c, torch.float32, id=f"{c.name}-single") for c in SINGLE if c.name in STRUCTURES),
]


@one_in(5)
@often(lambda case, dtype: dtype == torch.float64 and case.name in STRUCTURES)
@pytest.mark.parametrize(("case", "dtype"), LARGE)
def test_what_pays_for_large_models_only(case: Case, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Gradients summed from per-sample ones, products one at a time, moments of patches from shifts."""
    monkeypatch.setattr(gradient, "WORTH_SUMMING", 0)
    monkeypatch.setattr(kernels, "WORTH_A_CALL", 0)
    monkeypatch.setattr(kernels, "WORTH_BLOCKS", 0)
    monkeypatch.setattr(kernels, "LONG", 0)
    monkeypatch.setattr(kernels, "SHORT", 0)
    with packprop.algorithms(factors="shifts"):
        check_everything(case, case.sizes[-1], case.reductions[0], dtype)


TWO_KINDS = [("grad_batch", "variance"), ("batch_l2",)]
"""Sums of gradients with their rows, and norms, which come by another way where positions are few."""
ALONE = [("sum_grad_squared",), ("variance",)]
STREAMED = [
    pytest.param(case, names, id=f"{case.name}-{'+'.join(names)}")
    for case in SINGLE
    for names in (*TWO_KINDS, *(ALONE if case.name in STRUCTURES else ()))
]


@one_in(5)
@often(lambda case, names: case.name in STRUCTURES and names in TWO_KINDS)
@pytest.mark.parametrize(("case", "names"), STREAMED)
def test_gradients_of_single_samples_in_turn(case: Case, names: tuple[str, ...], monkeypatch: Any) -> None:
    """Each gradient is formed once and given to everything asked for, in chunks of two samples."""
    monkeypatch.setattr(gradient, "WORTH_SUMMING", 0)
    monkeypatch.setattr(kernels, "WORTH_A_CALL", 0)
    monkeypatch.setattr(kernels, "SHORT", 0)
    monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: 2)
    taken = []

    def noted(left: torch.Tensor, right: torch.Tensor, by_rows: bool) -> Any:
        taken.append(len(left))
        return kernels.products_one_by_one(left, right, by_rows)

    monkeypatch.setattr(one_by_one, "products_one_by_one", noted)
    check_everything(case, case.sizes[-1], case.reductions[0], torch.float32, names)
    if case.name == "linear-3d" and names != ("batch_l2",) and DEVICE.type == "cpu":  # norms: few positions
        assert taken[:2] == [2, 1]


@one_in(3)
@often(lambda case, row: case.name in ("linear-deep", "conv2d-deep"))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_alone_as_in_company(case: Case, row: Row) -> None:
    """An extension gives the same whether others run beside it or not, and only what was asked."""
    together, alone = case.problem(3), case.problem(3)
    backward(together, *make_all(rows_for(case)), record=case.record)
    backward(alone, *make_all([row]), record=case.record)
    expected, found = results(together, row.attribute), results(alone, row.attribute)
    expected = {f"{k}[{i}]": f for k, v in expected.items() for i, f in enumerate(as_tensors(v))}
    found = {f"{k}[{i}]": f for k, v in found.items() for i, f in enumerate(as_tensors(v))}
    assert_all_near(found, expected, row.attribute, 1e-12 if DEVICE.type == "cpu" else 1e-10)
    for other in ROWS:
        if other is not row:
            assert not any(hasattr(p, other.attribute) for p in alone.model.parameters())


@one_in(8)
@each_structure
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_a_default_device_that_is_not_the_models(case: Case) -> None:
    """Tensors of packprop's own are where the model is, whatever ``torch.set_default_device`` says."""
    usual, other = case.problem(3, case.reductions[0]), case.problem(3, case.reductions[0])
    rows = [row for row in rows_for(case) if not row.sampled]
    for problem, device in ((usual, "cpu"), (other, "meta")):
        for _ in range(3):  # the first pass finds the samples; the walk of the second one is kept
            problem.model.zero_grad()
            loss = forward(problem, case.record)
            with torch.device(device), packprop.backpack(*make_all(rows)):
                loss.backward()
    for row in rows:
        expected, found = results(usual, row.attribute), results(other, row.attribute)
        for name, value in expected.items():
            for one, two in zip(as_tensors(value), as_tensors(found[name]), strict=True):
                assert one.device == two.device
                assert_all_near({name: two}, {name: one}, row.attribute, 1e-12)


@one_in(3)
@each_structure
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if rows_for(c) == ROWS and c.columns and not c.refuses],
    ids=lambda case: case.name,
)
def test_number_of_columns(case: Case) -> None:
    """The exact root has one column for each entry of what the loss function receives."""
    problem = case.problem(3, case.reductions[0])
    backward(problem, packprop.extensions.SqrtGGNExact(), record=case.record)
    for name, root in results(problem, "sqrt_ggn_exact").items():
        shape = problem.parameters[name].shape
        assert root.shape == (problem.output(0).numel(), 3, *shape), name


@one_in(2)
@often(lambda case, row, size: size == 3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
@pytest.mark.parametrize("case", [c for c in CASES if c.refuses_curvature], ids=lambda case: case.name)
def test_losses_without_useful_curvature(case: Case, row: Row, size: int) -> None:
    problem = case.problem(size)
    loss = forward(problem, case.record)
    with pytest.raises(PackpropError) as caught, packprop.backpack(row()):
        loss.backward()
    for part in case.refuses_curvature:
        assert part in str(caught.value)
    assert not any(hasattr(p, row.attribute) for p in problem.model.parameters())


@pytest.mark.parametrize("case", [c for c in CASES if c.refuses], ids=lambda case: case.name)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_cannot_be_had_is_refused_by_name(case: Case, row: Row) -> None:
    problem = case.problem(3, case.reductions[0])
    with pytest.raises(PackpropError) as caught:
        backward(problem, row(), record=case.record)
    for part in case.refuses:
        assert part in str(caught.value)
    assert not any(hasattr(p, row.attribute) for p in problem.model.parameters())
