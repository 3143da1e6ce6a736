"""Clipped gradients: those of loops over samples, case by case, whatever shares a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.memory import LiveBytes
from packprop.engine.passes.chunks import ChunkSizes
from packprop.errors import BadInput, PackpropError, PackpropWarning
from tests.cases import CASES, Case
from tests.references.oracle import Named
from tests.references.running import assert_all_near, assert_near, forward, reference
from tests.selection import STRUCTURES, often, one_in

CLIPPED = [case for case in CASES if not case.refuses]


def expected_sums(
    rows: Named, whole: Named, own: float, bounds: dict[str, float], shares: Callable[[str], str]
) -> tuple[Named, Named]:
    """Norms of each group ``[n]`` and clipped sums ``[*p]``, from rows; what is no sample's stays as it is."""
    groups: dict[str, list[str]] = {}
    for name in rows:
        groups.setdefault(shares(name), []).append(name)
    norms, sums = {}, {}
    for group, names in groups.items():
        squares = torch.stack([rows[name].reshape(len(rows[name]), -1).square().sum(1) for name in names])
        norms[group] = own * squares.sum(0).sqrt()
        factors = (bounds[group] / norms[group]).clamp(max=1)
        for name in names:
            clipped = torch.tensordot(factors, rows[name], 1)
            sums[name] = whole[name] - rows[name].sum(0) + clipped
    return norms, sums


def median_bounds(rows: Named, own: float, shares: Callable[[str], str]) -> dict[str, float]:
    """Bounds that about half of the samples exceed."""
    norms, _ = expected_sums(rows, rows, own, dict.fromkeys(map(shares, rows), 1.0), shares)
    return {group: max(norm.median().item(), 1e-3) for group, norm in norms.items()}


def gradients(model: nn.Module) -> Named:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


def whole(name: str) -> str:
    return ""


def itself(name: str) -> str:
    return name


LOSS = packprop.extend(nn.CrossEntropyLoss())

EVERY = [(case, "parameter" if place % 2 else "all") for place, case in enumerate(CLIPPED)]
EVERY += [(case, "parameter") for case, per in EVERY if per == "all" and "smoke" in case.tags]


@one_in(3)
@often(lambda case, per: case.name in STRUCTURES)
@pytest.mark.parametrize(("case", "per"), EVERY, ids=lambda value: getattr(value, "name", value))
def test_cases(case: Case, per: Any) -> None:
    size, reduction = case.sizes[-1], case.reductions[0]
    oracle = reference(case.name, size, reduction)
    rows, own = oracle.grad_batch, size if reduction == "mean" else 1
    shares = itself if per == "parameter" else whole
    bounds = median_bounds(rows, own, shares)
    norms, sums = expected_sums(rows, oracle.whole_gradient, own, bounds, shares)
    problem = case.problem(size, reduction)
    loss = forward(problem, case.record)
    asked: Any = bounds[""] if per == "all" else bounds
    reduced: Any = "mean" if reduction == "mean" else "sum"
    with packprop.clipped_gradients(max_norm=asked, per=per, reduction=reduced) as clipped:
        loss.backward()
    assert_all_near(gradients(problem.model), sums, f"clipped by {per}")
    largest = clipped.norms.max().item()
    for name, found in (clipped.layer_norms or {"": clipped.norms}).items():
        assert_near(found, norms[name], f"norms of {name}", floor=largest)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return packprop.extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=source, dtype=torch.double), torch.arange(n) % 3


def rows_by_loop(model: nn.Module, x: Tensor, y: Tensor) -> Named:
    """Gradients of each sample's own loss."""
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), [*model.parameters()])
        for n in range(len(x))
    ]
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))


def test_modules_share_bounds_of_their_own() -> None:
    model, (x, y) = perceptron(), batch()
    rows = rows_by_loop(model, x, y)
    norms, _ = expected_sums(rows, rows, 1, {"0": 1.0, "2": 1.0}, lambda name: name[0])
    bounds = {"0": norms["0"].median().item(), "2": 0.1}
    zeros = {name: row.sum(0) for name, row in rows.items()}
    _, sums = expected_sums(rows, zeros, 1, bounds, lambda name: name[0])
    with packprop.clipped_gradients(max_norm=bounds, per="module") as clipped:
        LOSS(model(x), y).backward()
    assert_all_near({k: 6 * p.grad for k, p in model.named_parameters() if p.grad is not None}, sums, "grad")
    assert_all_near(clipped.layer_norms, norms, "norms")
    assert_near(clipped.norms, torch.stack([*norms.values()]).norm(dim=0), "all norms")
    share = sum((norms[name] > bound).double().mean() for name, bound in bounds.items()) / 2
    assert clipped.fraction.item() == pytest.approx(float(share))
    assert 0 < clipped.fraction < 1
    assert clipped.bound.item() == pytest.approx(sum(bound**2 for bound in bounds.values()) ** 0.5)


