"""Hessian diagonals of every case against the oracle, by every route that they can be taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop import extensions
from packprop.engine.curvature import routes
from packprop.engine.curvature.nonlinearities import OutputDiagonals, SharedRows
from packprop.engine.passes import column_sweeps, hessian
from packprop.errors import PackpropError
from tests.cases import BY_NAME, CASES, Case
from tests.references.oracle import Oracle
from tests.references.running import assert_all_near, assert_near, backward, results
from tests.selection import STRUCTURES, often, one_in, paired
from tests.versions import CDIST_HAS_SECOND_DERIVATIVE

# What PyTorch itself has no second derivatives of.
NOT_TWICE = {
    "cdist": "_cdist_backward",
    "ctc": "_ctc_loss_backward",
    "multi-margin": "multi_margin_loss_backward",
    "multilabel-margin": "multilabel_margin_loss_backward",
    # It has one, and a wrong one.
    "weight-norm": "WeightNormInterface",
    "weight-norm-convolution": "WeightNormInterface",
    "weight-norm-hook": "WeightNormInterface",
    "weight-norm-twice": "WeightNormInterface",
}
EVERY = paired(
    case
    for case in CASES
    if not case.refuses and case.name not in NOT_TWICE and not case.name.startswith("embedding-bag")
)


@one_in(6)
@pytest.mark.covers("DiagHessian", "BatchDiagHessian")
@often(lambda case, size, reduction: size == case.sizes[-1] and case.name in STRUCTURES)
@pytest.mark.parametrize(("case", "size", "reduction"), EVERY)
def test_every_case(case: Case, size: int, reduction: str | None) -> None:
    problem = case.problem(size, reduction)
    oracle = Oracle(case.problem(size, reduction))
    with sdpa_kernel(SDPBackend.MATH):
        backward(problem, extensions.DiagHessian(), extensions.BatchDiagHessian(), record=case.record)
        expected, batch = oracle.diag_h, oracle.diag_h_batch
    assert_all_near(results(problem, "diag_h"), expected, "diag_h", 1e-9)
    assert_all_near(results(problem, "diag_h_batch"), batch, "diag_h_batch", 1e-9)
    assert all(p.diag_h.dtype == torch.float64 for p in problem.parameters.values())


@pytest.mark.parametrize(
    "name", [name for name in NOT_TWICE if not (name == "cdist" and CDIST_HAS_SECOND_DERIVATIVE)]
)
def test_what_cannot_be_differentiated_twice_is_named(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    with pytest.raises(PackpropError, match=NOT_TWICE[name]):
        backward(problem, extensions.DiagHessian())


@one_in(2)
@pytest.mark.covers("DiagHessian", "BatchDiagHessian")
@pytest.mark.parametrize("name", [case.name for case in CASES if case.name.startswith("embedding-bag")])
def test_what_pytorch_refuses_but_the_way_does_not_need(name: str) -> None:
    """embedding_bag has no double backward, but is linear in its table: compared with differences."""
    problem = BY_NAME[name].problem(3)
    backward(problem, extensions.DiagHessian(), extensions.BatchDiagHessian())
    step = 1e-6
    for key, parameter in problem.parameters.items():
        rows = []
        for flat in range(parameter.numel()):
            entry = parameter.data.view(-1)
            sides = []
            for shift in (step, -2 * step, step):
                entry[flat] += shift
                problem.model.zero_grad()
                sides.append(Oracle(problem).grad_batch[key].flatten(1)[:, flat])
            rows.append((sides[0] - sides[1]) / (2 * step))
        expected = torch.stack(rows, 1).view(3, *parameter.shape)
        assert_near(results(problem, "diag_h_batch")[key], expected, key, 1e-6, 1e-2)
        assert_near(results(problem, "diag_h")[key], expected.sum(0), key, 1e-6, 1e-2)


SMOKE = [case for case in CASES if "smoke" in case.tags]
AFFINE = [BY_NAME[name] for name in ("linear-deep", "conv2d-deep", "layernorm-shared", "siamese", "embedding")]


@one_in(6)
@pytest.mark.parametrize("case", [*SMOKE, *AFFINE], ids=lambda case: case.name)
@pytest.mark.parametrize("way", ["output", "parameter"])
def test_all_ways_lead_to_the_same(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a route takes for known, the route that takes nothing for known gives the same numbers."""
    if way == "output":
        monkeypatch.setattr(routes, "kind_of", lambda *_: "nonlinear")
    else:
        monkeypatch.setattr(routes, "_is_affine", lambda *_: False)
    went, choose = set(), routes.choose_routes

    def spy(graph: Any, *options: Any) -> Any:
        chosen = choose(graph, *options)
        went.update(chosen.route(leaf) for leaf in graph.leaves())
        return chosen

    monkeypatch.setattr(hessian, "choose_routes", spy)
    problem = case.problem(3, case.reductions[0])
    with sdpa_kernel(SDPBackend.MATH):
        backward(problem, extensions.DiagHessian(), extensions.BatchDiagHessian(), record=case.record)
        oracle = Oracle(case.problem(3, case.reductions[0]))
        assert_all_near(results(problem, "diag_h"), oracle.diag_h, "diag_h", 1e-9)
        assert_all_near(results(problem, "diag_h_batch"), oracle.diag_h_batch, "diag_h_batch", 1e-9)
    if case.name not in ("linear-alone", "module-twice"):  # where nothing lies between, nothing is unknown
        assert way in went
    assert went <= {way, "parameter", "swept"}
    if way == "parameter":
        assert went == {"parameter"}


