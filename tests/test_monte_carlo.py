"""Drawn quantities: exact by enumerating the draws, one statistical test, repeatability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.cases import BY_NAME
from tests.references.oracle import Oracle
from tests.references.running import ROWS, Row, as_tensors, assert_near, backward, generator, results

SAMPLED = [row for row in ROWS if row.sampled]
each_row = pytest.mark.parametrize("row", SAMPLED, ids=lambda row: row.name)
LOSSES = ["ce-weights-ignore-smoothing", "ce-probabilities-weights", "mse-vector", "bce-pos-weight"]


def tensors(row: Row, name: str, seed: int | None, **options: Any) -> list[Tensor]:
    """What an extension saves, all parameters in order; ``None``: the global random state."""
    problem = BY_NAME[name].problem(3)
    source = None if seed is None else generator(seed)
    backward(problem, row(source, **options))
    return [t for v in results(problem, row.attribute).values() for t in as_tensors(v)]


@pytest.mark.parametrize("name", ["linear-deep", "mse-vector", "bce-vector", "own-coupled"])
@each_row
def test_a_generator_makes_draws_repeatable(row: Row, name: str) -> None:
    first, again = tensors(row, name, 1), tensors(row, name, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = tensors(row, name, 2)
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["linear-deep", "mse-vector", "bce-vector", "own-coupled"])
@each_row
def test_the_global_random_state_is_left_alone(row: Row, name: str) -> None:
    torch.manual_seed(3)
    tensors(row, name, 1)
    drawn = torch.rand(5)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(5))


@each_row
def test_without_a_generator_the_global_seed_decides(row: Row) -> None:
    torch.manual_seed(3)
    first = tensors(row, "linear-deep", None)
    torch.manual_seed(3)
    again = tensors(row, "linear-deep", None)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = tensors(row, "linear-deep", None)
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_number_of_draws() -> None:
    for draws in (1, 5):
        problem = BY_NAME["linear-deep"].problem(3)
        backward(problem, extensions.SqrtGGNMC(mc_samples=draws))
        for name, root in results(problem, "sqrt_ggn_mc").items():
            assert root.shape == (draws, 3, *problem.parameters[name].shape)


@pytest.mark.parametrize("name", [*LOSSES, "linear-deep", "language-model", "own-convex"])
def test_many_draws_come_near_the_exact_diagonal(name: str) -> None:
    """The sampler itself, by statistics: 20000 draws within 5 standard errors of the exact value.

    The standard error is measured: each row of the drawn root is one independent estimate.
    """
    draws = 20_000
    problem = BY_NAME[name].problem(2, BY_NAME[name].reductions[0])
    oracle = Oracle(problem)
    backward(problem, extensions.SqrtGGNMC(mc_samples=draws, generator=generator()))
    for parameter, root in results(problem, "sqrt_ggn_mc").items():
        estimates = draws * root.square().sum(1)
        error = (estimates.mean(0) - oracle.diag_ggn_exact[parameter]).abs()
        bound = 5 * estimates.std(0) / draws**0.5 + 1e-12
        assert (error <= bound).all(), (parameter, (error / bound).max())


def test_many_draws_come_near_the_expected_kronecker_factors() -> None:
    for name in ("linear-3d", "conv2d-deep"):
        problem = BY_NAME[name].problem(2)
        expected = Oracle(problem).kfac
        backward(problem, extensions.KFAC(mc_samples=20_000, generator=generator()))
        assert expected
        for parameter, known in expected.items():
            factors = problem.parameters[parameter].kfac
            assert_near(factors[0], known[0], f"B of {parameter}", 0.05)
            for factor, value in zip(factors[1:], known[1:], strict=True):
                assert_near(factor, value, f"A of {parameter}")


@pytest.mark.parametrize("name", ["linear-deep", "ce-map-interacting", "ce-sequence"])
def test_every_categorical_draw_is_the_gradient_at_some_label(name: str) -> None:
    """A drawn column is ``J^T u``, ``u = sqrt(scale) (p - e_y)``: solved for, it gives a label."""
    draws, size = 40, 2
    problem = BY_NAME[name].problem(size)
    backward(problem, extensions.SqrtGGNMC(mc_samples=draws, generator=generator()))
    root = torch.cat([s.flatten(2) for s in results(problem, "sqrt_ggn_mc").values()], 2)
    for n, jacobian in enumerate(Oracle(problem).jacobians):
        p = problem.output(n).detach().softmax(1)[0]
        terms = size * p[0].numel()
        u = torch.linalg.lstsq(jacobian.T, root[:, n].T).solution.T.reshape(draws, *p.shape)
        labels = p - u * (draws * terms) ** 0.5
        assert_near(labels, labels.round().clamp(0, 1), "one-hot labels", 1e-9)
        assert_near(labels.sum(1), torch.ones_like(labels[:, 0]), "one label each", 1e-9)
        assert len(labels.round().unique(dim=0)) > 1


# Exact laws of the draws, by enumerating them: `packprop.losses` says what a draw is made of.


def enumerated_hessian(columns: Tensor, probabilities: Tensor) -> Tensor:
    """``sum_m p_m u_m u_m^T`` for draws ``[m, n, t, c]`` with probabilities ``[m, n, t]``."""
    return torch.einsum("mnt,mntc,mntd->ntcd", probabilities, columns, columns)


@pytest.mark.parametrize("spread", [1.0, 20.0, 200.0])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_columns_of_cross_entropy_are_exact_however_sure_the_model_is(classes: int, spread: float) -> None:
    from packprop.functions.losses.roots import softmax_root

    logits, scale = spread * torch.randn(50, 2, classes).double(), torch.rand(50, 2).double()
    p = logits.softmax(-1)
    hessian = -p[..., :, None] * p[..., None, :]
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(p * (p @ (1 - torch.eye(classes).double())))  # p (1 - p), without cancellation
    root = softmax_root(logits, scale)
    assert root.entrywise is not None
    for each in (root, root.entrywise):
        chunks = [(start, min(start + 4, each.columns)) for start in range(0, each.columns, 4)]
        found = torch.stack([torch.cat([each.position(t, *chunk) for chunk in chunks]) for t in range(2)], 2)
        squares = torch.einsum("kntc,kntd->ntcd", found, found)
        assert_near(squares, scale[..., None, None] * hessian, "the Hessian", 1e-14)
        if each is root:
            torch.testing.assert_close(
                found.square().sum(0), scale[..., None] * diagonal, rtol=1e-13, atol=1e-200
            )


def test_enumerated_categorical_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from packprop.functions.losses.roots import softmax_root

    logits, scale = torch.randn(2, 3, 4).double(), torch.rand(2, 3).double()
    p = logits.softmax(-1)

    def one_of_each(flat: Tensor, draws: int, **_: Any) -> Tensor:
        assert_near(flat, p.reshape(-1, 4), "the probabilities that are sampled from")
        return torch.arange(draws).expand(flat.shape[0], draws)

    monkeypatch.setattr(torch, "multinomial", one_of_each)
    columns = softmax_root(logits, scale).draw(4, None)
    expected = scale[..., None, None] * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
    hessian = enumerated_hessian(columns, p.movedim(-1, 0))
    assert_near(hessian, expected, "the expected outer product")
    mean = torch.einsum("mnt,mntc->ntc", p.movedim(-1, 0), columns)
    assert_near(mean, torch.zeros_like(mean), "the expected draw", 1e-15, floor=1.0)


def test_enumerated_bernoulli_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from packprop.functions.losses.roots import bernoulli_root

    logits, scale = torch.randn(2, 3, 1).double(), torch.rand(2, 3).double()
    q = logits.sigmoid()[..., 0]
    uniform = torch.stack([torch.zeros(2, 3, 1), torch.ones(2, 3, 1)]).double()
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: uniform)
    columns = bernoulli_root(logits, scale).draw(2, None)
    hessian = enumerated_hessian(columns, torch.stack([q, 1 - q]))[..., 0, 0]
    assert_near(hessian, scale * q * (1 - q), "the expected outer product")


def test_enumerated_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    from packprop.functions.losses.roots import matrix_root

    factor = torch.randn(2, 3, 3).double()
    hessian = factor @ factor.mT
    signs = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).double()  # [8, k]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: signs[:, None].expand(8, 2, 3))
    columns = matrix_root(hessian).draw(8, None)
    weights = torch.full((8, 2, 1), 1 / 8).double()
    assert_near(enumerated_hessian(columns, weights)[:, 0], hessian, "the expected outer product")


def test_gaussian_draws_by_quadrature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes at plus and minus one integrate the square of a standard normal exactly."""
    from packprop.functions.losses.roots import gaussian_root

    scale = torch.rand(2, 3).double()
    nodes = torch.stack([torch.ones(2, 3, 1), -torch.ones(2, 3, 1)]).double()
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: nodes)
    columns = gaussian_root(torch.zeros(2, 3, 1).double(), scale).draw(2, None)
    weights = torch.full((2, 2, 3), 0.5).double()
    hessian = enumerated_hessian(columns, weights)[..., 0, 0]
    assert_near(hessian, 2 * scale, "the expected outer product")


def test_draws_of_one_backward_pass_are_shared_and_of_two_are_not() -> None:
    model = packprop.extend(nn.Linear(3, 2).double())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(6, 3).double(), torch.randint(2, (6,))
    found = []
    for _ in range(2):
        with packprop.backpack(extensions.DiagGGNMC(), extensions.SqrtGGNMC()):
            loss_function(model(x), y).backward()
        root = model.weight.sqrt_ggn_mc
        assert_near(model.weight.diag_ggn_mc, root.square().sum((0, 1)), "the shared draw")
        found.append(root)
    assert not torch.equal(*found)