def test_a_model_that_was_never_extended() -> None:
    model, (x, y) = nn.Linear(4, 3).double(), batch()
    rows = rows_by_loop(model, x, y)
    norms = sum(each.flatten(1).square().sum(1) for each in rows.values())
    assert isinstance(norms, Tensor)
    factors = (0.5 / norms.sqrt()).clamp(max=1)
    with packprop.clipped_gradients(max_norm=0.5) as clipped:
        F.cross_entropy(model(x), y).backward()
    assert_near(clipped.norms, norms.sqrt(), "norms")
    for name, each in rows.items():
        clipped_sum = torch.einsum("n,n...->...", factors, each) / len(x)
        assert_near(model.get_parameter(name).grad, clipped_sum, name)


def test_what_is_not_clipped_is_a_plain_pass() -> None:
    model, (x, y) = perceptron(), batch()
    LOSS(model(x), y).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with packprop.clipped_gradients(max_norm=float("inf")) as clipped:
        LOSS(model(x), y).backward()
    assert_all_near(gradients(model), {name: 2 * grad for name, grad in plain.items()}, "accumulated")
    assert clipped.fraction == 0


@pytest.mark.parametrize(
    ("loss", "reduction", "own"),
    [
        (lambda f, y: F.cross_entropy(f, y), None, 6),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum"), None, 1),
        (lambda f, y: F.cross_entropy(f, y, reduction="none").mean(), "mean", 6),
        (lambda f, y: F.cross_entropy(f, y, reduction="none").sum(), "sum", 1),
        (lambda f, y: F.cross_entropy(f, y) + F.mse_loss(f, f.detach() + 1), None, 6),
    ],
    ids=["mean", "sum", "own-mean", "own-sum", "two"],
)
def test_own_losses_of_samples(loss: Any, reduction: Any, own: int) -> None:
    model, (x, y) = perceptron(), batch()
    with packprop.record():
        value = loss(model(x), y)
    with packprop.backpack(extensions.BatchL2Grad()):
        value.backward(retain_graph=True)
    squares = sum(p.batch_l2 for p in model.parameters())  # type: ignore[attr-defined]  # saved by the pass
    model.zero_grad()
    with packprop.clipped_gradients(max_norm=1.0, reduction=reduction) as clipped:
        value.backward()
    assert_near(clipped.norms, own * squares.sqrt(), "norms")  # type: ignore[attr-defined]  # sum() may be 0


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0), np.float32(8.0)], ids=["number", "tensor", "numpy"])
def test_scaled_losses(scale: Any) -> None:
    model, (x, y) = perceptron(), batch()
    bound: Any = np.float32(0.5)
    with packprop.clipped_gradients(max_norm=0.5) as plain:
        LOSS(model(x), y).backward()
    expected = {name: 8 * gradient for name, gradient in gradients(model).items()}
    model.zero_grad()
    with packprop.clipped_gradients(max_norm=bound, loss_scale=scale) as scaled:
        (LOSS(model(x), y) * 8).backward()
    assert_all_near(gradients(model), expected, "grad")
    assert_near(scaled.norms, plain.norms, "norms")


def test_a_penalty_is_not_clipped() -> None:
    model, (x, y) = perceptron(), batch()
    with packprop.clipped_gradients(max_norm=0.1):
        LOSS(model(x), y).backward()
    expected = {
        name: gradient + 2 * model.get_parameter(name).detach() for name, gradient in gradients(model).items()
    }
    model.zero_grad()
    with packprop.clipped_gradients(max_norm=0.1) as clipped:
        (LOSS(model(x), y) + sum(p.square().sum() for p in model.parameters())).backward()
    assert_all_near(gradients(model), expected, "grad")
    rows = rows_by_loop(model, x, y)
    norms, _ = expected_sums(rows, rows, 1, {"": 1.0}, whole)
    assert_near(clipped.norms, norms[""], "norms")


