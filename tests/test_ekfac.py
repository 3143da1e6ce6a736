"""Corrected eigenvalues beyond the case list: options, chunks, passes, and what is done with the result."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.algebra import kronecker
from packprop.algebra.factors import rotated_sum_sq
from packprop.engine import chunks, column_sweeps
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.memory.live import LiveBytes
from packprop.types import EXACT, INPUTS, Row
from tests.cases import BY_NAME
from tests.oracle import Oracle
from tests.running import assert_near, backward, check_eigen, results

STRUCTURES = [
    *("linear-deep", "linear-3d-square", "matmul-x-w", "matmul-w-xt-square", "einsum-heads", "tied-transpose"),
    *("conv2d-deep", "conv2d-groups", "conv2d-depthwise", "convtranspose2d-options", "convolution-twice"),
    *("embedding-grid", "embedding-bag-sum", "layernorm", "module-twice", "language-model", "lstm"),
]
APPROXIMATIONS = ["mixed", "expand", "reduce"]


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_approximation_chooses_the_eigenvectors(name: str, approximation: Any) -> None:
    problem = BY_NAME[name].problem(3)
    backward(
        problem,
        extensions.EKFAC(approximation=approximation, fisher="exact"),
        extensions.KFLR(approximation=approximation),
    )
    factors = results(problem, "kflr")
    for parameter, block in Oracle(BY_NAME[name].problem(3)).ggn_block.items():
        found = problem.parameters[parameter].ekfac
        check_eigen(found, block, factors[parameter], parameter, 1e-9, 1e-6)
        assert_near(kronecker.trace(found), block.trace(), "trace")


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", ["linear-deep", "conv2d-deep"])
def test_the_empirical_fisher(name: str, approximation: Any) -> None:
    """Rows of grad_batch carry 1/3 of the mean; the Fisher carries it once, their outer product twice."""
    problem = BY_NAME[name].problem(3)
    options = {"approximation": approximation, "fisher": "empirical"}
    backward(problem, extensions.EKFAC(**options), extensions.KFAC(**options))
    for parameter, rows in Oracle(BY_NAME[name].problem(3)).grad_batch.items():
        flat = rows.flatten(1)
        found = problem.parameters[parameter]
        check_eigen(found.ekfac, 3 * flat.T @ flat, found.kfac, parameter, 1e-9, 1e-6)


@pytest.mark.parametrize("name", ["linear-deep", "conv2d-deep"])
def test_nothing_with_these_eigenvectors_is_nearer(name: str) -> None:
    problem = BY_NAME[name].problem(4)
    backward(problem, extensions.EKFAC(fisher="exact"), extensions.KFLR())
    better = 0
    for parameter, block in Oracle(BY_NAME[name].problem(4)).ggn_block.items():
        found = problem.parameters[parameter]
        corrected = (kronecker.dense(found.ekfac) - block).norm()
        plain = (kronecker.dense(found.kflr) - block).norm()
        assert corrected <= plain + 1e-12
        better += bool(corrected < 0.99 * plain)
    assert better > 0


def test_many_draws_come_near_the_exact_eigenvalues() -> None:
    drawn, exact = BY_NAME["linear-deep"].problem(2), BY_NAME["linear-deep"].problem(2)
    backward(drawn, extensions.EKFAC(20_000, generator=torch.Generator().manual_seed(0)))
    backward(exact, extensions.EKFAC(fisher="exact"))
    for name, found in results(drawn, "ekfac").items():
        expected = kronecker.dense(exact.parameters[name].ekfac)
        assert_near(kronecker.dense(found), expected, name, 0.05)


# Passes and chunks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Sigmoid(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, 3)).double()


def step(*asked: Any, **options: Any) -> nn.Sequential:
    model, loss = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.randint(3, (6,))
    value = loss(model(x), y)
    with packprop.backpack(*asked, **options):
        value.backward()
    return model


def drawn(samples: int, **options: Any) -> extensions.EKFAC:
    return extensions.EKFAC(samples, generator=torch.Generator().manual_seed(1), **options)


def sweeps(monkeypatch: pytest.MonkeyPatch, *asked: Any) -> int:
    counted = []
    run = column_sweeps.sweep
    with monkeypatch.context() as patched:
        patched.setattr(column_sweeps, "sweep", lambda *a, **k: counted.append(1) or run(*a, **k))
        step(*asked)
    return len(counted)


def test_columns_are_swept_twice_only_where_they_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "COTANGENTS", 0)
    assert sweeps(monkeypatch, extensions.KFAC(), drawn(1)) == 2  # two seeds
    assert sweeps(monkeypatch, drawn(1)) == 1
    assert sweeps(monkeypatch, drawn(3)) == 6
    assert sweeps(monkeypatch, extensions.EKFAC(fisher="empirical")) == 1
    assert sweeps(monkeypatch, extensions.EKFAC(fisher="exact")) == 2 * sweeps(monkeypatch, extensions.KFLR())
    monkeypatch.setattr(chunks, "COTANGENTS", 64 * 2**20)
    assert sweeps(monkeypatch, drawn(3)) == 1


@pytest.mark.parametrize("options", [{"fisher": "exact"}, {"subsampling": [4, 1]}, {}], ids=str)
def test_chunks_change_no_number(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    expected = step(drawn(3, **options))
    for cotangents in (64 * 2**20, 0):
        for scratch in (8 * 2**20, 2000, 0):
            monkeypatch.setattr(chunks, "COTANGENTS", cotangents)
            monkeypatch.setattr(chunks, "SCRATCH", scratch)
            model = step(drawn(3, **options))
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert_near(
                    kronecker.dense(mine.ekfac), kronecker.dense(theirs.ekfac), f"{cotangents}, {scratch}"
                )


def test_the_first_pass_is_gone_when_the_hook_runs() -> None:
    seen = []

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            seen.append(parameter.ekfac)
            del parameter.ekfac

    model = step(extensions.EKFAC(fisher="exact"), extension_hook=hook)
    assert len(seen) == len(list(model.parameters()))
    assert all(isinstance(each, kronecker.Eigen) for each in seen)


def test_no_pass_holds_a_gradient_for_each_sample() -> None:
    torch.manual_seed(0)
    samples, width = 512, 256
    model = packprop.extend(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)))
    loss = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(samples, width), torch.randint(10, (samples,))
    counted = LiveBytes()
    with counted:
        value = loss(model(x), y)
        with packprop.backpack(extensions.EKFAC(fisher="exact")):
            value.backward()
    assert counted.peak < samples * width * width * 4 / 4


def test_groups_are_mixed_in_chunks() -> None:
    """A basis of all output channels mixes groups, so that rows are formed even at a single position."""
    torch.manual_seed(0)
    samples, channels = 512, 256
    model = packprop.extend(nn.Sequential(nn.Conv2d(channels, channels, 1, groups=2), nn.Flatten()))
    loss = packprop.extend(nn.MSELoss())
    x = torch.randn(samples, channels, 1, 1)
    counted = LiveBytes()
    with counted, packprop.backpack(extensions.EKFAC()):
        loss(model(x), torch.zeros(samples, channels)).backward()
    assert counted.peak < samples * model[0].weight.numel() * 4 / 2


def test_gradients_of_eigenvalues_hold_the_eigenvectors_fixed() -> None:
    """The trace does not depend on them: its gradient is exact."""
    problem, other = BY_NAME["linear-deep"].problem(2), BY_NAME["linear-deep"].problem(2)
    oracle = Oracle(other, create_graph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        backward(problem, extensions.EKFAC(fisher="exact"), create_graph=True)
    for name, parameter in problem.parameters.items():
        found = parameter.ekfac
        assert not any(vectors.requires_grad for vectors in found.vectors)
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        mine = torch.autograd.grad(kronecker.trace(found), list(problem.parameters.values()), **options)
        trace = oracle.ggn_block[name].trace()
        theirs = torch.autograd.grad(trace, list(other.parameters.values()), **options)
        for one, two in zip(mine, theirs, strict=True):
            assert_near(one, two, name, floor=1e-3)
    problem.model.zero_grad()


# The result


def test_helpers_agree_with_the_dense_matrix() -> None:
    problem = BY_NAME["conv2d-deep"].problem(3)
    backward(problem, extensions.EKFAC(fisher="exact"))
    for name, parameter in [*problem.parameters.items(), *transposed()]:
        found = parameter.ekfac
        whole = kronecker.dense(found)
        eye = torch.eye(len(whole), dtype=whole.dtype)
        vectors = torch.randn(4, *parameter.shape, dtype=whole.dtype)
        flat = vectors.flatten(1)
        assert_near(kronecker.multiply(found, vectors), (flat @ whole).view_as(vectors), name)
        assert_near(kronecker.multiply(found, vectors[0]), (whole @ flat[0]).view_as(vectors[0]), name)
        solved = torch.linalg.solve(whole + 0.3 * eye, flat.T).T
        assert_near(kronecker.solve(found, vectors, 0.3), solved.reshape(vectors.shape), name)
        inverse = kronecker.inverse(found, 0.3)
        assert isinstance(inverse, kronecker.Eigen)
        assert_near(kronecker.dense(inverse) @ (whole + 0.3 * eye), eye, name)
        assert_near(kronecker.trace(found), whole.trace(), name)
        assert_near(kronecker.logdet(found, 0.3), torch.logdet(whole + 0.3 * eye), name)
        assert kronecker.eigen(found) is found
        with pytest.raises(BadInput, match="negative"):
            kronecker.inverse(found, -1.0)
        with pytest.raises(BadInput, match="rows"):
            kronecker.multiply(found, torch.zeros(7919, dtype=whole.dtype))


def transposed() -> list[tuple[str, Tensor]]:
    """Square in fan-in and fan-out, so that shapes do not tell which is which."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    packprop.extend(model.double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(extensions.EKFAC(fisher="exact")):
        loss(model(torch.randn(5, 4, 3, dtype=torch.float64)), torch.randint(2, (5,))).backward()
    return [(f"transposed {name}", parameter) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("factors", [1, 2])
def test_eigendecompositions_of_plain_factors(factors: int) -> None:
    roots = [torch.randn(size, size + 2, dtype=torch.float64) for size in (3, 4)[:factors]]
    given = [root @ root.T for root in roots]
    found = kronecker.eigen(given)
    assert_near(kronecker.dense(found), kronecker.dense(given), "eigen")
    vectors = torch.randn(2, *(len(each) for each in given), dtype=torch.float64)
    assert_near(kronecker.multiply(found, vectors), kronecker.multiply(given, vectors), "multiply")


def test_results_are_copied_and_pickled() -> None:
    for _, parameter in transposed():
        for again in (copy.deepcopy(parameter.ekfac), pickle.loads(pickle.dumps(parameter.ekfac))):
            assert_near(kronecker.dense(again), kronecker.dense(parameter.ekfac), "again")


def test_null_spaces_have_a_basis_that_rounding_does_not_choose() -> None:
    root = torch.randn(8, 3, dtype=torch.float64)
    factor = root @ root.T
    first = kronecker.eigenvectors(factor)
    noise = torch.randn(8, 8, dtype=torch.float64) * 1e-16 * factor.abs().max()
    second = kronecker.eigenvectors(factor + noise + noise.T)
    assert_near(second, first, "eigenvectors", 1e-11)
    assert_near(first.T @ first, torch.eye(8, dtype=torch.float64), "orthonormal")
    assert_near(
        factor @ first[:, :5], torch.zeros(8, 5, dtype=torch.float64), "null space", floor=factor.norm()
    )


def test_what_is_not_finite_is_warned_of() -> None:
    model, loss = packprop.extend(nn.Linear(2, 2)), packprop.extend(nn.MSELoss())
    x = torch.tensor([[1.0, float("inf")], [0.0, 1.0]])
    with pytest.warns(PackpropWarning, match="NaN or infinite"), packprop.backpack(extensions.EKFAC()):
        loss(model(x), torch.zeros(2, 2)).backward()
    assert model.weight.ekfac.values.isnan().all()


# What is refused


def test_choices_are_named() -> None:
    with pytest.raises(BadInput, match="'mixed', 'expand', 'reduce'"):
        extensions.EKFAC(approximation="all")
    with pytest.raises(BadInput, match="'sampled', 'empirical', 'exact'"):
        extensions.EKFAC(fisher="true")


def test_data_that_are_read_once_have_no_second_pass() -> None:
    data = torch.randn(4, 3), torch.randint(2, (4,))
    with pytest.raises(BadInput, match="goes over the samples twice"):
        packprop.compute(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, [extensions.EKFAC()])


def test_a_matrix_that_would_not_fit_is_refused() -> None:
    model, loss = packprop.extend(nn.Embedding(20_000, 2)), packprop.extend(nn.CrossEntropyLoss())
    with pytest.raises(PackpropError, match="20000 rows"), packprop.backpack(extensions.EKFAC()):
        loss(model(torch.tensor([3, 4])), torch.tensor([0, 1])).backward()


def test_a_second_pass_is_over_the_columns_of_the_first() -> None:
    after = Row(EXACT, rotated_sum_sq, after=list)
    drawn = Row(extensions.EKFAC().rows[0].seed, rotated_sum_sq)
    for rows in ((after, drawn), (drawn, after), (Row(INPUTS, rotated_sum_sq, after=list),)):

        class Wrong(extensions.Extension):
            savefield = "wrong"

        Wrong.rows = rows
        with pytest.raises(BadInput, match="make it the last row"):
            step(Wrong())
