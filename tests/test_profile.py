"""The profile: every number against loops of autograd, its table, its files, its errors."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError, PackpropWarning, Profile
from packprop.reports.profile import profile
from packprop.reports.profile.assembly import TOTAL
from packprop.reports.profile.files import check_folder
from packprop.reports.profile.layers import Layer, Spectrum, spectrum_of
from packprop.reports.profile.table import _number

SIZE = 12


class Network(nn.Module):
    """A convolution, batch normalisation, a shift of its own, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.shift = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.head(x + self.shift)
        return out


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = Network().double()
    model.norm.running_mean.normal_()
    return model, (torch.randn(SIZE, 1, 4, 4).double(), torch.randint(3, (SIZE,)))


def quiet(model: nn.Module, loss: Any, data: Any, **options: Any) -> Profile:
    return profile(model, loss, data, progress=False, **options)


def flat_gradient(scalar: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(scalar, parameters, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])


@dataclasses.dataclass
class Expected:
    """What a row should say, from one backward pass for each sample and each output."""

    gradients: Tensor
    traces: Tensor

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor, names: list[str]) -> Expected:
        parameters = [model.get_parameter(name) for name in names]
        gradients, traces = [], []
        for n in range(len(x)):
            logits = model(x[n : n + 1])
            gradients.append(flat_gradient(F.cross_entropy(logits, y[n : n + 1]), parameters))
            jacobian = torch.stack([flat_gradient(entry, parameters) for entry in logits[0]])
            p = logits[0].detach().softmax(0)
            hessian = p.diag() - torch.outer(p, p)
            traces.append((jacobian.T @ hessian @ jacobian).trace())
        return cls(torch.stack(gradients), torch.stack(traces))

    def check(self, row: Layer) -> None:
        mean = self.gradients.mean(0)
        norms = self.gradients.norm(dim=1)
        covariance = (self.gradients - mean).T @ (self.gradients - mean) / len(norms)

        def close(value: Tensor) -> Any:
            return pytest.approx(value.item(), rel=1e-10)

        assert row.gradient_norm == close(mean.norm())
        assert row.sample_gradient_norm_median == close(norms.quantile(0.5))
        assert row.sample_gradient_norm_95 == close(norms.quantile(0.95))
        assert row.signal_to_noise == close(mean.square().sum() / covariance.trace())
        assert row.ggn_trace_exact == close(self.traces.mean())
        assert row.parameters == self.gradients.shape[1]


OWNED = {
    "(model)": ["shift"],
    "conv": ["conv.weight", "conv.bias"],
    "norm": ["norm.weight", "norm.bias"],
    "head": ["head.weight", "head.bias"],
}
ALL = [name for names in OWNED.values() for name in names]


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
    """Of B only the expectation is known: with many draws the trace of a bias's is that of its GGN."""
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


# What is computed and what is left out


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


def test_losses_without_curvature_say_how_to_leave_it_out() -> None:
    model, data = nn.Linear(2, 2), (torch.randn(3, 2), torch.randint(2, (3,)))
    with pytest.raises(PackpropError, match="zero") as error:
        quiet(nn.Sequential(model, nn.LogSoftmax(1)), nn.NLLLoss(), data)
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
    """Evaluation mode is lent to each module, and batch normalisation does not see the data."""
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
    assert "nan" in str(found).splitlines()[3]
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


# The table


def line_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_the_table_says_what_was_found() -> None:
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data)
    text = str(found)
    for row, name in [*((layer, layer.name) for layer in found.layers), (found.total, "total")]:
        cells = line_of(text, name)
        assert cells[1] == str(row.parameters)
        shown = [float(cell) for cell in cells[2:8]]
        numbers = [
            row.gradient_norm,
            row.sample_gradient_norm_median,
            row.sample_gradient_norm_95,
            row.signal_to_noise,
            row.ggn_trace_exact,
            row.ggn_trace_monte_carlo,
        ]
        assert shown == pytest.approx(numbers, rel=0.05)
    assert line_of(text, "head")[-1] == "2/3"
    assert line_of(text, "norm")[-2] == "-"
    facts = f"Network: CrossEntropyLoss {found.loss:.3g}, 12 samples in 1 batch, evaluation mode"
    assert facts in text


def drawn_number(source: random.Random) -> float | None:
    return source.choice([None, 0.0, math.nan, 10 ** source.uniform(-30, 30)])


