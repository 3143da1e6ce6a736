"""Two profiles side by side: their differences, how certain these are, and what cannot be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from packprop import BadInput, Profile
from packprop.applications.reports import cli
from packprop.applications.reports.compare import compare
from packprop.applications.reports.compare.differences import QUANTITIES, Difference
from packprop.applications.reports.compare.table import change_text, value_texts
from packprop.applications.reports.profile.layers import Layer
from tests.reports.pages import read_page
from tests.reports.profiled import network, quiet
from tests.selection import thorough

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(scope="module")
def pair() -> tuple[Profile, Profile]:
    torch.manual_seed(0)
    model, data = network()
    first = quiet(model, LOSS, data)
    with torch.no_grad():
        model.head.weight.mul_(3)
    return first, quiet(model, LOSS, data, seed=1)


def test_the_same_samples_are_compared_one_by_one(pair: tuple[Profile, Profile]) -> None:
    first, second = pair
    found = compare(first, second)
    assert found.paired
    assert [*found.layers] == [layer.name for layer in first.layers]
    for name, differences in [*found.layers.items(), ("(total)", found.total)]:
        for quantity, key in [("mean sample norm", "sample_gradient_norm"), ("GGN trace", "sample_ggn_trace")]:
            a, b = first.tensors[f"{key}/{name}"], second.tensors[f"{key}/{name}"]
            difference = differences[quantity]
            assert difference.change == pytest.approx(float((b - a).mean()), rel=1e-6)
            assert difference.error == pytest.approx(float((b - a).std()) / math.sqrt(len(a)))
            assert difference.first_error == pytest.approx(float(a.std()) / math.sqrt(len(a)))
    assert found.total["gradient norm"].first == first.total.gradient_norm
    assert found.total["signal to noise"].second == second.total.signal_to_noise
    assert found.settings == {"seed": (0, 1)}


def test_other_samples_have_larger_errors(pair: tuple[Profile, Profile]) -> None:
    first = pair[0]
    model, _ = network()
    other = quiet(model, LOSS, network()[1])
    found = compare(first, other)
    assert not found.paired
    difference = found.total["mean sample norm"]
    assert difference.first_error is not None
    assert difference.second_error is not None
    assert difference.error == pytest.approx(math.hypot(difference.first_error, difference.second_error))
    assert compare(first, first).total["mean sample norm"].error == 0
    assert not compare(first, first).total["mean sample norm"].is_clear


def made_of(gradients: Tensor) -> Profile:
    """A profile of gradients of single samples ``[n, p]``."""
    mean, norms = gradients.mean(0), gradients.norm(dim=1)
    norm, noise = float(mean.norm()), float(gradients.var(0, correction=0).sum())
    layer = Layer("layer", "Linear", 5, norm, signal_to_noise=norm**2 / noise)
    tensors = {"sample_gradient_norm/layer": norms, "sample_ggn_trace/layer": norms.square()}
    return Profile([layer], layer, 1.0, len(norms), 1, {"loss": "own"}, 0.0, tensors)


def test_a_complete_checkpoint_keeps_which_samples_they_were(tmp_path: Path) -> None:
    """A call that reads no batch tells other data as well."""
    model, data = network()

    def found(name: str | None, data: tuple[Tensor, ...]) -> Profile:
        folder = None if name is None else tmp_path / name
        loader = DataLoader(TensorDataset(*data), 5)
        return quiet(model, LOSS, loader, curvature=False, outliers=0, checkpoint=folder)

    other = network()[1]
    fresh = found(None, data)
    for _ in range(2):
        own, others = found("own", data), found("other", other)
        assert compare(fresh, own).paired
        assert not compare(own, others).paired


def test_equal_distributions_are_seldom_told_apart() -> None:
    """Two standard errors: means fall outside by chance in about 4.6 % of all pairs, bounds in fewer."""
    source = torch.Generator().manual_seed(0)
    marked = dict.fromkeys(QUANTITIES, 0)
    for _ in range(400):
        draws = torch.randn(2, 200, 5, generator=source, dtype=torch.float64).exp() + 0.5
        found = compare(made_of(draws[0]), made_of(draws[1])).total
        for quantity in QUANTITIES:
            marked[quantity] += found[quantity].is_clear
    assert 8 <= marked["mean sample norm"] <= 32
    assert 4 <= marked["GGN trace"] <= 32
    assert marked["gradient norm"] <= 18
    assert marked["signal to noise"] <= 18


def test_distributions_that_differ_are_told_apart() -> None:
    source = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 2000, 5, generator=source, dtype=torch.float64) + 2
    found = compare(made_of(draws[0]), made_of(3 * draws[1] - 3)).total
    assert all(found[quantity].is_clear for quantity in QUANTITIES)


def test_it_prints(pair: tuple[Profile, Profile]) -> None:
    text = str(compare(*pair, "before", "after"))
    assert max(map(len, text.splitlines())) <= 100
    assert "before -> after, below it the difference +- its standard error" in text
    assert "the same samples, compared one by one" in text
    assert "seed: 0 -> 1" in text
    assert all(layer.name in text for layer in pair[0].layers)


def test_what_was_not_computed_is_a_dash() -> None:
    model, data = network()
    without = quiet(model, LOSS, data, curvature=False)
    found = compare(without, without)
    assert found.total["GGN trace"].change is None
    assert not found.total["GGN trace"].is_clear
    assert str(found).splitlines()[2].rstrip().endswith("-")


@thorough
def test_its_page(pair: tuple[Profile, Profile], tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    found = compare(*pair, "<before>", "after")
    html = found.save_page(tmp_path / "page.html").read_text()
    assert len(html) < 2_000_000
    page = read_page(html)
    assert page.all("h1")[0].text == "<before> → after"
    assert len(page.all("div", role="img")) == len(QUANTITIES)
    (table,) = page.all("table", id="layers")
    assert len(table.all("tbody")[0].all("tr")) == len(pair[0].layers)


# The command


def test_the_command(pair: tuple[Profile, Profile], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, profile in zip("ab", pair, strict=True):
        profile.save(tmp_path / name)
    folders = [str(tmp_path / name) for name in "ab"]
    assert cli.main(["compare", *folders]) == 0
    out, err = capfd.readouterr()
    assert out == f"{compare(*pair, *folders)}\n"
    assert err == ""
    assert cli.main(["compare", *folders, "--json"]) == 0
    saved = json.loads(capfd.readouterr().out)
    assert saved["format"] == "comparison of profiles, format 1"
    expected = compare(*pair).total["mean sample norm"]
    assert saved["total"]["mean sample norm"]["error"] == expected.error
    assert cli.main(["compare", folders[0], str(tmp_path / "nowhere")]) == 2
    assert "it lacks profile.json and profile.safetensors" in capfd.readouterr().err


# Bad input


def edited(folder: Path, **changes: Any) -> Path:
    saved = json.loads((folder / "profile.json").read_text())
    (folder / "profile.json").write_text(json.dumps({**saved, **changes}))
    return folder


def test_profiles_of_other_versions_are_refused(pair: tuple[Profile, Profile], tmp_path: Path) -> None:
    pair[0].save(tmp_path)
    edited(tmp_path, format="profile of a network, format 99")
    with pytest.raises(BadInput, match="format 99") as error:
        Profile.load(tmp_path)
    assert "make the profile again" in error.value.instead
    saved = json.loads((tmp_path / "profile.json").read_text())
    del saved["format"]
    (tmp_path / "profile.json").write_text(json.dumps(saved))
    with pytest.raises(BadInput, match="an unnamed format"):
        Profile.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("profile.json", "{", "it cannot be read"),
        ("profile.json", "[]", "it is not the file of a profile"),
        ("profile.json", '{"format": 3}', "it is not the file of a profile"),
        ("profile.safetensors", "no", "it cannot be read"),
        ("profile.safetensors", None, "it lacks profile.safetensors"),
    ],
)
def test_files_that_are_none(
    pair: tuple[Profile, Profile], tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    pair[0].save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput) as error:
        Profile.load(tmp_path)
    assert why in error.value.why


def test_a_file_in_place_of_a_folder(pair: tuple[Profile, Profile], tmp_path: Path) -> None:
    path, _ = pair[0].save(tmp_path)
    with pytest.raises(BadInput, match="it is a file"):
        Profile.load(path)


def test_other_models_are_refused(pair: tuple[Profile, Profile]) -> None:
    first, _ = pair
    data = (torch.randn(9, 4), torch.randint(3, (9,)))
    small = quiet(nn.Sequential(nn.Linear(4, 3)), LOSS, data)
    with pytest.raises(BadInput, match="0, Linear of 15 in the second"):
        compare(first, small)
    with pytest.raises(BadInput, match="3 in the first, 1 in the second"):
        compare(quiet(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)), LOSS, data), small)
    squared = quiet(nn.Sequential(nn.Linear(4, 3)), nn.MSELoss(), (data[0], torch.randn(9, 3)))
    with pytest.raises(BadInput, match="CrossEntropyLoss in the first, MSELoss in the second"):
        compare(small, squared)
    with pytest.raises(BadInput, match="it is not a profile"):
        compare(first, 3)  # type: ignore[arg-type]  # that is the point


def test_numbers_have_the_digits_that_their_errors_leave() -> None:
    unclear = Difference(0.00612, 0.01158, 0.0031, 0.0024, 0.0057)
    assert value_texts(unclear) == ("6e-3", "0.012")
    assert change_text(unclear) == "+5e-3 +- 6e-3"
    paired = Difference(2.834, 2.712, 0.21, 0.2, 0.004)
    assert value_texts(paired) == ("2.83", "2.71")
    assert change_text(paired) == "-0.122 +- 4e-3*"
    assert value_texts(Difference(None, 1.2345)) == ("-", "1.23")