def test_extensions_beside_are_those_of_the_gradient_before_clipping() -> None:
    model, (x, y) = perceptron(), batch()
    asked, names = [extensions.BatchL2Grad(), extensions.DiagGGNExact()], ("batch_l2", "diag_ggn_exact")
    with packprop.backpack(*asked):
        LOSS(model(x), y).backward()
    expected = {name: [getattr(p, name) for p in model.parameters()] for name in names}
    model.zero_grad()
    with packprop.clipped_gradients(*asked, max_norm=0.1) as clipped:
        LOSS(model(x), y).backward()
    for name, values in expected.items():
        for parameter, value in zip(model.parameters(), values, strict=True):
            assert_near(getattr(parameter, name), value, name)
    assert_near(clipped.norms, 6 * sum(expected["batch_l2"]).sqrt(), "norms")


def test_a_graph_that_is_retained_and_one_that_is_freed() -> None:
    model, (x, y) = perceptron(), batch()
    value = LOSS(model(x), y)
    with packprop.clipped_gradients(max_norm=0.1):
        value.backward(retain_graph=True)
        once = {name: gradient.clone() for name, gradient in gradients(model).items()}
        value.backward()
        assert_all_near(gradients(model), {name: 2 * gradient for name, gradient in once.items()}, "grad")
        with pytest.raises((PackpropError, RuntimeError)):
            value.backward()


def test_few_samples_at_a_time(monkeypatch: Any) -> None:
    model = packprop.extend(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 30)).double()
    )
    torch.manual_seed(0)
    x, y = torch.randn(7, 2, 4, 4, dtype=torch.double), torch.arange(7)
    found = []
    for sizes in (ChunkSizes(2**30, 2**30), ChunkSizes(0, 0, held=0)):
        monkeypatch.setattr("packprop.engine.context.default_chunk_sizes", lambda device, sizes=sizes: sizes)
        model.zero_grad()
        with packprop.clipped_gradients(max_norm=0.5) as clipped:
            LOSS(model(x), y).backward()
        found.append({**gradients(model), "norms": clipped.norms})
    assert_all_near(found[1], found[0], "in chunks")


def test_hooks_on_parameters_see_clipped_gradients() -> None:
    model, (x, y) = perceptron(), batch()
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with packprop.clipped_gradients(max_norm=0.1):
        LOSS(model(x), y).backward()
    handle.remove()
    assert_near(seen[0], gradients(model)["0.weight"], "seen")
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    model, (x, y) = perceptron(), batch()
    x = x.to(dtype)
    model.to(dtype).double()
    with packprop.clipped_gradients(max_norm=0.5) as exact:
        LOSS(model(x.double()), y).backward()
    expected = gradients(model)
    model.zero_grad()
    model.to(dtype)
    with packprop.clipped_gradients(max_norm=0.5) as low:
        LOSS(model(x), y).backward()
    assert low.norms.dtype == torch.float32
    assert_near(low.norms, exact.norms, "norms", 20 * torch.finfo(dtype).eps)
    for name, gradient in gradients(model).items():
        assert gradient.dtype == dtype
        assert_near(gradient, expected[name], name, 20 * torch.finfo(dtype).eps)


def test_samples_without_gradient_and_those_that_are_not_finite() -> None:
    model, (x, y) = perceptron(), batch()
    weights = torch.tensor([0.0, 1, 1, 1, 1, 1], dtype=torch.double)
    with packprop.record():
        value = (F.cross_entropy(model(x), y, reduction="none") * weights).sum()
    with packprop.clipped_gradients(max_norm=0.1, reduction="sum") as clipped:
        value.backward()
    assert clipped.norms[0] == 0
    assert clipped.fraction.item() == pytest.approx(5 / 6)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    x[1] = torch.nan
    with pytest.warns(PackpropWarning, match="NaN"), packprop.clipped_gradients(max_norm=0.1):
        LOSS(model(x), y).backward()


def test_what_has_no_factor_becomes_nan() -> None:
    """Squares of finite gradients overflow; a bound that is a tensor turns out to be no positive number."""
    model, (x, y) = perceptron().float(), batch()
    with pytest.warns(PackpropWarning, match="NaN"), packprop.clipped_gradients(max_norm=0.1) as clipped:
        (LOSS(model(x.float()), y) * 1e21).backward()
    assert clipped.norms.isinf().all()
    assert all(gradient.isnan().all() for gradient in gradients(model).values())
    for bound in (-1.0, 0.0, float("nan")):
        model.zero_grad()
        with packprop.clipped_gradients(max_norm=torch.tensor(bound)):
            LOSS(model(x.float()), y).backward()
        assert all(gradient.isnan().all() for gradient in gradients(model).values()), bound