@pytest.mark.parametrize("seed", range(5))
def test_the_table_fits_and_loses_nothing(seed: int) -> None:
    """100 columns, whatever the sizes of the numbers and the lengths of the names."""
    source = random.Random(seed)
    layers = []
    for place in range(6):
        name = ".".join(source.choice(["encoder", "layer", "attention", "0"]) for _ in range(8))
        numbers = [drawn_number(source) for _ in range(6)]
        sizes = (source.randrange(1, 2049) for _ in range(2))
        factors = {
            f"weight.{side}": Spectrum(size, True, size - 1, 1.0, 1.0, 10 ** source.uniform(0, 12))
            for side, size in zip("AB", sizes, strict=True)
        }
        layers.append(Layer(f"{place}.{name}", "Linear", 10**place * 1234, *numbers, factors))
    settings = {
        "model": "Model",
        "loss": "MSELoss",
        "device": "cuda:0",
        "precision": "bfloat16",
        "mode": "evaluation",
        "monte_carlo_samples": 100,
    }
    total = dataclasses.replace(layers[-1], name=TOTAL, factors={})
    found = Profile(layers, total, 1.5, 10**6, 10**4, settings, 1.0)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "…" not in text
    table = text[: text.index("Model: MSELoss")]
    width = max(line.count("─") for line in table.splitlines())
    names = "".join(line.split(" ")[0] for line in table.splitlines())
    assert width == max(map(len, table.splitlines()))
    for layer in layers:
        assert layer.name in names
        for spectrum in layer.factors.values():
            assert _number(spectrum.condition) in table
            assert f"{spectrum.rank}/{spectrum.size}" in table
        assert f"{layer.parameters:,}" in table
        assert all(_number(value) in table for value in dataclasses.astuple(layer)[3:9])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (1.0, "1.00"),
        (0.19, "0.190"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.6, "1000"),
        (99999.4, "99999"),
        (123456.0, "1.2e5"),
        (0.00999, "1.0e-2"),
        (0.01, "0.0100"),
        (-0.5, "-0.500"),
        (3.14e-27, "3.1e-27"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert _number(value) == text


# Files


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data)
    paths = found.save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["profile.json", "profile.safetensors"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [path.name for path in paths]
    again = Profile.load(tmp_path / "new" / "folder")
    assert again == found
    assert str(again) == str(found)
    assert again.tensors.keys() == found.tensors.keys()
    assert all(torch.equal(again.tensors[key], tensor) for key, tensor in found.tensors.items())
    saved = json.loads(paths[0].read_text())
    assert saved == json.loads(json.dumps(found.to_dict()))
    assert saved["settings"]["torch"] == torch.__version__
    assert saved["total"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert "gradient/conv.weight" in safetensors.torch.load_file(paths[1])


def test_older_files_are_replaced(tmp_path: Path) -> None:
    model, data = network()
    (tmp_path / "profile.json").write_text("old")
    quiet(model, nn.CrossEntropyLoss(), data, curvature=False).save(tmp_path)
    assert Profile.load(tmp_path).samples == SIZE


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "profile.json").mkdir(parents=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    bad = {
        tmp_path / "file": "is a file, not a folder",
        tmp_path / "file" / "below": "is a file, not a folder",
        tmp_path / "dangling": "is a file, not a folder",
        tmp_path / "taken": "profile.json in it is a folder",
        Path("/proc/packprop"): "nothing can be written to /proc",
    }
    for folder, why in bad.items():
        with pytest.raises(BadInput, match="the output folder") as error:
            check_folder(folder)
        assert why in error.value.why
    check_folder(tmp_path / "new" / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "taken"]


# Errors


LINEAR = nn.Linear(2, 2)
PAIR = (torch.zeros(3, 2), torch.zeros(3, 2))
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("class", {"model": nn.Linear}, "model, the class Linear", "give an instance, Linear(...)"),
    ("function", {"model": 3}, "model, int", "torch.nn.Linear(3, 2)"),
    (
        "frozen",
        {"model": nn.Linear(2, 2).requires_grad_(False)},
        "model, Linear",
        "set requires_grad=True",
    ),
    (
        "loss class",
        {"loss": nn.MSELoss},
        "loss, the class MSELoss",
        "give an instance, MSELoss(...)",
    ),
    ("no loss", {"loss": None}, "loss, NoneType", "torch.nn.CrossEntropyLoss()"),
    ("no reduction", {"loss": nn.MSELoss(reduction="none")}, "the loss, MSELoss", "reduction='mean'"),
    ("number", {"loss": lambda f, y: 3.0}, "the loss, <lambda>", "reduction='mean'"),
    ("no data", {"data": []}, "data", "give at least one batch"),
    ("wrong data", {"data": 7}, "data int", "give a Dataset, a pair of tensors, or batches"),
    ("unequal", {"data": (PAIR[0], PAIR[1][:2])}, "[3, 2] float32 and [2, 2] float32", "[n, ...]"),
    (
        "wide",
        {"data": (torch.zeros(3, 5), PAIR[1])},
        "batch 1 of the data, inputs [3, 5] float32, targets [3, 2] float32",
        "see that loss(model(inputs), targets) works for every batch",
    ),
    ("batch_size", {"batch_size": 0}, "batch_size=0", "give 1 or more"),
    ("draws", {"mc_samples": 1.5}, "mc_samples=1.5", "give 1 or more"),
    ("factor", {"largest_factor": -1}, "largest_factor=-1", "give 1 or more"),
    ("seed", {"seed": "a"}, "seed='a'", "give 0, for example"),
    (
        "size of batches",
        {"data": [PAIR], "batch_size": 2},
        "batch_size=2 with data list",
        "leave the batch size out",
    ),
]


@pytest.mark.parametrize(("changed", "where", "instead"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input(changed: dict[str, Any], where: str, instead: str) -> None:
    arguments = {"model": LINEAR, "loss": nn.MSELoss(), "data": PAIR, **changed}
    with pytest.raises(BadInput, match="was called") as error:
        quiet(**arguments)
    assert where in error.value.where
    assert instead in error.value.instead


def test_empty_batches() -> None:
    with pytest.raises(PackpropError, match="no samples"):
        quiet(LINEAR, nn.MSELoss(), [(torch.zeros(0, 2), torch.zeros(0, 2))])


def test_the_function_is_the_public_name() -> None:
    assert packprop.profile is profile
    assert callable(profile)
