"""Hessian diagonals of every case against the oracle, by every way that they can be taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop import extensions
from packprop.curvature import routes
from packprop.curvature.output_diagonals import OutputDiagonals
from packprop.curvature.shared_rows import SharedRows
from packprop.engine import column_sweeps, hessian
from packprop.errors import PackpropError
from tests.cases import BY_NAME, CASES, Case
from tests.oracle import Oracle
from tests.running import assert_all_near, assert_near, backward, results

# What PyTorch itself has no second derivatives of.
NOT_TWICE = {
    "cdist": "_cdist_backward",
    "multi-margin": "multi_margin_loss_backward",
    "multilabel-margin": "multilabel_margin_loss_backward",
    "checkpoint-reentrant": "use_reentrant=False",
    # It has one, and a wrong one.
    "weight-norm": "WeightNormInterface",
    "weight-norm-convolution": "WeightNormInterface",
    "weight-norm-hook": "WeightNormInterface",
    "weight-norm-twice": "WeightNormInterface",
}
EVERY = [
    pytest.param(case, size, reduction, id=f"{case.name}-n{size}-{reduction}")
    for case in CASES
    if not case.refuses and case.name not in NOT_TWICE and not case.name.startswith("embedding-bag")
    for size in case.sizes
    for reduction in case.reductions
]


@pytest.mark.covers("DiagHessian", "BatchDiagHessian")
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


@pytest.mark.parametrize("name", NOT_TWICE)
def test_what_cannot_be_differentiated_twice_is_named(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    with pytest.raises(PackpropError, match=NOT_TWICE[name]):
        backward(problem, extensions.DiagHessian())


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


@pytest.mark.parametrize("case", [*SMOKE, *AFFINE], ids=lambda case: case.name)
@pytest.mark.parametrize("way", ["output", "parameter"])
def test_all_ways_lead_to_the_same(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken for known, the way that needs to know nothing gives the same."""
    if way == "output":
        monkeypatch.setattr(routes, "kind_of", lambda node, dependent: "nonlinear")
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