@one_in(3)
@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_alone_and_for_some_samples(case: Case) -> None:
    together, alone, some = (case.problem(3, case.reductions[0]) for _ in range(3))
    chosen = [2, 0]
    with sdpa_kernel(SDPBackend.MATH):
        backward(together, extensions.BatchDiagHessian(), record=case.record)
        backward(alone, extensions.DiagHessian(), record=case.record)
        backward(
            some,
            extensions.DiagHessian(subsampling=chosen),
            extensions.BatchDiagHessian(subsampling=chosen),
            extensions.DiagGGNExact(),
            extensions.Variance(),
            record=case.record,
        )
    rows = results(together, "diag_h_batch")
    assert_all_near(results(alone, "diag_h"), {k: d.sum(0) for k, d in rows.items()}, "diag_h", 1e-9)
    assert_all_near(results(some, "diag_h_batch"), {k: d[chosen] for k, d in rows.items()}, "some rows", 1e-9)
    assert_all_near(results(some, "diag_h"), {k: d[chosen].sum(0) for k, d in rows.items()}, "some", 1e-9)


def piecewise() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2)),
        *(nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5)),
    ).eval()


def test_without_nonlinearities_the_columns_are_those_of_the_ggn(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    sweeping = column_sweeps.ColumnSweeps.run

    def count(self: Any, groups: Any, *given: Any, **options: Any) -> None:
        swept.append(sum(group.count for group in groups))
        sweeping(self, groups, *given, **options)

    monkeypatch.setattr(column_sweeps.ColumnSweeps, "run", count)
    torch.manual_seed(0)
    model, lossfunc = packprop.extend(piecewise()), packprop.extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.randn(4, 1, 12, 12)), torch.arange(4))
    with packprop.backpack(extensions.DiagHessian(), extensions.DiagGGNExact()):
        loss.backward()
    assert swept == [4]  # of five classes
    for parameter in model.parameters():
        assert torch.equal(parameter.diag_h, parameter.diag_ggn_exact)


def deep(kind: str) -> tuple[nn.Module, Tensor]:
    """Smooth functions between affine maps that all samples share, and inputs for three samples."""
    torch.manual_seed(0)
    if kind == "linear":
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 4)]
        return nn.Sequential(*layers, nn.SiLU(), nn.Linear(4, 3)).double(), torch.randn(3, 3).double()
    layers = [nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Sigmoid(), nn.MaxPool2d(2, stride=1)]
    head = [nn.Flatten(), nn.Linear(8, 4), nn.Sigmoid(), nn.Linear(4, 3)]
    return nn.Sequential(*layers, *head).double(), torch.randn(3, 1, 5, 5).double()


