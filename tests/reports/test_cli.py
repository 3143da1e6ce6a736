"""The command: what it prints and writes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import packprop
from packprop import Profile, examples
from packprop.applications.dataset import replays
from packprop.applications.reports import arguments, cli
from packprop.examples import digits, load_digits
from tests.distributed.processes import in_processes, needs_groups
from tests.reports.factories import FACTORIES, Run
from tests.selection import thorough


@pytest.mark.parametrize(("name", "batches"), [("good", 1), ("batches", 2), ("Project.factory", 1)])
def test_a_factory_is_profiled(run: Run, tmp_path: Path, name: str, batches: int) -> None:
    status, out, err = run(f"factories:{name}", "--output", "some/folder", "--threads", "1")
    assert status == 0
    found = Profile.load(tmp_path / "some" / "folder")
    assert out == f"{found}\n"
    assert max(map(len, out.splitlines())) <= 100
    assert "Sequential: CrossEntropyLoss" in out
    assert "evaluation mode" in out
    assert (found.samples, found.batches) == (30, batches)
    assert found.total.ggn_trace_exact is not None
    assert [layer.kind for layer in found.layers] == ["Linear", "BatchNorm1d", "Linear"]
    assert "wrote some/folder/profile.json and some/folder/profile.safetensors" in err


def test_it_says_what_python_says(run: Run, tmp_path: Path) -> None:
    run("factories:good", "--seed", "3", "--mc-samples", "4", "--batch-size", "7")
    torch.manual_seed(3)
    import factories  # type: ignore[import-not-found]  # written by the test

    torch.manual_seed(3)
    expected = packprop.profile(*factories.good(), seed=3, mc_samples=4, batch_size=7)
    found = Profile.load(tmp_path / "profile")
    assert found.layers == expected.layers
    made = {name: found.settings.pop(name) for name in ("date", "command", "factory")}
    assert made["command"] == "packprop profile --no-page factories:good --seed 3 --mc-samples 4 --batch-size 7"
    assert made["factory"] == "factories:good"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", made["date"])
    found.settings.pop("commit", None)  # where the folder is under version control
    assert found.settings == expected.settings
    assert found.batches == 5


@thorough
def test_a_budget_of_memory(run: Run, tmp_path: Path) -> None:
    status, _, err = run("factories:good", "--memory", "1MiB")
    assert status == 0
    assert "peak resident memory" in err
    within = Profile.load(tmp_path / "profile")
    assert "resident" not in run("factories:good")[2]
    assert within.samples == Profile.load(tmp_path / "profile").samples
    status, _, err = run("factories:good", "--memory", "1KiB")
    assert status != 0
    assert "with the chunks that take least" in err


def test_seed(run: Run, tmp_path: Path) -> None:
    seen = []
    for seed in ("0", "0", "1"):
        assert run("factories:drawn", "--seed", seed)[0] == 0
        seen.append(Profile.load(tmp_path / "profile").total)
    assert seen[0] == seen[1]
    assert seen[0].gradient_norm != seen[2].gradient_norm


def test_what_options_switch(run: Run, tmp_path: Path) -> None:
    assert run("factories:good", "--no-exact")[0] == 0
    without_exact = Profile.load(tmp_path / "profile")
    assert without_exact.total.ggn_trace_exact is None
    assert without_exact.total.ggn_trace_monte_carlo is not None
    assert run("factories:linear_loss", "--no-curvature")[0] == 0
    assert Profile.load(tmp_path / "profile").total.ggn_trace_monte_carlo is None
    assert run("factories:good", "--largest-factor", "2")[0] == 0
    assert not Profile.load(tmp_path / "profile").layers[0].factors["weight.A"].built
    status, _, err = run("factories:good", "--no-evaluation")
    assert status == 2
    assert "batch normalisation in training mode" in err


@thorough
def test_what_graphs_brought(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MANY", 1)
    monkeypatch.setattr(replays, "PASSES_TO_TRACE", 0)
    status, _, err = run("factories:good", "--batch-size", "1")
    assert status == 0
    assert " ordinary passes, 25 replays of graphs, traced in " in err
    status, _, err = run("factories:good", "--batch-size", "1", "--no-compiled")
    assert status == 0
    assert "in place of passes" not in err


def test_the_built_in_example(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its training, and with fewer digits: README's own run is whole."""

    def few(seed: int) -> tuple[torch.nn.Module, torch.nn.Module, TensorDataset]:
        model, loss, data = digits(seed, epochs=0)
        return model, loss, TensorDataset(*(tensor[:40] for tensor in data.tensors))

    monkeypatch.setattr(examples, "digits", few)
    status, out, err = run()
    assert status == 0
    assert "training a small residual network on handwritten digits" in err
    assert "SmallResNet: CrossEntropyLoss" in out
    names = [layer.name for layer in Profile.load(tmp_path / "profile").layers]
    assert names[:3] == ["stem", "norm", "block1.conv1"]
    assert "40 samples" in out


