"""What a profile computes, and what it leaves out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from packprop import BadInput, PackpropError, PackpropWarning, Profile
from packprop.applications.reports.page.findings import findings_of
from packprop.applications.reports.profile.layers import Layer, Spectrum, spectrum_of
from tests.reports.profiled import ALL, Expected, network, quiet
from tests.selection import thorough


@pytest.mark.parametrize(
    ("outputs", "asked", "computed"),
    [(32, None, True), (33, None, False), (33, True, True), (2, False, False)],
)
def test_exact_trace_where_it_is_cheap(outputs: int, asked: bool | None, computed: bool) -> None:
    model = nn.Linear(2, outputs)
    data = (torch.randn(3, 2), torch.randn(3, outputs))
    found = quiet(model, nn.MSELoss(), data, exact=asked)
    assert (found.total.ggn_trace_exact is not None) == computed
    assert found.total.ggn_trace_monte_carlo is not None
    assert found.settings["outputs_of_a_sample"] == outputs


def test_without_curvature() -> None:
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data, curvature=False)
    assert found.total.ggn_trace_exact is found.total.ggn_trace_monte_carlo is None
    assert all(not layer.factors for layer in found.layers)
    assert not any(key.startswith(("kfac", "sample_ggn")) for key in found.tensors)
    assert "KFAC cond:" not in str(found)
    model.eval()
    norm = Expected.of(model, *data, ALL).gradients.mean(0).norm().item()
    assert found.total.gradient_norm == pytest.approx(norm, rel=1e-10)


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    model, data = network()
    first = quiet(model, nn.CrossEntropyLoss(), data, outliers=0, checkpoint=tmp_path)
    with pytest.raises(BadInput, match="0 there, 1 here"):
        quiet(model, nn.CrossEntropyLoss(), data, outliers=0, checkpoint=tmp_path, seed=1)
    again = quiet(model, nn.CrossEntropyLoss(), data, outliers=0, checkpoint=tmp_path)
    assert torch.equal(again.tensors["kfac/head.weight/B"], first.tensors["kfac/head.weight/B"])


def test_losses_without_curvature_say_how_to_leave_it_out() -> None:
    model, data = nn.Linear(2, 2), (torch.randn(3, 2), torch.randint(2, (3,)))
    with pytest.raises(PackpropError, match="zero") as error:
        quiet(model, nn.NLLLoss(), data)
    assert "profile(..., curvature=False), packprop profile --no-curvature" in error.value.instead
    found = quiet(nn.Sequential(model, nn.LogSoftmax(1)), nn.NLLLoss(), data, curvature=False)
    same = quiet(model, nn.CrossEntropyLoss(), data, curvature=False)
    assert found.total.gradient_norm == pytest.approx(same.total.gradient_norm, rel=1e-5)


def test_large_factors_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    data = (torch.randn(4, 5), torch.randn(4, 2))
    found = quiet(model, nn.MSELoss(), data, largest_factor=3)
    first = found.layers[0].factors
    assert first["weight.A"] == Spectrum(5, built=False)
    assert first["weight.B"].size == 3
    assert first["weight.B"].built
    assert "kfac/0.weight/A" not in found.tensors
    assert "5 wide" in str(found)
    everything = quiet(model, nn.MSELoss(), data)
    assert everything.layers[0].factors["weight.A"].built
    assert everything.total == found.total


def test_frozen_unused_and_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.again = nn.Linear(3, 3, bias=False)
            self.again.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.again(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
            return out

    found = quiet(Tied(), nn.CrossEntropyLoss(), (torch.randn(4, 3), torch.randint(3, (4,))))
    first, unused = found.layers
    assert (first.name, first.parameters, unused.name, unused.parameters) == ("first", 12, "unused", 12)
    assert unused == Layer("unused", "Linear", 12)
    assert found.total.parameters == 24
    assert found.total.gradient_norm == first.gradient_norm
    assert "unused" in str(found)


def test_nothing_of_the_users_is_changed() -> None:
    """Modules are in evaluation mode for a while only, and batch normalisation does not see the data."""
    model, data = network()
    model.norm.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {name: set(vars(p)) for name, p in model.named_parameters()}
    found = quiet(model, nn.CrossEntropyLoss(), data)
    assert found.settings["mode"] == "evaluation"
    assert model.training
    assert model.conv.training
    assert not model.norm.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert {name: set(vars(p)) for name, p in model.named_parameters()} == attributes
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_in_its_own_mode() -> None:
    model, data = network()
    with pytest.raises(PackpropError, match="batch normalisation in training mode"):
        quiet(model, nn.CrossEntropyLoss(), data, evaluation=False)
    assert model.training
    dropout = nn.Sequential(nn.Linear(2, 50), nn.Dropout(0.5), nn.Linear(50, 1))
    pairs = (torch.randn(4, 2), torch.randn(4, 1))
    without, with_it = (quiet(dropout, nn.MSELoss(), pairs, evaluation=e) for e in (True, False))
    assert without.loss != with_it.loss
    assert with_it.settings["mode"] == "training"
    assert "training mode" in str(with_it)


@pytest.mark.filterwarnings("ignore::packprop.PackpropWarning")
def test_not_a_number_is_shown_and_saved_as_null(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    data = (torch.full((3, 2), math.nan), torch.zeros(3, 2))
    with pytest.warns(PackpropWarning, match="'weight'"):
        found = quiet(model, nn.MSELoss(), data)
    assert math.isnan(found.total.gradient_norm)
    assert str(found).startswith("The loss is not finite (nan)")
    assert "nan" in str(found).splitlines()[3 + 2]
    assert findings_of(found)[0].says.startswith("The loss is not finite")
    found.save(tmp_path)
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["total"]["gradient_norm"] is None
    assert saved["layers"][0]["factors"]["weight.A"]["rank"] is None
    str(Profile.load(tmp_path))


def test_spectrum_of_known_matrices() -> None:
    whole, values = spectrum_of(torch.diag(torch.tensor([4.0, 1.0, 2.0])), 1)
    assert whole == Spectrum(3, True, 3, 4.0, 1.0, 4.0)
    assert values is not None
    assert values.tolist() == [1.0, 2.0, 4.0]
    vector = torch.tensor([1.0, 2.0, 3.0])
    singular, _ = spectrum_of(torch.outer(vector, vector), 1)
    assert (singular.rank, singular.condition) == (1, 1.0)
    assert spectrum_of(torch.zeros(2, 2), 1)[0] == Spectrum(2, rank=0)
    assert spectrum_of(torch.full((2, 2), math.inf), 1)[0] == Spectrum(2)
    # what float32 cannot tell from zero, float64 can
    nearly = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))
    assert spectrum_of(nearly, 1)[0].rank == 2
    assert spectrum_of(nearly.float(), 1)[0].rank == 1


@thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [1, 100])
def test_rank_in_spite_of_rounding(dtype: torch.dtype, batch_size: int) -> None:
    """A second input that is twice the first adds nothing; a third that is small does."""
    x = torch.randn(300, 1, dtype=dtype) + 1
    x = torch.cat([x, 2 * x, 0.02 * torch.randn(300, 1, dtype=dtype)], 1)
    model = nn.Linear(3, 4).to(dtype)
    data = (x, torch.randint(4, (300,)))
    found = quiet(model, nn.CrossEntropyLoss(), data, batch_size=batch_size, mc_samples=10)
    assert found.layers[0].factors["weight.A"].rank == 2
    assert found.layers[0].factors["weight.B"].rank == 3
