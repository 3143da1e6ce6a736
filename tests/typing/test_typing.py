"""The program that type checkers accept also runs; what they find is checked by `make lint`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.typing import accepted

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


def test_every_mistake_names_its_error() -> None:
    source = (Path(__file__).parent / "refused.py").read_text(encoding="utf-8")
    code = source.partition("def names_that_do_not_exist")[2]
    assert len(re.findall(r"# type: ignore\[[\w, -]+\]$", code, re.MULTILINE)) >= 15
    assert re.search(r"# type: ignore(?!\[)", code) is None
