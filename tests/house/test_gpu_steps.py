"""`make gpu`, tried on a CPU: its smallest step, and a call that goes on after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main, read, run_cases, write
from benchmarks.gpu.device import Options
from benchmarks.gpu.page import tables
from tests.selection import thorough

SMALL = ["--device", "cpu", "--small"]


@thorough
def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    threads = torch.get_num_threads()
    try:
        run_cases(
            "kernels", Options("cpu", small=True, jobs=1), tmp_path, names=["mlp, plain", "mlp, BatchGrad"]
        )
    finally:
        torch.set_num_threads(threads)
    found = json.loads(path.read_text())
    assert list(found["cases"]) == ["mlp, plain", "mlp, BatchGrad"]
    plain, ours = (found["cases"][name]["operations"] for name in found["cases"])
    assert 0 < plain < ours
    assert torch.__version__.startswith(found["environment"]["versions"]["torch"])  # with or without its build

    write(path, {**found, "complete": True})
    assert main([*SMALL, "--only", "kernels", "--out", str(tmp_path)]) == 0  # starts nothing
    assert json.loads(path.read_text())["cases"] == found["cases"]
    assert "mlp, BatchGrad" in capsys.readouterr().out


def test_a_page_is_made_of_results_of_a_gpu_alone(tmp_path: Path) -> None:
    record = {"agree": True, "tolerance": 2e-4, "largest_difference": 1e-6}
    place = {
        "device": "cpu",
        "small": False,
        "gpu": "G",
        "cuda": "1",
        "versions": {"torch": "2"},
        "commit": None,
    }
    content = {"title": "agreement with the CPU", "cases": {"mlp, float32": record}, "environment": place}
    write(tmp_path / "agreement.json", content)
    with pytest.raises(ValueError, match="results of a GPU"):
        tables(read(tmp_path))
    write(tmp_path / "agreement.json", {**content, "environment": {**place, "device": "cuda"}})
    assert "| mlp, float32 | done | yes | 0.0002 | 1e-06 |" in tables(read(tmp_path))
