"""Every number of the profile against loops of autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packprop
from packprop import BadInput
from packprop.applications.reports.profile.assembly import TOTAL
from tests.reports.profiled import ALL, OWNED, SIZE, Expected, network, quiet
from tests.selection import one_in


@one_in(3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch_size", [None, 5, 1])
def test_every_number_against_loops(reduction: str, batch_size: int | None) -> None:
    """Both reductions give the profile of the mean loss."""
    model, (x, y) = network()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = quiet(model, loss, (x, y), batch_size=batch_size)
    model.eval()
    assert [layer.name for layer in found.layers] == list(OWNED)
    assert [layer.kind for layer in found.layers] == ["Network", "Conv2d", "BatchNorm2d", "Linear"]
    for layer in found.layers:
        Expected.of(model, x, y, OWNED[layer.name]).check(layer)
    Expected.of(model, x, y, ALL).check(found.total)
    assert found.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    assert (found.samples, found.batches) == (SIZE, -(-SIZE // (batch_size or SIZE)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tensors_against_loops(reduction: str) -> None:
    model, (x, y) = network()
    found = quiet(model, nn.CrossEntropyLoss(reduction=reduction), (x, y), batch_size=5)
    model.eval()
    for name in ALL:
        expected = Expected.of(model, x, y, [name])
        gradient = found.tensors[f"gradient/{name}"].flatten()
        variance = found.tensors[f"gradient_variance/{name}"].flatten()
        torch.testing.assert_close(gradient, expected.gradients.mean(0))
        torch.testing.assert_close(variance, expected.gradients.var(0, correction=0))
    for name, owned in {**OWNED, TOTAL: ALL}.items():
        expected = Expected.of(model, x, y, owned)
        norms = found.tensors[f"sample_gradient_norm/{name}"]
        torch.testing.assert_close(norms, expected.gradients.norm(dim=1))
        torch.testing.assert_close(found.tensors[f"sample_ggn_trace/{name}"], expected.traces)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kronecker_factors_against_their_definition(reduction: str) -> None:
    """B is known in expectation only: with many draws, the trace of a bias's B is that of its GGN."""
    model, (x, y) = network()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = quiet(model, loss, (x, y), mc_samples=400, batch_size=5)
    model.eval()
    inputs = torch.tanh(model.norm(model.conv(x))).mean((2, 3)) + model.shift
    second_moment = (inputs.T @ inputs / SIZE).detach()
    torch.testing.assert_close(found.tensors["kfac/head.weight/A"], second_moment)
    values = torch.linalg.eigvalsh(second_moment)
    torch.testing.assert_close(found.tensors["kfac_eigenvalues/head.weight/A"], values)
    spectrum = found.layers[-1].factors["weight.A"]
    assert (spectrum.size, spectrum.rank) == (2, 2)
    assert spectrum.condition == pytest.approx((values[1] / values[0]).item(), rel=1e-10)
    p = model(x).softmax(1).detach()
    block = (p.diag_embed() - p[:, :, None] * p[:, None, :]).mean(0)
    drawn = found.tensors["kfac/head.bias/B"]
    assert (drawn - block).norm() < 0.1 * block.norm()
    assert found.layers[-1].factors["weight.B"].rank == 2  # probabilities sum to one


def test_monte_carlo_comes_close_to_exact() -> None:
    model, data = network()
    rough = quiet(model, nn.CrossEntropyLoss(), data, mc_samples=1)
    fine = quiet(model, nn.CrossEntropyLoss(), data, mc_samples=2000)
    again = quiet(model, nn.CrossEntropyLoss(), data, mc_samples=1)
    other = quiet(model, nn.CrossEntropyLoss(), data, mc_samples=1, seed=1)
    for row in [*fine.layers, fine.total]:
        assert row.ggn_trace_monte_carlo == pytest.approx(row.ggn_trace_exact, rel=0.1)
    estimate = rough.total.ggn_trace_monte_carlo
    assert estimate == again.total.ggn_trace_monte_carlo
    assert estimate != other.total.ggn_trace_monte_carlo
    assert estimate != pytest.approx(rough.total.ggn_trace_exact, rel=1e-6)


def test_total_sums_over_layers() -> None:
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data)
    for key in ("parameters", "ggn_trace_exact", "ggn_trace_monte_carlo"):
        parts = sum(getattr(layer, key) for layer in found.layers)
        assert getattr(found.total, key) == pytest.approx(parts, rel=1e-10)


def test_equal_samples_have_no_noise() -> None:
    model, (x, y) = network()
    same = (x[:1].repeat(3, 1, 1, 1), y[:1].repeat(3))
    ratio = quiet(model, nn.CrossEntropyLoss(), same).total.signal_to_noise
    assert ratio is None or ratio > 1e25
    assert quiet(model, nn.CrossEntropyLoss(), (x[:1], y[:1])).total.signal_to_noise is None


def test_known_signal_to_noise() -> None:
    """One weight, loss (w x - y)^2 at w = 0: gradients are -2 x y, here 2 and 6."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = (torch.ones(2, 1), torch.tensor([[-1.0], [-3.0]]))
    row = quiet(model, nn.MSELoss(), data).total
    assert row.gradient_norm == pytest.approx(4)
    assert row.signal_to_noise == pytest.approx(16 / 4)
    assert row.sample_gradient_norm_median == pytest.approx(4)
    assert row.sample_gradient_norm_95 == pytest.approx(2 + 0.95 * 4)
    assert row.ggn_trace_exact == pytest.approx(2)


def test_suspects_are_the_samples_with_the_largest_gradients() -> None:
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    found = packprop.profile(model, loss, (x, y), progress=False)
    norms = found.tensors["sample_gradient_norm/(total)"]
    assert found.suspects(3) == norms.topk(3).indices.tolist()
    assert found.suspects(3) == [each.place for each in found.outlying[:3]]
    assert sorted(found.suspects(99)) == [*range(9)]
    with pytest.raises(BadInput, match="give a whole number of at least 1"):
        found.suspects(0)
