"""A profile saved to files, and its errors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import packprop
from packprop import BadInput, PackpropError, Profile
from packprop.applications.reports.profile import profile
from packprop.applications.reports.profile.files import check_folder
from tests.reports.profiled import SIZE, network, quiet


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


def test_norms_that_are_not_finite(tmp_path: Path) -> None:
    model, data = network()
    data[0][2] = torch.nan
    with pytest.warns(packprop.PackpropWarning, match="NaN"):
        found = quiet(model, nn.CrossEntropyLoss(), data, curvature=False, outliers=SIZE)
    assert math.isnan(found.outlying[-1].norm)
    found.save(tmp_path)
    again = Profile.load(tmp_path)
    assert math.isnan(again.outlying[-1].norm)
    assert again.to_html()


def test_a_gradient_that_is_not_finite_heads_the_page_of_the_files(tmp_path: Path) -> None:
    class Root(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).abs().sqrt()

    model = Root(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.warns(packprop.PackpropWarning, match="NaN"):
        found = quiet(model, nn.MSELoss(), (torch.ones(3, 2), torch.ones(3, 2)), curvature=False)
    assert math.isfinite(found.loss)
    found.save(tmp_path)
    headline = Profile.load(tmp_path).headline
    assert headline is not None
    assert "The gradient is not finite" in headline


def test_older_files_are_replaced(tmp_path: Path) -> None:
    model, data = network()
    (tmp_path / "profile.json").write_text("old")
    quiet(model, nn.CrossEntropyLoss(), data, curvature=False).save(tmp_path)
    assert Profile.load(tmp_path).samples == SIZE


def test_a_save_that_ends_between_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves the old profile; a kill may leave files of two, which are refused."""
    model, data = network()
    first = quiet(model, nn.CrossEntropyLoss(), data, curvature=False)
    second = quiet(model, nn.CrossEntropyLoss(), network()[1], curvature=False)
    first.save(tmp_path)

    def failing(allowed: int, real: Callable[..., Any]) -> Callable[..., Any]:
        left = iter(range(allowed))

        def call(*args: Any) -> Any:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    for owner, name, allowed in ((Path, "write_bytes", 1), (os, "replace", 0)):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
            patched.setattr(owner, name, failing(allowed, getattr(owner, name)))
            second.save(tmp_path)
        assert Profile.load(tmp_path) == first
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "replace", failing(1, os.replace))
        second.save(tmp_path)
    with pytest.raises(BadInput, match="they belong to two profiles"):
        Profile.load(tmp_path)
    second.save(tmp_path)
    assert Profile.load(tmp_path) == second


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "profile.json").mkdir(parents=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    bad = {
        tmp_path / "file": "is a file, not a folder",
        tmp_path / "file" / "below": "is a file, not a folder",
        tmp_path / "dangling": "is a file, not a folder",
        tmp_path / "taken": "profile.json in it is a folder",
        Path("/proc/packprop"): "packprop cannot write to /proc",
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
    ("no loss", {"loss": None}, "inputs [3, 2] float32, targets [3, 2] float32", "the model"),
    ("no reduction", {"loss": nn.MSELoss(reduction="none")}, "the loss, MSELoss", "reduction='mean'"),
    ("number", {"loss": lambda f, y: 3.0}, "the loss, <lambda>", "reduction='mean'"),
    ("no data", {"data": []}, "data", "give at least one batch"),
    ("wrong data", {"data": 7}, "data int", "give a Dataset, a pair of tensors, or batches"),
    ("unequal", {"data": (PAIR[0], PAIR[1][:2])}, "[3, 2] float32 and [2, 2] float32", "[n, ...]"),
    (
        "wide",
        {"data": (torch.zeros(3, 5), PAIR[1])},
        "batch 1 of the data, inputs [3, 5] float32, targets [3, 2] float32",
        "check that loss(model(inputs), targets) works for every batch",
    ),
    ("batch_size", {"batch_size": 0}, "batch_size=0", "give a whole number of at least 1"),
    ("draws", {"mc_samples": 1.5}, "mc_samples=1.5", "give a whole number of at least 1"),
    ("factor", {"largest_factor": -1}, "largest_factor=-1", "give a whole number of at least 1"),
    ("seed", {"seed": "a"}, "seed='a'", "give one, such as seed=0"),
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
    with pytest.raises(PackpropError, match="no sample"):
        quiet(LINEAR, nn.MSELoss(), [(torch.zeros(0, 2), torch.zeros(0, 2))])


def test_the_function_is_the_public_name() -> None:
    assert packprop.profile is profile
    assert callable(profile)