@pytest.mark.parametrize("at_once", [1, 2, 5, None])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_columns_of_elementwise_functions_in_chunks(
    kind: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of shared Jacobians and diagonals at outputs, whatever the chunks that they come in."""
    if at_once is not None:
        monkeypatch.setattr(
            column_sweeps.ColumnSweeps, "columns_at_once", lambda self, group, uses: min(at_once, group.count)
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


class Sigmoid(torch.autograd.Function):
    """A function of a user's own that has the name of one of torch's, and couples entries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.flip(1)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangents[0] * x.flip(1) + (cotangents[0] * x).flip(1)


def test_names_of_ones_own_functions_mean_nothing() -> None:
    torch.manual_seed(0)
    linear = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    with packprop.record():
        loss = nn.functional.mse_loss(Sigmoid.apply(linear(x)), y)
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward()

    def value(weight: Tensor) -> Tensor:
        z = nn.functional.linear(x, weight, linear.bias.detach())
        return nn.functional.mse_loss(z * z.flip(1), y)

    dense = torch.autograd.functional.hessian(value, linear.weight.detach()).reshape(6, 6)
    assert_near(linear.weight.diag_h, dense.diagonal().view(2, 3), "diag_h")


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("pool", [nn.Identity, lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2)])
@pytest.mark.parametrize("bend", [nn.Sigmoid, nn.ELU, nn.ReLU])
def test_create_graph_with_activations_and_pooling(bend: Any, pool: Any) -> None:
    """A root of the curvature would have no derivative where pooling lets no gradient through."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), bend(), pool(), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(2, 1, 5, 5, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y)  # which says how wide it is
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(nn.functional.mse_loss(model(x), y), parameters, create_graph=True)
    expected = [
        torch.stack(
            [
                torch.autograd.grad(g, p, create_graph=True)[0].flatten()[place]
                for place, g in enumerate(slope.flatten())
            ]
        )
        for p, slope in zip(parameters, slopes, strict=True)
    ]
    known = torch.autograd.grad(
        torch.cat(expected).square().sum(), parameters, allow_unused=True, materialize_grads=True
    )
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())(model(x), y)
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward(create_graph=True)
    found = torch.autograd.grad(
        sum(p.diag_h.square().sum() for p in parameters),
        parameters,
        allow_unused=True,
        materialize_grads=True,
    )
    for p, diagonal, slope, wanted in zip(parameters, expected, found, known, strict=True):
        assert_near(p.diag_h.flatten(), diagonal, "diag_h", 1e-9)
        assert_near(slope, wanted, "its gradient", 1e-9)
        p.grad = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["linear-deep", "layernorm-shared", "tied-transpose", "conv2d-deep"])
def test_precisions(name: str, dtype: torch.dtype) -> None:
    problem = BY_NAME[name].problem(3, dtype=dtype)
    exact = Oracle(BY_NAME[name].problem(3)).diag_h_batch
    backward(problem, extensions.DiagHessian(), extensions.BatchDiagHessian())
    largest = max(value.abs().max().item() for value in exact.values())
    for key, rows in results(problem, "diag_h_batch").items():
        assert rows.dtype == results(problem, "diag_h")[key].dtype == dtype
        assert_near(rows, exact[key], key, 1e-4 if dtype == torch.float32 else 0.2, largest)


def test_a_branch_that_was_summed_is_refused() -> None:
    model = packprop.extend(nn.Linear(3, 2))
    outputs = model(torch.randn(4, 3))
    penalty = packprop.eager_backward(lambda f: f.square().sum(), outputs)
    loss = packprop.extend(nn.MSELoss())(outputs, torch.zeros(4, 2)) + penalty
    with pytest.raises(PackpropError, match="eager_backward"), packprop.backpack(extensions.DiagHessian()):
        loss.backward()


def test_the_second_derivative_of_normalised_weights_is_wrong_in_pytorch() -> None:
    """Should this fail, `is_wrong_in_second_order` has nothing left to refuse."""
    v, g = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 1, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)

    def value(v: Tensor) -> Tensor:
        return (x @ torch._weight_norm(v, g, 0).T).tanh().square().sum()

    dense = torch.autograd.functional.hessian(value, v).reshape(12, 12)
    by_hand = torch.autograd.functional.hessian(
        lambda v: (x @ (g * v / v.norm(dim=1, keepdim=True)).T).tanh().square().sum(), v
    ).reshape(12, 12)
    assert (dense - by_hand).abs().max() > 1e-2 * by_hand.abs().max()


def test_other_layers_are_not_refused_for_a_normalised_weight() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()
    )
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    found = packprop.coverage(model, (x, y)).parameters
    assert found["2.parametrizations.weight.original1"].hessian == "refused"
    assert found["0.weight"].hessian == found["2.bias"].hessian == "swept"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("parametrizations" not in name)
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())(model(x), y)
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward()
    assert model[0].weight.diag_h.shape == (4, 3)


def test_coverage_says_which_way() -> None:
    problem = BY_NAME["vision-transformer-hand-written"].problem(2)
    found = packprop.coverage(problem.model, (problem.inputs, problem.targets)).parameters
    assert found["mlp.0.weight"].hessian == "swept"
    assert found["attn.qkv.weight"].hessian == "output"
    assert found["pos_embed"].hessian == "parameter"


def diagonal_of(value: Any, parameter: Tensor) -> Tensor:
    """By double backward, entry by entry ``[p]``."""
    (slope,) = torch.autograd.grad(value(), parameter, create_graph=True)
    rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in slope.flatten()]
    return torch.stack(rows).diagonal()


class Blocks(nn.Module):
    """Positions of each sample mixed by a matrix of its own, all of them blocks of one."""

    def __init__(self, samples: int, positions: int) -> None:
        super().__init__()
        self.samples = samples
        self.embed, self.read = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("mix", torch.block_diag(*torch.randn(samples, positions, positions)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix @ self.embed(x.flatten(0, 1)))
        return self.read(y.unflatten(0, (self.samples, -1)).mean(1))


@pytest.mark.parametrize("asked", [extensions.DiagHessian(), extensions.BatchDiagHessian()])
def test_a_product_over_the_axis_of_samples_has_a_jacobian_for_each(asked: Any) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Blocks(3, 2).double())
    x, y = torch.randn(3, 2, 3, dtype=torch.float64), torch.tensor([0, 2, 1])

    def value() -> Tensor:
        with packprop.record():
            return nn.functional.cross_entropy(model(x), y)

    root = value()
    with packprop.backpack(asked):
        root.backward()
    for name, parameter in model.named_parameters():
        found = getattr(parameter, asked.savefield)
        found = found.sum(0) if asked.name == "BatchDiagHessian" else found
        assert_near(found.flatten(), diagonal_of(value, parameter), name)


class OneEach(nn.Module):
    """Nonlinear functions of one number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.shift, self.scale = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * torch.sigmoid(self.layer(x).squeeze(-1) + self.shift))


@pytest.mark.parametrize("samples", [1, 4])
def test_one_number_for_each_sample(samples: int) -> None:
    torch.manual_seed(0)
    model = packprop.extend(OneEach().double())
    x, y = torch.randn(samples, 3, dtype=torch.float64), torch.randn(samples, dtype=torch.float64)

    def value() -> Tensor:
        with packprop.record():
            return nn.functional.mse_loss(model(x), y)

    root = value()
    with packprop.backpack(extensions.DiagHessian()):
        root.backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.diag_h.flatten(), diagonal_of(value, parameter), name)


COUPLINGS: dict[str, Any] = {
    "square of the loss": lambda f, y: nn.functional.cross_entropy(f, y) ** 2,
    "negative": lambda f, y: -nn.functional.cross_entropy(f, y),
    "over samples": lambda f, y: f.logsumexp((0, 1)),
    "with a penalty": lambda f, y: nn.functional.cross_entropy(f, y) + 0.1 * f.sum().square(),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_whatever_is_made_of_the_loss(name: str) -> None:
    """The diagonal is that of the root; where samples are coupled there, they have none of their own."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1])

    def value() -> Tensor:
        with packprop.record():
            return COUPLINGS[name](model(x), y)

    root = value()
    with packprop.backpack(extensions.DiagHessian()):
        root.backward()
    for key, parameter in model.named_parameters():
        (slope,) = torch.autograd.grad(value(), parameter, create_graph=True)
        rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in slope.flatten()]
        assert_near(parameter.diag_h.flatten(), torch.stack(rows).diagonal(), key)
    root = value()
    if name == "negative":
        with packprop.backpack(extensions.BatchDiagHessian()):
            root.backward()
        for parameter in model.parameters():
            assert_near(parameter.diag_h_batch.sum(0), parameter.diag_h, name)
    else:
        with (
            pytest.raises(PackpropError, match="between samples"),
            packprop.backpack(extensions.BatchDiagHessian()),
        ):
            root.backward()