class Stop(torch.autograd.Function):
    """Hands its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        return None


def test_no_parameter_is_reached() -> None:
    model, (x, y) = perceptron(), batch()
    with packprop.clipped_gradients(max_norm=0.1) as clipped:
        LOSS(Stop.apply(model(x)), y).backward()  # type: ignore[no-untyped-call]  # torch's own
    assert clipped.norms.tolist() == [0.0] * 6
    assert all(p.grad is None for p in model.parameters())


def test_no_sample_has_a_gradient_of_its_own_in_memory() -> None:
    """A wide layer's gradients of 64 samples would take 64 MiB; what is kept is as large as its outputs."""
    model = packprop.extend(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)))
    x, y = torch.randn(64, 512), torch.arange(64)
    for measured in (False, True):
        loss = LOSS(model(x), y)
        with LiveBytes() as live, packprop.clipped_gradients(max_norm=0.1):
            loss.backward()
        if measured:
            assert live.peak < 8 * 2**20


class Tables(nn.Module):
    """Two tables, one of them for bags, and a head."""

    def __init__(self, sparse: bool, bagged: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 3, padding_idx=0, sparse=sparse).double()
        self.bags = nn.EmbeddingBag(20, 3, mode="sum", sparse=sparse).double()
        self.head = nn.Linear(3, 4).double()
        self.bagged = bagged

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.bags(x) if self.bagged else self.words(x).sum(1))
        return logits


@pytest.mark.parametrize("bagged", [False, True])
def test_sparse_gradients_of_tables(bagged: bool) -> None:
    x, y = torch.tensor([[1, 5, 5], [2, 0, 7], [7, 9, 1], [0, 0, 1]]), torch.tensor([0, 1, 2, 3])
    models = [packprop.extend(Tables(sparse, bagged)) for sparse in (False, True)]
    for model in models:
        for _ in range(2):  # sparse gradients add up
            with packprop.clipped_gradients(max_norm=0.3):
                LOSS(model(x), y).backward()
    dense, sparse = (model.bags.weight.grad if bagged else model.words.weight.grad for model in models)
    assert (dense.is_sparse, sparse.is_sparse) == (False, True)
    torch.testing.assert_close(sparse.to_dense(), dense)
    assert {*sparse.coalesce().indices()[0].tolist()} <= {*x.unique().tolist()}
    for model in models:  # an optimizer that takes no other
        table = model.bags.weight if bagged else model.words.weight
        optimizer: Any = torch.optim.SparseAdam if table.grad.is_sparse else torch.optim.Adam
        optimizer([table], lr=0.1).step()
    rows = dense.any(1)
    tables = [model.bags.weight if bagged else model.words.weight for model in models]
    torch.testing.assert_close(tables[1][rows], tables[0][rows], atol=1e-3, rtol=0)  # epsilon is elsewhere


def test_a_sparse_table_that_is_used_otherwise_too() -> None:
    """As torch's own: a sum of sparse and dense gradients is dense."""
    model = packprop.extend(Tables(True, False))
    x, y = torch.tensor([[1, 5], [2, 3]]), torch.tensor([4, 0])
    with packprop.record():
        value = LOSS(model.words(x).sum(1) @ model.words.weight.T, y)
    with packprop.clipped_gradients(max_norm=0.3):
        value.backward()
    assert model.words.weight.grad is not None
    assert not model.words.weight.grad.is_sparse


