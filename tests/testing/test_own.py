"""A use and an extension of one's own, in under ten lines each."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from packprop.engine.algebra.statistics import sq_norm
from packprop.testing import check_extension, check_use
from packprop.types import GRADIENT, Extension, Row
from tests.distributed.processes import script
from tests.selection import thorough
from tests.testing.registered import Gate, gates, write_a_use, write_an_extension

ROOT = Path(__file__).resolve().parents[2]


def test_a_use_of_ones_own() -> None:
    assert len(inspect.getsource(write_a_use).splitlines()) < 10
    write_a_use()
    report = check_use(Gate.apply, gates)
    assert report.structures == {"weight": "Scale"}
    assert report.error < 1e-13
    assert {"one sample at a time", "the fallback", "in a model that calls it twice"} <= set(report.laws)


def test_an_extension_of_ones_own() -> None:
    assert len(inspect.getsource(write_an_extension).splitlines()) < 10
    report = check_extension(write_an_extension(), lambda rows: rows[0].abs().mean(0))
    assert report.error < 1e-13
    laws = {"chunks of samples", "columns at once", "overwritten", "scales with the loss", "reference"}
    assert laws | {"batches of a data set", "differentiable"} <= set(report.laws)


@dataclass(frozen=True, eq=False)
class NormShare(Extension):
    """The share of each sample's norm in their sum, a constant for a single sample."""

    savefield = "norm_share"
    rows = (Row(GRADIENT, lambda structure: _share(sq_norm(structure)), whole=True, degree=0),)


def _share(squares: Tensor) -> Tensor:
    return squares.sqrt() / squares.sqrt().sum()


def test_values_that_are_constant_for_a_single_sample() -> None:
    report = check_extension(NormShare(), lambda rows: _share(rows[0].flatten(1).square().sum(1)))
    assert "differentiable" in report.laws


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("docs/guide/distributed.md", marks=thorough),
        "docs/guide/extending.md",
        "docs/guide/hugging_face.md",
        pytest.param("docs/guide/language_models.md", marks=thorough),
        pytest.param("docs/guide/memory.md", marks=thorough),
    ],
)
def test_what_the_pages_show_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        name = f"{page}, block {number}"
        if block.startswith("# torchrun"):
            script(block, 2, name)
        else:
            exec(compile(block, name, "exec"), names)
    assert len(blocks) >= (1 if "distributed" in page else 3)
