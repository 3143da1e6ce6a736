"""A use and an extension of one's own, in under ten lines each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from packprop.testing import check_extension, check_use
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
