"""The command: what it prints and writes, and how it says what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import packprop
from packprop import Profile, examples
from packprop.examples import digits, load_digits
from packprop.reports import arguments, cli

FACTORIES = """
import warnings
import torch
from torch import nn

INPUTS, CLASSES = torch.randn(30, 4), torch.randint(2, (30,))
number = 3


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 2))


def good():
    return network(), nn.CrossEntropyLoss(), (INPUTS, CLASSES)


def batches():
    return [network(), nn.CrossEntropyLoss(), [(INPUTS[:20], CLASSES[:20]), (INPUTS[20:], CLASSES[20:])]]


class Project:
    def factory():
        return good()


def drawn():
    return network(), nn.CrossEntropyLoss(), (torch.randn(9, 4), torch.randint(2, (9,)))


def marks():
    open("ran", "w").close()
    return good()


def raises():
    return 1 / 0


def leaves():
    raise SystemExit(3)


def pair():
    return network(), nn.CrossEntropyLoss()


def nothing():
    pass


def takes(path):
    return good()


def a_class():
    return nn.Linear, nn.MSELoss(), (INPUTS, INPUTS)


def loss_class():
    return network(), nn.CrossEntropyLoss, (INPUTS, CLASSES)


def no_data():
    return network(), nn.CrossEntropyLoss(), 5


def empty():
    return network(), nn.CrossEntropyLoss(), []


def wide():
    return network(), nn.CrossEntropyLoss(), (torch.randn(30, 5), CLASSES)


def late():
    return network(), nn.CrossEntropyLoss(), [(INPUTS, CLASSES), (INPUTS, CLASSES + 5)]


def dictionary():
    return network(), nn.CrossEntropyLoss(), [{"inputs": INPUTS}]


def linear_loss():
    return nn.Sequential(network(), nn.LogSoftmax(1)), nn.NLLLoss(), (INPUTS, CLASSES)


def infinite():
    return network(), nn.MSELoss(), (INPUTS / 0, torch.zeros(30, 2))


def warns():
    warnings.warn("look out")
    warnings.warn("look out")
    return good()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        if len(x) < 20:
            raise ValueError("too few")
        return self.inner(x)