def test_as_opacus() -> None:
    opacus = pytest.importorskip("opacus")
    x, y = batch(8)
    rows = rows_by_loop(perceptron(), x, y)
    for per, shares, clipping in (("all", whole, "flat"), ("parameter", itself, "per_layer")):
        bounds = median_bounds(rows, 1, shares)
        model, asked = perceptron(), bounds[""] if per == "all" else bounds
        with packprop.clipped_gradients(max_norm=asked, per=per) as clipped:  # type: ignore[arg-type]  # a str from a tuple
            LOSS(model(x), y).backward()
        assert 0 < clipped.fraction < 1
        peer = opacus.GradSampleModule(packprop.restore(perceptron()))
        optimizer = opacus.optimizers.get_optimizer_class(clipping, distributed=False)(
            torch.optim.SGD(peer.parameters(), 1.0),
            noise_multiplier=0.0,
            max_grad_norm=asked if per == "all" else [*bounds.values()],
            expected_batch_size=8,
        )
        F.cross_entropy(peer(x), y).backward()
        optimizer.pre_step()
        for (name, gradient), theirs in zip(gradients(model).items(), peer.parameters(), strict=True):
            assert_near(gradient, theirs.grad, name, 1e-5)  # it adds 1e-6 to norms


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 0}, "no positive number"),
        ({"max_norm": -1.0}, "no positive number"),
        ({"max_norm": float("nan")}, "no positive number"),
        ({"max_norm": "1"}, "no positive number"),
        ({"max_norm": torch.ones(2)}, "no positive number"),
        ({"max_norm": {"0": 1.0, "2": True}, "per": "module"}, "for '2'"),
        ({"max_norm": {"0": 1.0}}, "one bound"),
        ({"max_norm": 1.0, "per": "layer"}, "none of 'all', 'module', 'parameter'"),
        ({"max_norm": 1.0, "reduction": "none"}, "none of None, 'mean', 'sum'"),
        ({"max_norm": 1.0, "loss_scale": 0}, "clipped_gradients.loss_scale"),
    ],
    ids=str,
)
def test_bad_arguments(options: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        packprop.clipped_gradients(**options)
    with pytest.raises(BadInput, match="class, not an instance"):
        packprop.clipped_gradients(extensions.Variance, max_norm=1.0)  # type: ignore[arg-type]  # wrong on purpose


def test_passes_that_are_refused_leave_nothing() -> None:
    model, (x, y) = perceptron(), batch()
    refused: list[tuple[Callable[[], Tensor], dict[str, Any], dict[str, Any], str]] = [
        (lambda: LOSS(model(x), y), {}, {"create_graph": True}, "create_graph"),
        (lambda: LOSS(model(x), y), {}, {"inputs": [model[0].weight]}, "inputs"),
        (lambda: (model(x) ** 2).mean(), {}, {}, "mean or the sum"),
        (lambda: F.cross_entropy(model(x), y, reduction="none").mean(), {}, {}, "mean or the sum"),
        (lambda: LOSS(model(x.clone().requires_grad_()), y), {}, {}, "requires a gradient"),
        (lambda: LOSS(model(x), y), {"max_norm": {"0": 1.0}, "per": "module"}, {}, "module '2'"),
        (
            lambda: LOSS(model(x), y),
            {"max_norm": {"0": 1.0, "2": 1.0, "3": 1.0}, "per": "module"},
            {},
            "no module of this name",
        ),
        (lambda: F.cross_entropy(model(x).clone().log_softmax(0), y), {}, {}, "mixed"),
    ]
    for make, options, given, words in refused:
        x = x.detach()
        with packprop.record():
            value = make()
        context = packprop.clipped_gradients(**{"max_norm": 1.0, **options})
        with pytest.raises(PackpropError, match=words), context:
            value.backward(**given)
        assert all(p.grad is None and set(vars(p)) == set() for p in model.parameters()), words
        with pytest.raises(BadInput, match="no backward pass"):
            _ = context.norms
    handle = model[1].register_full_backward_hook(lambda *_: None)
    value = LOSS(model(x), y)
    with pytest.raises(PackpropError, match="hook"), packprop.clipped_gradients(max_norm=1.0):
        value.backward()
    handle.remove()
    mixing = packprop.extend(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    value = LOSS(mixing(x), y)
    with (
        pytest.raises(PackpropError, match="BatchNorm"),
        packprop.clipped_gradients(max_norm=1.0),
    ):
        value.backward()
    wave = packprop.extend(nn.Linear(4, 3, dtype=torch.complex128))
    with packprop.record():
        value = wave(x.to(torch.complex128)).abs().square().sum()
    with (
        pytest.raises(PackpropError, match="complex128"),
        packprop.clipped_gradients(max_norm=1.0, reduction="sum"),
    ):
        value.backward()
    with (
        pytest.warns(PackpropWarning, match=r"inside `with clipped_gradients"),
        packprop.clipped_gradients(max_norm=1.0),
    ):
        pass


def both_kinds(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y) + F.mse_loss(f, torch.zeros_like(f), reduction="sum")


@pytest.mark.parametrize(
    ("loss", "said", "name"),
    [
        (F.cross_entropy, "sum", "cross_entropy"),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum"), "mean", "cross_entropy"),
        (lambda f, y: 2 * F.cross_entropy(f, y), "sum", "cross_entropy"),
        (lambda f, y: F.cross_entropy(f, y) / 4, "sum", "cross_entropy"),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum") / len(y), "mean", "cross_entropy"),
        (both_kinds, "mean", "mse_loss"),
        (both_kinds, "sum", "cross_entropy"),
    ],
)
def test_a_reduction_that_a_known_loss_contradicts(loss: Any, said: Any, name: str) -> None:
    torch.manual_seed(0)
    model, x, y = packprop.extend(nn.Linear(3, 2)), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    other = "mean" if said == "sum" else "sum"
    with packprop.record():
        value = loss(model(x), y)
    words = f"reduction='{said}', and the loss {name}(.|\n)*it is a {other} over samples"
    with pytest.raises(BadInput, match=words), packprop.clipped_gradients(max_norm=1.0, reduction=said):
        value.backward()
    assert model.weight.grad is None


SOFT = torch.full((6, 2), 0.5)
SIGNS = torch.tensor([[1.0, -1.0]]).expand(6, 2)
OTHER_SPELLINGS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a mean over samples of sums": (
        lambda f, y: F.kl_div(f.log_softmax(1), SOFT[: len(f)], reduction="batchmean"),
        "mean",
    ),
    "size_average=False": (lambda f, y: F.cross_entropy(f, y, size_average=False), "sum"),
    "size_average=True": (lambda f, y: F.cross_entropy(f, y, size_average=True), "mean"),
    "reduce=True": (lambda f, y: F.mse_loss(f, SOFT[: len(f)], reduce=True), "mean"),
    "multi_margin_loss": (F.multi_margin_loss, "mean"),
    "multilabel_soft_margin_loss": (
        lambda f, y: F.multilabel_soft_margin_loss(f, SOFT[: len(f)], reduction="sum"),
        "sum",
    ),
    "gaussian_nll_loss": (
        lambda f, y: F.gaussian_nll_loss(f, SOFT[: len(f)], torch.ones(len(f), 2)),
        "mean",
    ),
    "hinge_embedding_loss": (lambda f, y: F.hinge_embedding_loss(f, SIGNS[: len(f)]), "mean"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", OTHER_SPELLINGS)
def test_a_reduction_is_known_however_it_is_spelled(name: str) -> None:
    """By ``batchmean``, by torch's older flags, and where what is divided by does not show."""
    torch.manual_seed(0)
    loss, kind = OTHER_SPELLINGS[name]
    model, x, y = packprop.extend(nn.Linear(3, 2)), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    expected = []
    for index in range(6):
        gradients = torch.autograd.grad(loss(model(x[index, None]), y[index, None]), [*model.parameters()])
        expected.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())

    def clipped(reduction: Any) -> Any:
        with packprop.record():
            value = loss(model(x), y)
        with packprop.clipped_gradients(max_norm=1.0, reduction=reduction) as context:
            value.backward()
        return context

    for said in (None, kind):
        torch.testing.assert_close(clipped(said).norms, torch.stack(expected))
    with pytest.raises(BadInput, match=f"it is a {kind} over samples"):
        clipped("sum" if kind == "mean" else "mean")


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        (F.cross_entropy, 1.0),
        (lambda f, y: F.cross_entropy(f, y) / 4, 1 / 4),
        (lambda f, y: 6 * F.cross_entropy(f, y), 6.0),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum"), 1.0),
        (lambda f, y: F.cross_entropy(f, y, reduction="sum") / 6, 1 / 6),
    ],
)
def test_the_advice_on_a_contradicted_reduction(loss: Any, scale: float) -> None:
    """Without ``reduction``, and with the factor put on by hand, norms are those of samples' losses."""
    torch.manual_seed(0)
    model, x, y = packprop.extend(nn.Linear(3, 2)), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    expected = []
    for one, target in zip(x.split(1), y.split(1), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(one), target), [*model.parameters()])
        expected.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    with packprop.record():
        value = loss(model(x), y)
    with packprop.clipped_gradients(max_norm=1.0, loss_scale=scale) as clipped:
        value.backward()
    torch.testing.assert_close(clipped.norms, torch.stack(expected))
