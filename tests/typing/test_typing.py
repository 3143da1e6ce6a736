"""The program that type checkers accept also runs; what they find is checked by `make lint`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.applications.dataset import operators
from tests.typing import accepted, every_call

KRONECKER = ("eigen", "dense", "multiply", "inverse", "solve", "trace", "logdet")
X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def test_the_accepted_program_runs(tmp_path: Path) -> None:
    assert [value.shape[0] for value in accepted.a_step(X, Y)] == [6] * 4
    assert len(accepted.a_data_set(X, Y, tmp_path)) == 4
    assert accepted.a_plan(X, Y).peak > 0
    assert "Network" in str(accepted.a_profile(X, Y))
    assert {*accepted.jobs(X, Y, tmp_path)} > {"clipped", "norms", "step"}
    x = X.clone().requires_grad_()
    accepted.a_penalty(x).backward()
    torch.testing.assert_close(x.grad, 3 * X)


@pytest.mark.filterwarnings("ignore::packprop.PackpropWarning")
def test_the_program_of_every_call_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for done in (
        every_call.curvature(X, Y),
        every_call.every_extension(X, Y),
        every_call.rows_on_disk(X, Y, tmp_path),
        every_call.training(X, Y, tmp_path),
        every_call.of_ones_own(X),
    ):
        assert done
    assert "much" in every_call.mistakes(nn.Linear(4, 2))


def test_the_programs_name_everything_that_is_public() -> None:
    code = "".join(
        Path(str(program.__file__)).read_text(encoding="utf-8") for program in (accepted, every_call)
    )
    public = [*packprop.__all__, *(name for name in extensions.__all__ if name != "Row"), *operators.__all__]
    public += [name for name in KRONECKER if hasattr(packprop.kronecker, name)]
    assert [name for name in public if not re.search(rf"\b{name}\b", code)] == []


def test_every_mistake_names_its_error() -> None:
    source = (Path(__file__).parent / "refused.py").read_text(encoding="utf-8")
    code = source.partition("def names_that_do_not_exist")[2]
    assert len(re.findall(r"# type: ignore\[[\w, -]+\]$", code, re.MULTILINE)) >= 15
    assert re.search(r"# type: ignore(?!\[)", code) is None