def own():
    return Own(), nn.CrossEntropyLoss(), [(INPUTS[:20], CLASSES[:20]), (INPUTS[20:], CLASSES[20:])]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in a folder of its own, with modules to import: status, output, errors."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "needs.py").write_text("import surely_not_installed\n")
    (tmp_path / "wrong.py").write_text("x = (\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('no')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("factories", "needs", "wrong", "leaving"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["profile", *arguments])
        return status, *capfd.readouterr()

    return call


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
    import factories  # type: ignore[import-not-found]

    torch.manual_seed(3)
    expected = packprop.profile(*factories.good(), seed=3, mc_samples=4, batch_size=7)
    found = Profile.load(tmp_path / "profile")
    assert found.layers == expected.layers
    assert found.settings == expected.settings
    assert found.batches == 5


def test_a_budget_of_memory(run: Run, tmp_path: Path) -> None:
    status, _, err = run("factories:good", "--memory", "1MiB")
    assert status == 0
    assert "resident in memory at most" in err
    within = Profile.load(tmp_path / "profile")
    assert "resident" not in run("factories:good")[2]
    assert within.samples == Profile.load(tmp_path / "profile").samples
    status, _, err = run("factories:good", "--memory", "1KiB")
    assert status != 0
    assert "with the smallest chunks" in err


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
    status, _, err = run("factories:good", "--keep-mode")
    assert status == 2
    assert "batch normalisation in training mode" in err


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
    assert "instead: pip install 'packprop[examples]', or profile a model of your own" in err


BAD = [
    ("factories", "factories:factory", "it does not have the form package.module:function"),
    ("factories.py:good", "function: factories:good", "it does not have the form"),
    ("src/train.py:make", "function: src.train:make", "it does not have the form"),
    (":good", "package.module:function", "train:good"),
    ("no_such_module:f", "no module 'no_such_module' is in", "or set PYTHONPATH"),
    ("no_such.module:f", "no module 'no_such' is in", "or set PYTHONPATH"),
    ("factories.inner:f", "no module 'factories.inner'", "importing|is in"),
    ("needs:f", "importing needs failed: ModuleNotFoundError", "needs.py, line 1, in <module>"),
    ("wrong:f", "SyntaxError: '(' was never closed (wrong.py, line 1)", "python -c 'import wrong'"),
    ("leaving:f", "importing leaving failed: SystemExit: no", "leaving.py, line 2"),
    ("factories:absent", "factories has no 'absent'", "name a function of it: network, good"),
    ("factories:number", "'number' is int, which cannot be called", "returns (model, loss, data)"),
    ("factories:raises", "it raised ZeroDivisionError: division by zero (", "in raises)"),
    ("factories:leaves", "it raised SystemExit: 3", "in leaves)"),
    ("factories:takes", "missing 1 required positional argument: 'path'", "runs without arguments"),
    ("factories:pair", "it returned 2 things, not three things", "return model, loss, data"),
    ("factories:nothing", "it returned NoneType, not three things", "return model, loss, data"),
    ("factories:a_class", "model, the class Linear", "give an instance, Linear(...)"),
    ("factories:loss_class", "loss, the class CrossEntropyLoss", "CrossEntropyLoss(...)"),
    ("factories:no_data", "data int", "give a Dataset, a pair of tensors"),
    ("factories:empty", "it held no batch", "give at least one batch"),
    ("factories:wide", "inputs [30, 5] float32, targets [30] int64", "mat1 and mat2 shapes"),
    ("factories:late", "batch 2 of the data", "IndexError: Target"),
    ("factories:own", "ValueError: too few (", "in forward)"),
    ("factories:dictionary", "batch 1 of the data, dict", "a tuple or a dictionary of arguments"),
    ("factories:linear_loss", "nll_loss is linear", "packprop profile --no-curvature"),
]


@pytest.mark.parametrize(("name", "first", "second"), BAD)
def test_a_wrong_factory_is_explained(run: Run, name: str, first: str, second: str) -> None:
    status, out, err = run(name)
    assert status == 2
    assert out == ""
    assert first in err
    assert any(text in err for text in second.split("|"))
    assert err.startswith("error: ")
    assert [line.split(":")[0].strip() for line in err.splitlines()[1:]] == ["where", "why", "instead"]
    assert not os.path.exists("profile")


@pytest.mark.parametrize("name", ["factories:raises", "factories:wide", "needs:f"])
def test_debug_shows_the_traceback(run: Run, name: str) -> None:
    quiet, loud = run(name), run(name, "--debug")
    assert quiet[0] == loud[0] == 2
    assert "Traceback" not in quiet[2]
    assert loud[2].count("Traceback (most recent call last)") == 2  # the user's error and ours


def test_an_output_folder_is_checked_before_the_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below", "/proc/packprop"):
        status, out, err = run("factories:marks", "--output", folder)
        assert (status, out) == (2, "")
        assert f"error: A profile was to be saved in {folder!r}." in err
        assert "give a folder that can be written to" in err
    assert not (tmp_path / "ran").exists()
    assert run("factories:marks", "--output", "fine")[0] == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device must be missing")
@pytest.mark.parametrize("device", ["cuda", "nonsense"])
def test_a_device_that_is_not_there(run: Run, tmp_path: Path, device: str) -> None:
    status, _, err = run("factories:marks", "--device", device)
    assert status == 2
    assert f"where:   --device {device}" in err
    assert "name a device that this torch can use, such as cpu" in err
    assert not (tmp_path / "ran").exists()


def test_device(run: Run, tmp_path: Path) -> None:
    assert run("factories:good", "--device", "cpu")[0] == 0
    assert Profile.load(tmp_path / "profile").settings["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number of at least 1"),
        (["--mc-samples", "many"], "argument --mc-samples: 'many' is not a whole number"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_wrong_options(run: Run, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        run("factories:good", *arguments)
    assert error.value.code == 2
    assert message in capfd.readouterr().err


def test_batch_size_for_data_in_batches(run: Run) -> None:
    status, _, err = run("factories:batches", "--batch-size", "3")
    assert status == 2
    assert "these data come in batches already" in err


def test_warnings_are_one_line_each(run: Run, tmp_path: Path) -> None:
    status, out, err = run("factories:infinite")
    assert status == 0
    assert len(re.findall(r"^warning: The signal at parameter '[\w.]+' holds NaN", err, re.M)) == 1
    assert "UserWarning" not in err
    assert "nan" in out
    assert json.loads((tmp_path / "profile" / "profile.json").read_text())["loss"] is None


def test_equal_warnings_are_shown_once(run: Run) -> None:
    assert run("factories:warns")[2].count("warning: look out\n") == 1


def test_an_interrupt_writes_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "profile", interrupt)
    assert run("factories:good")[::2] == (130, "interrupted; nothing was written\n")
    assert not (tmp_path / "profile").exists()


def test_an_error_of_packprop_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "profile", partial(divmod, 1, 0))
    status, _, err = run("factories:good")
    assert status == 1
    assert "where:   packprop itself" in err
    assert "instead: run again with --debug, and report what it prints" in err


def test_help_explains_everything(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["profile", "--help"])
    assert error.value.code == 0
    text = capfd.readouterr().out
    options = vars(arguments.parser().parse_args(["profile"]))
    for option in options.keys() - {"factory"}:
        flag = option.replace("_", "-")
        assert f"--{flag}" in text
    for word in ("model", "loss", "data", "profile.json", "profile.safetensors", "unit", "SNR", "GGN tr"):
        assert word in text


def test_as_a_command(tmp_path: Path) -> None:
    """In a process of its own: streams, status, the current folder, width of a pipe."""
    (tmp_path / "mine.py").write_text(FACTORIES)
    command = [sys.executable, "-m", "packprop.reports.cli", "profile", "--threads", "1"]
    root = str(Path(packprop.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "COLUMNS": "60"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, "mine:good"], check=True, **options)  # type: ignore[call-overload]
    assert done.stdout == f"{Profile.load(tmp_path / 'profile')}\n"
    assert done.stderr.startswith("\nwrote profile/profile.json")
    failed = subprocess.run([*command, "mine:raises"], check=False, **options)  # type: ignore[call-overload]
    assert failed.returncode == 2
    assert "ZeroDivisionError" in failed.stderr
    assert "Traceback" not in failed.stderr
