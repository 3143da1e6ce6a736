"""Matrices that cannot be decomposed in float32, or at all: float64, or an error that names the parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions, kronecker
from packprop.engine.algebra import decompositions
from tests.queries.small import influence, written

FUNCTIONS = {"eigh": decompositions.eigh, "eigvalsh": decompositions.eigvalsh, "inv": decompositions.inverted}


def failing(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> None:
    """Let PyTorch find no decomposition in these precisions, as it does for some singular matrices."""

    def fails_for(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def tried(matrix: Tensor) -> Any:
            if matrix.dtype in dtypes:
                raise torch.linalg.LinAlgError("the algorithm failed to converge")
            return function(matrix)

        return tried

    for name in FUNCTIONS:
        monkeypatch.setattr(torch.linalg, name, fails_for(getattr(torch.linalg, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_takes_the_place_of_float32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    expected = FUNCTIONS[name](matrix)
    failing(monkeypatch, torch.float32)
    found = FUNCTIONS[name](matrix)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.abs(), other.abs())
    with pytest.raises(PackpropError, match=r"matrix \[2, 2\] of torch.float64(.|\n)*failed to converge"):
        failing(monkeypatch, torch.float64)
        FUNCTIONS[name](matrix.double())


def padded() -> nn.Module:
    """At 1 x 1 most of what a kernel sees is padding, and a unit is dead."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2))
    nn.init.constant_(model[0].bias[0:1].detach(), -100.0)
    return model


DATA = torch.rand(6, 2, 1, 1), torch.tensor([0, 1, 0, 1, 1, 0])


def one_pass(model: nn.Module) -> dict[str, Any]:
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(extensions.EKFAC(fisher="exact")):
        loss(packprop.extend(model)(DATA[0]), DATA[1]).backward()
    return {name: parameter.ekfac for name, parameter in model.named_parameters()}


def data_set(model: nn.Module) -> dict[str, Any]:
    asked = [extensions.EKFAC(fisher="exact")]
    found = packprop.compute(model, nn.CrossEntropyLoss(), DATA, asked, batch_size=2, progress=False)
    return dict(found["ekfac"])


@pytest.mark.parametrize("run", [one_pass, data_set])
def test_singular_factors_of_a_network(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    expected = run(padded())
    failing(monkeypatch, torch.float32)
    for name, found in run(padded()).items():
        torch.testing.assert_close(
            kronecker.dense(found), kronecker.dense(expected[name]), rtol=1e-3, atol=1e-6
        )
    failing(monkeypatch, torch.float32, torch.float64)
    with pytest.raises(PackpropError, match=r"of parameter '\d.(weight|bias)'") as caught:
        run(padded())
    assert "iterated" not in str(caught.value)
    assert all(caught.value.args)


def test_curvature_of_influence_names_the_parameter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    same, result = written(tmp_path / "store", extensions.KFLR())
    failing(monkeypatch, torch.float64)
    with pytest.raises(PackpropError, match=r"of parameter '0\.weight'"):
        influence(tmp_path / "store", same, curvature=result, damping=0.1)


def test_a_singular_factor_has_an_inverse_with_damping() -> None:
    singular = torch.zeros(2, 2)
    with pytest.raises(PackpropError, match="damping=1e-3"):
        kronecker.inverse([singular], damping=0)
    torch.testing.assert_close(kronecker.inverse([singular], damping=1e-3), [1000 * torch.eye(2)])


ZERO = torch.zeros(3, 3)
ONES = torch.ones(3, 3)  # of rank one; PyTorch finds eigenvalues near 1e-8 beside it
SINGULAR = {
    "zero": [torch.eye(2), ZERO],
    "rank one": [torch.eye(2), ONES],
    "on the left": [ONES, torch.eye(2)],
    "one factor": [ONES],
    "diagonal": [torch.tensor([1.0, 0.0]), torch.eye(3)],
    "eigenvalues": kronecker.Eigen(torch.tensor([[1.0, 0.0]]), [torch.eye(1), torch.eye(2)]),
    "squares of rounding": kronecker.Eigen(torch.tensor([[1.0, 1e-15]]), [torch.eye(1), torch.eye(2)]),
    "decomposed": kronecker.eigen([torch.eye(2), ONES]),
}


def size_of(block: Any) -> int:
    return len(kronecker.dense(block))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SINGULAR)
def test_without_damping_nothing_singular_is_solved(name: str, dtype: torch.dtype) -> None:
    """The inverse of zero, or of rounding, would be all that is seen of a result."""
    block: Any = SINGULAR[name]
    block = block if isinstance(block, kronecker.Eigen) else [factor.to(dtype) for factor in block]
    vector = torch.ones(size_of(block), dtype=dtype)
    with pytest.raises(PackpropError, match=r"zero up to rounding(.|\n)*damping=1e-3"):
        kronecker.solve(block, vector, 0.0)
    whole = kronecker.dense(block).double()
    expected = torch.linalg.solve(whole + 1e-3 * torch.eye(len(whole)).double(), vector.double())
    found = kronecker.solve(block, vector, 1e-3)
    tolerance = max(1e-3, torch.finfo(dtype).eps)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SINGULAR)
def test_the_determinant_of_rounding_is_zero(name: str) -> None:
    assert kronecker.logdet(SINGULAR[name]) == -torch.inf
    assert kronecker.logdet(SINGULAR[name], 1e-3).isfinite()


@pytest.mark.parametrize("name", ["diagonal", "eigenvalues", "squares of rounding"])
def test_without_damping_nothing_singular_is_inverted(name: str) -> None:
    with pytest.raises(PackpropError, match=r"zero up to rounding(.|\n)*damping=1e-3"):
        kronecker.inverse(SINGULAR[name], 0.0)
    assert kronecker.trace(kronecker.inverse(SINGULAR[name], 1e-3)).isfinite()


def test_eigenvalues_that_rounding_made_negative_count_as_zero() -> None:
    """With damping of their size they would change the sign of a solution."""
    torch.manual_seed(0)
    rows = torch.randn(4, 40)
    factor = rows.T @ rows
    values = torch.linalg.eigvalsh(factor)
    assert values[0] < 0
    damping = -float(values[0]) / 2
    vector = torch.randn(40)
    solved = kronecker.solve([factor], vector, damping)
    assert solved @ vector > 0
    assert solved.norm() <= 1.001 * vector.norm() / damping


def test_what_is_far_from_singular_is_solved_without_damping() -> None:
    factor = torch.logspace(0, -4, 40).diag()
    torch.testing.assert_close(kronecker.solve([factor], torch.ones(40), 0.0), torch.logspace(0, 4, 40))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_what_is_not_finite_is_said(bad: float, shape: tuple[int, ...]) -> None:
    factor = torch.full(shape, bad)
    for call in (
        lambda: kronecker.solve([factor], torch.ones(2), 0.1),
        lambda: kronecker.inverse([factor], 0.1),
        lambda: kronecker.logdet([torch.eye(3), factor], 0.1),
    ):
        with pytest.raises(PackpropError, match="not finite"):
            call()
