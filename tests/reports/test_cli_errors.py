"""The command: how it says what is wrong."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from packprop import Profile
from packprop.applications.reports import cli
from tests.reports.factories import Run
from tests.selection import one_in

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
    ("factories:absent", "factories has no 'absent'", "name one of its functions: network, good"),
    ("factories:number.part", "factories has no 'number.part'", "it has none"),
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
    ("factories:linear_loss", "nll_loss is linear", "packprop profile --no-curvature"),
]


@one_in(2)
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


def test_a_seed_of_too_many_bits(run: Run) -> None:
    status, _, err = run("factories:good", "--seed", str(2**64))
    assert status == 2
    assert "it has more than 64 bits" in err


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
        assert "give a folder that you can write to" in err
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
    assert status == 3  # a job that looks at nothing else has to notice
    assert re.search(r"^The (loss|gradient) is not finite \((nan|inf)\)", out)
    assert "not finite: The" in err
    assert len(re.findall(r"^warning: The cotangent at parameter '[\w.]+', or a quantity", err, re.M)) == 1
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
    assert "instead: run it again with --debug, and report what it prints" in err