@one_in(2)
@pytest.mark.parametrize("at_once", [1, 2, 5, None])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_columns_of_elementwise_functions_in_chunks(
    kind: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of shared Jacobians and diagonals at outputs, whatever the chunks that they come in."""
    if at_once is not None:
        monkeypatch.setattr(
            column_sweeps, "columns_at_once", lambda request, group, uses: min(at_once, group.count)
        )
    taken: list[str] = []
    for owner, name in ((SharedRows, "rows"), (OutputDiagonals, "add_columns")):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, f=function, n=name: (taken.append(n), f(*given))[1])
    model, x = deep(kind)
    y, lossfunc = torch.tensor([0, 2, 1]), packprop.extend(nn.CrossEntropyLoss())
    packprop.extend(model)
    with packprop.backpack(extensions.DiagHessian(), extensions.BatchDiagHessian()):
        lossfunc(model(x), y).backward()
    assert {"rows", "add_columns"} <= {*taken} if kind == "linear" else "rows" in taken
    for key, parameter in model.named_parameters():
        (slope,) = torch.autograd.grad(lossfunc(model(x), y), parameter, create_graph=True)
        entries = slope.flatten()
        rows = [torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten() for entry in entries]
        assert_near(parameter.diag_h.flatten(), torch.stack(rows).diagonal(), key)
        assert_near(parameter.diag_h_batch.sum(0), parameter.diag_h, key)


@one_in(3)
@pytest.mark.parametrize("asked", [extensions.DiagHessian, extensions.KFRA, extensions.KFLR])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_planned_without_data(kind: str, asked: Any) -> None:
    model, x = deep(kind)
    found = packprop.plan(model, nn.CrossEntropyLoss(), (x, torch.tensor([0, 2, 1])), [asked()])
    assert found.peak > found.results > 0


def test_no_dense_square_root_is_formed() -> None:
    """Columns of an elementwise function come and go: the peak is far below units x units for each sample."""
    units, samples = 300, 64
    model = nn.Sequential(nn.Linear(8, units), nn.Sigmoid(), nn.Linear(units, units), nn.Sigmoid())
    batch = torch.randn(samples, 8), torch.randint(3, (samples,))
    found = packprop.plan(
        nn.Sequential(model, nn.Linear(units, 3)), nn.CrossEntropyLoss(), batch, [extensions.DiagHessian()]
    )
    assert found.peak < 0.4 * samples * units**2 * 4


def test_negative_curvature_is_kept() -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh()).double())
    model[0].weight.data.fill_(1.0)
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), -5.0, dtype=torch.float64)
    with packprop.backpack(extensions.DiagHessian(), extensions.DiagGGNExact()):
        packprop.extend(nn.MSELoss())(model(x), y).backward()
    t = torch.tensor(1.0, dtype=torch.float64).tanh()
    exact = 2 * (1 - t**2) ** 2 + 2 * (t + 5) * (-2 * t * (1 - t**2))
    assert_near(model[0].weight.diag_h.squeeze(), exact, "diag_h")
    assert model[0].weight.diag_h < 0 < model[0].weight.diag_ggn_exact


def test_nonlinearities_of_one_input_add_up() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 2).double(), nn.Linear(2, 2).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()

    def loss() -> Tensor:
        h = first(x)
        return nn.functional.mse_loss(last(h.tanh() + 2 * h.sigmoid() * 1), y)

    with packprop.record(), packprop.backpack(extensions.DiagHessian()):
        loss().backward()
    (gradient,) = torch.autograd.grad(loss(), first.weight, create_graph=True)
    rows = [torch.autograd.grad(g, first.weight, retain_graph=True)[0].flatten() for g in gradient.flatten()]
    assert_near(first.weight.diag_h.flatten(), torch.stack(rows).diagonal(), "diagonal", 1e-10)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_squares_of_factors_in_low_precision(dtype: torch.dtype) -> None:
    """Data in whole numbers, such as pixels, times a parameter: their squares do not fit their precision."""
    torch.manual_seed(0)
    pixels, y = (256 * torch.rand(6, 4)).to(dtype), torch.randn(6, 4).double()
    factor = nn.Parameter(0.01 * torch.rand(4).double())

    def loss(factor: Tensor) -> Tensor:
        return nn.functional.mse_loss((pixels * factor).tanh(), y)

    with packprop.backpack(extensions.DiagHessian(), extensions.BatchDiagHessian()):
        loss(factor).backward()
    hessian = torch.autograd.functional.hessian(loss, factor.detach())
    assert_near(factor.diag_h, hessian.diagonal(), "diag_h", 1e-12)
    assert_near(factor.diag_h_batch.sum(0), hessian.diagonal(), "diag_h_batch", 1e-12)