@thorough
def test_digits_are_learnt_and_repeatable() -> None:
    images, classes = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert classes.unique().tolist() == list(range(10))
    state = torch.get_rng_state()
    first, again, other = (digits(seed, epochs=1) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    model, loss, data = first
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert loss(model(images), classes) < 1.9 < 2.2 < loss(digits(epochs=0)[0](images), classes)
    assert len(data) == 1797
    assert torch.equal(model(images), again[0](images))
    assert not torch.equal(model(images), other[0](images))


def test_digits_without_scikit_learn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    status, _, err = run()
    assert status == 2
    assert "scikit-learn cannot be imported" in err
    assert "instead: pip install '.[examples]', or profile a model of your own" in err


def test_help_explains_everything(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["profile", "--help"])
    assert error.value.code == 0
    text = capfd.readouterr().out
    options = vars(arguments.parser().parse_args(["profile"]))
    for option in options.keys() - {"factory", "command"}:
        flag = option.replace("_", "-")
        assert f"--{flag}" in text
    for word in ("model", "loss", "data", "profile.json", "profile.safetensors", "unit", "SNR", "GGN tr"):
        assert word in text


@thorough
def test_as_a_command(tmp_path: Path) -> None:
    """The command in a process of its own: its streams, its status, the current folder, the width of a pipe."""
    (tmp_path / "mine.py").write_text(FACTORIES)
    command = [
        sys.executable,
        "-m",
        "packprop.applications.reports.cli",
        "profile",
        "--threads",
        "1",
        "--no-page",
    ]
    root = str(Path(packprop.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "COLUMNS": "60"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, "mine:good"], check=True, **options)  # type: ignore[call-overload]  # options of several types
    assert done.stdout == f"{Profile.load(tmp_path / 'profile')}\n"
    assert done.stderr.startswith("\nwrote profile/profile.json")
    failed = subprocess.run([*command, "mine:raises"], check=False, **options)  # type: ignore[call-overload]  # options of several types
    assert failed.returncode == 2
    assert "ZeroDivisionError" in failed.stderr
    assert "Traceback" not in failed.stderr
    read, write = os.pipe()
    os.close(read)  # as `| head` does when it has seen enough
    command = [sys.executable, "-m", "packprop", "compare", "profile", "profile"]
    cut = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, env=environment, check=False
    )
    os.close(write)
    assert (cut.returncode, cut.stderr) == (0, b"")


BREAKING = """
import os
import torch
from torch import nn


class Batches:
    def __iter__(self):
        source = torch.Generator().manual_seed(0)
        for number in range(4):
            if number == 2 and os.path.exists("broken"):
                raise OSError("the disk is gone")
            yield torch.randn(5, 4, generator=source), torch.randint(2, (5,), generator=source)


def factory():
    return nn.Linear(4, 2), nn.CrossEntropyLoss(), Batches()
"""


def test_a_profile_goes_on_from_its_checkpoint(run: Run, tmp_path: Path) -> None:
    (tmp_path / "breaking_data.py").write_text(BREAKING)
    run("breaking_data:factory", "--output", "alone")
    (tmp_path / "broken").touch()
    status, _, err = run("breaking_data:factory", "--checkpoint", "kept", "--every", "1")
    assert status == 2
    assert "the first 2 batches, 10 samples" in err
    (tmp_path / "broken").unlink()
    status, _, err = run("breaking_data:factory", "--resume", "kept", "--mc-samples", "2")
    assert status == 2
    assert "mc_samples: 1 there, 2 here" in err
    status, out, _ = run("breaking_data:factory", "--resume", "kept")
    assert status == 0
    assert "20 samples in 4 batches" in out
    alone, found = Profile.load(tmp_path / "alone"), Profile.load(tmp_path / "profile")
    assert (found.layers, found.total, found.loss) == (alone.layers, alone.total, alone.loss)
    status, _, err = run("breaking_data:factory", "--resume", "nowhere")
    assert status == 2
    assert "no checkpoint in that folder" in err
    assert not (tmp_path / "nowhere").exists()


def profiled(rank: int, folder: Path) -> tuple[int, str]:
    """What one rank prints."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["profile", "breaking_data:factory", "--output", "ranks", "--no-page"])
    return status, out.getvalue()


@thorough
@needs_groups
def test_a_profile_on_two_ranks(run: Run, tmp_path: Path) -> None:
    """Each rank has the factory's batches, as a shard: all of them twice."""
    (tmp_path / "breaking_data.py").write_text(BREAKING)
    run("breaking_data:factory", "--output", "alone")
    (first, printed), (second, nothing) = in_processes(profiled, 2, tmp_path, group=False)
    assert (first, second, nothing) == (0, 0, "")
    assert "40 samples in 8 batches" in printed
    alone, found = Profile.load(tmp_path / "alone"), Profile.load(tmp_path / "ranks")
    assert found.total.gradient_norm == pytest.approx(alone.total.gradient_norm, rel=1e-6)
    assert found.total.signal_to_noise == pytest.approx(alone.total.signal_to_noise, rel=1e-5)


def test_the_command_is_also_the_module(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["packprop", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("packprop", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"packprop {packprop.__version__}\n"
