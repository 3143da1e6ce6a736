"""Passes over no samples, as Poisson sampling draws them: no rows, sums of zero, PyTorch's own gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.types import Extension
from tests.references.running import assert_near
from tests.selection import one_in, thorough


class First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.times)[0]


FLOATS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "linear-shared": (lambda: nn.Linear(3, 2, bias=False), (2, 4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, padding="same", dilation=2), (2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "instance-norm-1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 5)),
    "instance-norm-2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "instance-norm-3d": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 2, 2)),
    "layer-norm": (lambda: nn.LayerNorm([2, 3]), (4, 2, 3)),
    "rms-norm": (lambda: nn.RMSNorm([2, 3]), (4, 2, 3)),
    "batch-norm": (lambda: nn.BatchNorm1d(3).eval(), (3,)),
    "rnn": (lambda: First(nn.RNN(3, 2, batch_first=True)), (4, 3)),
    "gru": (lambda: First(nn.GRU(3, 2, 2, batch_first=True, bidirectional=True)), (4, 3)),
    "lstm": (lambda: First(nn.LSTM(3, 2, batch_first=True)), (4, 3)),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3), (5, 4)),
}

TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(7, 3, padding_idx=1),
    "embedding-bag": lambda: nn.EmbeddingBag(7, 3, mode="sum"),
}


def _made(name: str, samples: int) -> tuple[nn.Module, Tensor]:
    if name in TABLES:
        return TABLES[name]().double(), torch.randint(7, (samples, 4))
    make, shape = FLOATS[name]
    return make().double(), torch.randn(samples, *shape).double()


@one_in(3)
@pytest.mark.parametrize("samples", [0, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", [*FLOATS, *TABLES])
def test_layers(name: str, reduction: str, samples: int) -> None:
    """Rows, norms, products, sums and squares of each layer, with samples and without any."""
    model, x = _made(name, samples)
    try:
        plain = copy.deepcopy(model)(x)
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"PyTorch itself: {error}")
    reference, target = copy.deepcopy(model), torch.zeros_like(plain)
    packprop.extend(model)
    asked = [
        getattr(extensions, each)() for each in ("BatchGrad", "BatchL2Grad", "BatchDotGrad", "SumGradSquared")
    ]
    with packprop.backpack(*asked), packprop.record():
        F.mse_loss(model(x), target, reduction=reduction).backward()
    F.mse_loss(reference(x), target, reduction=reduction).backward()
    for (key, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad_batch.shape == (samples, *parameter.shape)
        assert parameter.batch_l2.shape == (samples,)
        assert parameter.batch_dot.shape == (samples, samples)
        assert parameter.sum_grad_squared.shape == parameter.shape
        assert torch.equal(parameter.grad, own.grad)
        assert_near(parameter.grad_batch.sum(0), own.grad, key)
        assert_near(parameter.sum_grad_squared, parameter.grad_batch.square().sum(0), key)


def _classifier() -> nn.Module:
    return packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def test_curvature_and_variance() -> None:
    model, done = _classifier(), []
    asked = [
        "Variance",
        "DiagGGNExact",
        "DiagGGNMC",
        "DiagHessian",
        "BatchDiagGGNExact",
        "SqrtGGNExact",
        "GGNMP",
    ]
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(
        *[getattr(extensions, name)() for name in asked], extension_hook=done.append, loss_scale=4.0
    ):
        (4 * loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64))).backward()
    for p in model.parameters():
        assert p.variance.isnan().all()
        for value in (p.diag_ggn_exact, p.diag_ggn_mc, p.diag_h, p.ggnmp(torch.ones_like(p))):
            assert torch.equal(value, torch.zeros_like(p))
        assert p.diag_ggn_exact_batch.shape == (0, *p.shape)
        assert p.sqrt_ggn_exact.shape == (2, 0, *p.shape)
    assert {id(module) for module in done} == {id(model[0]), id(model[2])}


@pytest.mark.parametrize("per", ["all", "parameter"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipped_gradients(reduction: str, per: str) -> None:
    """Zeros, to which noise can be added: the bound is known, and no sample was clipped."""
    model = _classifier()
    loss = packprop.extend(nn.CrossEntropyLoss(reduction=reduction))
    with packprop.clipped_gradients(extensions.BatchGrad(), max_norm=0.5, per=per) as clipped:
        loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64)).backward()
    assert clipped.norms.shape == (0,)
    assert_near(clipped.bound, torch.tensor(0.5 * (2 if per == "parameter" else 1)), "bound")
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
        assert parameter.grad_batch.shape == (0, *parameter.shape)


@pytest.mark.parametrize("beside", [[], ["BatchGrad"]], ids=["alone", "beside-rows"])
@pytest.mark.parametrize("asked", ["GGNMP", "HMP", "PCHMP"])
@pytest.mark.parametrize("name", TABLES)
def test_products_of_tables(name: str, asked: str, beside: list[str]) -> None:
    """Of zero, although PyTorch has no second derivative there, alone as well as beside rows."""
    table, x = _made(name, 0)
    flat = nn.Flatten() if name == "embedding" else nn.Identity()
    model = packprop.extend(nn.Sequential(table, flat, nn.Linear(12 if name == "embedding" else 3, 2).double()))
    loss = packprop.extend(nn.MSELoss())
    with packprop.backpack(*(getattr(extensions, each)() for each in [asked, *beside])):
        loss(model(x), torch.zeros(0, 2).double()).backward()
    for parameter in model.parameters():
        product = getattr(parameter, getattr(extensions, asked)().savefield)
        assert torch.equal(product(torch.ones_like(parameter)), torch.zeros_like(parameter))


def test_samples_that_come_second() -> None:
    model = packprop.extend(nn.Linear(3, 2), sample_axis=1)
    with packprop.backpack(extensions.BatchGrad()), packprop.record(sample_axis=1):
        F.mse_loss(model(torch.randn(4, 0, 3)), torch.zeros(4, 0, 2), reduction="sum").backward()
    assert model.weight.grad_batch.shape == (0, 2, 3)


ROWS: dict[str, tuple[Callable[[], Extension], tuple[int, ...]]] = {
    "grad_batch": (extensions.BatchGrad, (0, 4, 3)),
    "batch_l2": (extensions.BatchL2Grad, (0,)),
    "batch_dot": (extensions.BatchDotGrad, (0, 0)),
    "grad_batch_projected": (lambda: extensions.Projected(dimension=6), (0, 6)),
    "grad_batch_projected-kronecker": (lambda: extensions.Projected(dimension=6, kind="kronecker"), (0, 6)),
    "jac_batch": (extensions.BatchJacobian, (0, 10, 4, 3)),
    "jac_batch-outputs": (lambda: extensions.BatchJacobian(outputs=[3, 1]), (0, 2, 4, 3)),
    "sqrt_ggn_exact": (extensions.SqrtGGNExact, (10, 0, 4, 3)),
    "sqrt_ggn_mc": (lambda: extensions.SqrtGGNMC(3), (3, 0, 4, 3)),
    "diag_ggn_exact_batch": (extensions.BatchDiagGGNExact, (0, 4, 3)),
    "diag_ggn_mc_batch": (extensions.BatchDiagGGNMC, (0, 4, 3)),
    "diag_h_batch": (extensions.BatchDiagHessian, (0, 4, 3)),
    "sum_grad_squared": (extensions.SumGradSquared, (4, 3)),
    "sum_grad_squared_token": (lambda: extensions.SumGradSquared(per="token"), (4, 3)),
    "variance": (extensions.Variance, (4, 3)),
    "variance_token": (lambda: extensions.Variance(per="token"), (4, 3)),
    "diag_ggn_exact": (extensions.DiagGGNExact, (4, 3)),
    "diag_ggn_mc": (extensions.DiagGGNMC, (4, 3)),
    "diag_h": (extensions.DiagHessian, (4, 3)),
    "diag_h_mc": (extensions.DiagHessianMC, (4, 3)),
    "hmp": (extensions.HMP, (4, 3)),
    "ggnmp": (extensions.GGNMP, (4, 3)),
    "pchmp": (extensions.PCHMP, (4, 3)),
}
"""Attributes, what they are asked for by, and the shape for a weight ``[4, 3]`` and outputs ``[n, 5, 2]``."""

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse_loss": lambda out: F.mse_loss(out, torch.zeros_like(out), reduction="sum"),
    "own": lambda out: out.square().sum(),
}


@one_in(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ROWS)
def test_every_quantity(name: str, loss: str) -> None:
    """Alone and beside rows of gradients, of samples with positions."""
    make, shape = ROWS[name]
    if loss == "own" and (name == "ggnmp" or make().rows[0].seed.by_token):
        pytest.skip("a loss without a rule has neither, with samples or without")
    for beside in ([], [extensions.BatchGrad()]):
        model = _classifier()
        with packprop.backpack(make(), *beside), packprop.record():
            LOSSES[loss](model(torch.randn(0, 5, 3))).backward()
        parameter = model[0].weight
        value = getattr(parameter, name.partition("-")[0])
        value = value(torch.ones_like(parameter)) if callable(value) else value
        assert value.shape == shape
        if name == "variance":
            assert value.isnan().all()
        else:
            assert not value.any()


WITHOUT_VALUE: dict[str, Callable[[], Extension]] = {
    "KFAC": extensions.KFAC,
    "KFLR": extensions.KFLR,
    "KFRA": extensions.KFRA,
    "HBP": extensions.HBP,
    "EKFAC": extensions.EKFAC,
    "BatchGrad(per='token')": lambda: extensions.BatchGrad(per="token"),
    "BatchL2Grad(per='token')": lambda: extensions.BatchL2Grad(per="token"),
    "BatchDiagGGNExact(per='token')": lambda: extensions.BatchDiagGGNExact(per="token"),
}


@pytest.mark.parametrize("name", WITHOUT_VALUE)
def test_what_has_no_value_for_no_samples_is_refused(name: str) -> None:
    """By its name, also beside what has one; nothing is saved, and nothing added to gradients."""
    model, loss = _classifier(), packprop.extend(nn.CrossEntropyLoss())
    value = loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64))
    with (
        packprop.backpack(extensions.BatchGrad(), WITHOUT_VALUE[name]()),
        pytest.raises(packprop.PackpropError, match="the batch is empty") as raised,
    ):
        value.backward()
    assert raised.value.asked.startswith(name.partition("(")[0])
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters())
    with packprop.backpack(extensions.BatchGrad()):  # as the error says: without it
        loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64)).backward()
    assert all(len(p.grad_batch) == 0 for p in model.parameters())


def test_columns_that_cannot_be_counted_are_refused() -> None:
    """``[n * t, c]`` without rows does not say how many positions a sample has: a root has so many columns."""
    model = _classifier()
    for columns, name in ((extensions.SqrtGGNExact(), "SqrtGGNExact"), (extensions.SqrtGGNMC(2), None)):
        with packprop.backpack(columns), packprop.record():
            value = F.cross_entropy(model(torch.randn(0, 5, 3)).flatten(0, 1), torch.zeros(0).long())
            if name is None:
                value.backward()
                assert model[0].weight.sqrt_ggn_mc.shape == (2, 0, 4, 3)
                continue
            with pytest.raises(packprop.PackpropError, match="the batch is empty") as raised:
                value.backward()
            assert raised.value.asked.startswith(name)


def test_an_index_that_no_sample_has_is_refused() -> None:
    model = _classifier()
    with packprop.backpack(extensions.BatchGrad(subsampling=[0])), packprop.record():
        value = F.cross_entropy(model(torch.randn(0, 3)), torch.zeros(0).long())
        with pytest.raises(packprop.BadInput, match="the batch has 0 samples") as raised:
            value.backward()
    assert raised.value.instead == "leave subsampling out of this pass"
    with packprop.backpack(extensions.BatchGrad()), packprop.record():
        F.cross_entropy(model(torch.randn(0, 3)), torch.zeros(0).long()).backward()
    assert model[0].weight.grad_batch.shape == (0, 4, 3)


@pytest.mark.parametrize("name", ["diag_h", "diag_h_batch", "diag_h_mc", "hmp", "ggnmp", "grad_batch"])
def test_a_penalty_keeps_its_curvature(name: str) -> None:
    """No sample enters it: it is all that is left of the loss. Beside rows of samples it is refused."""
    make, _ = ROWS[name]
    sees = name in ("diag_h", "diag_h_mc", "hmp")
    for beside in ([], [extensions.BatchGrad()] if name != "ggnmp" else []):
        model = _classifier()
        parameter = model[0].weight
        with packprop.backpack(make(), *beside), packprop.record():
            loss = F.cross_entropy(model(torch.randn(0, 3)), torch.zeros(0).long(), reduction="sum")
            value = loss + 3 * parameter.square().sum()
            if sees and (beside or name == "diag_h"):
                with pytest.raises(packprop.PackpropError, match="the batch is empty") as raised:
                    value.backward()
                assert raised.value.asked.startswith(make().name)
                continue
            value.backward()
        assert_near(parameter.grad, 6 * parameter.detach(), "gradient")
        found = getattr(parameter, name)
        found = found(torch.ones_like(parameter)) if callable(found) else found
        assert_near(found, torch.full_like(found, 6.0 if sees else 0.0), name)


def test_values_are_differentiable_where_the_pass_is() -> None:
    model = _classifier()
    asked = [extensions.BatchGrad(), extensions.SumGradSquared(), extensions.BatchL2Grad()]
    with packprop.backpack(*asked), packprop.record():
        loss = F.cross_entropy(model(torch.randn(0, 3)), torch.zeros(0).long(), reduction="sum")
        loss.backward(create_graph=True)
    parameter = model[0].weight
    values = parameter.grad_batch, parameter.sum_grad_squared, parameter.batch_l2
    for value in values:
        (gradient,) = torch.autograd.grad(value.sum(), parameter, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(parameter))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.BatchDiagGGNExact,
        extensions.BatchDiagHessian,
        extensions.DiagGGNExact,
        extensions.Variance,
        extensions.SumGradSquared,
    ],
)
def test_samples_without_positions(make: Callable[[], Extension], axis: int) -> None:
    """Sequences of no length are samples, with zeros for gradients."""
    model, extension = packprop.extend(nn.Linear(3, 2), sample_axis=axis), make()
    shape = (4, 0, 3) if axis == 0 else (0, 4, 3)
    with packprop.backpack(extension), packprop.record(sample_axis=axis):
        LOSSES["mse_loss"](model(torch.randn(shape))).backward()
    value = getattr(model.weight, extension.savefield)
    leading = (4,) if any(row.over_n.grows for row in extension.rows) else ()
    assert value.shape == (leading if value.dim() == 1 else (*leading, 2, 3))
    assert not value.any()


def test_values_of_an_earlier_batch_are_replaced() -> None:
    model, loss = _classifier(), packprop.extend(nn.CrossEntropyLoss())
    for size in (4, 0, 3):
        with packprop.backpack(extensions.BatchGrad(), extensions.BatchL2Grad()):
            loss(model(torch.randn(size, 3)), torch.zeros(size, dtype=torch.int64)).backward()
        assert {len(p.grad_batch) for p in model.parameters()} == {size}
        assert {len(p.batch_l2) for p in model.parameters()} == {size}


REFUSED_BESIDE_NOTHING: dict[str, Callable[[], packprop.engine.context.Backpack]] = {
    "probes": lambda: packprop.backpack(extensions.BatchGrad(), probes=[0]),
    "clipping of the others": lambda: packprop.clipped_gradients(max_norm=1.0, probes=[0]),
}


@pytest.mark.parametrize("name", REFUSED_BESIDE_NOTHING)
def test_choices_of_samples_are_refused(name: str) -> None:
    model = _classifier()
    with REFUSED_BESIDE_NOTHING[name](), packprop.record():
        loss = F.cross_entropy(model(torch.randn(0, 3)), torch.zeros(0).long(), reduction="sum")
        with pytest.raises(packprop.PackpropError, match="the batch is empty"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_probes_without_entries_have_no_columns() -> None:
    """Samples are there, and nothing of them that a column could be fed in at."""
    model = packprop.extend(nn.Linear(3, 2))
    with packprop.backpack(extensions.DiagGGNExact(), probes=[0]), packprop.record():
        loss = LOSSES["mse_loss"](model(torch.randn(4, 0, 3)))
        with pytest.raises(packprop.PackpropError, match="no entries"):
            loss.backward()


def test_a_clipped_pass_beside_a_penalty_adds_its_gradient() -> None:
    model = _classifier()
    parameter = model[0].weight
    with packprop.clipped_gradients(max_norm=1e-3) as clipped, packprop.record():
        loss = F.cross_entropy(model(torch.randn(0, 3)), torch.zeros(0).long(), reduction="sum")
        (loss + parameter.square().sum()).backward()
    assert_near(parameter.grad, 2 * parameter.detach(), "gradient")
    assert clipped.norms.shape == (0,)
    assert clipped.fraction.isnan()


@thorough
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_compiled_steps(reduction: str) -> None:
    """Replays of empty batches are the passes that they stand for, between those of others."""
    asked = [extensions.BatchGrad, extensions.Variance, extensions.DiagGGNExact, extensions.SqrtGGNExact]
    model, reference = _classifier(), _classifier()
    reference.load_state_dict(model.state_dict())
    loss = nn.CrossEntropyLoss(reduction=reduction)
    step = packprop.compile(model, loss, *(make() for make in asked), backend="eager")
    for size in (0, 0, 0, 0, 4, 0, 0):
        x, y = torch.randn(size, 3), torch.zeros(size).long()
        for each in (model, reference):
            each.zero_grad()
        step(x, y)
        with packprop.backpack(*(make() for make in asked)), packprop.record():
            loss(reference(x), y).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert_near(mine.grad, other.grad, "gradient")
            for name in ("grad_batch", "diag_ggn_exact", "sqrt_ggn_exact"):
                assert_near(getattr(mine, name), getattr(other, name), name)
            assert bool(mine.variance.isnan().all()) == (size == 0)
    assert sum(kind.replays for kind in step.kinds) == 3
    with pytest.raises(packprop.PackpropError, match="the batch is empty"):
        packprop.compile(model, loss, extensions.KFAC(), backend="eager")(x, y)


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_without_entries_beside_another_one_adds_nothing(first: bool) -> None:
    """Its curvature has no columns."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double())
    x, y = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    asked = {
        "diag_ggn_exact": extensions.DiagGGNExact(),
        "diag_h": extensions.DiagHessian(),
        "kflr": extensions.KFLR(),
        "sqrt_ggn_exact": extensions.SqrtGGNExact(),
    }
    found = []
    for part in (0, None):
        loss, out = packprop.extend(nn.MSELoss(reduction="sum")), model(x)
        terms = [loss(out, y)] if part is None else [loss(out[:, :0], y[:, :0]), loss(out, y)]
        with packprop.backpack(*asked.values()):
            sum(terms if first else terms[::-1]).backward()
        found.append([p for parameter in model.parameters() for p in flat(parameter, asked)])
    for with_empty, alone in zip(*found, strict=True):
        torch.testing.assert_close(with_empty, alone)


def flat(parameter: Tensor, asked: Iterable[str]) -> list[Tensor]:
    values = [getattr(parameter, name) for name in asked]
    return [each for value in values for each in (value if isinstance(value, list) else [value])]
