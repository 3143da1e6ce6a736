"""A `Result` is a mapping that prints, shows itself in a notebook, and makes a data frame."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import BadInput, Result
from packprop.applications.dataset import summary
from packprop.extensions import EKFAC, KFLR, BatchGrad, Variance
from tests.dataset.small import SIZE, compute, small


@pytest.fixture
def result() -> Result:
    torch.manual_seed(0)
    model, data = small()
    return compute(model, nn.CrossEntropyLoss(), data, KFLR(), EKFAC(fisher="exact"), Variance())


def test_a_result_is_a_mapping(result: Result) -> None:
    assert (list(result), len(result)) == (["kflr", "ekfac", "variance"], 3)
    assert "kflr" in result
    assert "kfac" not in result
    assert result.get("kfac") is None
    assert result[KFLR()] is result["kflr"]
    assert {name: by_name.keys() for name, by_name in result.items()}["variance"] == result["kflr"].keys()
    assert len(repr(result)) < 200
    assert "'kflr': 4 parameters" in repr(result)


@pytest.mark.parametrize("batch_size", [2, None])
def test_parameters_stand_in_the_order_of_the_model(batch_size: int | None, tmp_path: Path) -> None:
    """Side by side they fit ``parameters_to_vector`` and operators; a pass ends with the first layer."""
    model, data = small()
    names = [name for name, _ in model.named_parameters()]
    options = {"batch_size": batch_size, "checkpoint": tmp_path / "run"}
    for _ in range(2):  # the second time, the checkpoint is complete
        found = compute(model, nn.CrossEntropyLoss(), data, Variance(), KFLR(), **options)
        assert [list(by_name) for by_name in found.values()] == [names, names]
    found.save(tmp_path / "values.safetensors")
    assert list(Result.load(tmp_path / "values.safetensors")["variance"]) == names


def test_each_tensor_has_a_line(result: Result) -> None:
    lines = {(line.quantity, line.parameter, line.part): line for line in summary.lines_of(result.tables)}
    assert len(lines) == 6 + 4 + 4
    factor = result["kflr"]["0.weight"][1]
    assert isinstance(factor, torch.Tensor)
    line = lines["kflr", "0.weight", "A"]
    assert (line.shape, line.dtype) == ((3, 3), "float64")
    found = line.norm, line.mean, line.smallest, line.largest
    expected = factor.norm(), factor.mean(), factor.min(), factor.max()
    assert found == pytest.approx([float(each) for each in expected])
    assert ("kflr", "0.bias", "B") in lines
    assert lines["ekfac", "2.weight", "eigenvalues"].shape == (2, 4)
    assert lines["variance", "2.weight", ""].smallest >= 0


def test_summary(result: Result) -> None:
    text = result.summary()
    assert str(result) == text
    assert max(map(len, text.splitlines())) <= 100
    heads, _, *rows, empty, facts = text.splitlines()
    assert heads.split() == ["quantity", "parameter", "part", "shape", "norm", "mean", "smallest", "largest"]
    assert (len(rows), empty) == (14, "")
    first = next(summary.lines_of(result.tables))
    shape = str(list(first.shape)).split()
    assert rows[0].split() == ["kflr", first.parameter, "B", *shape, *numbers(first)]
    assert facts == f"{SIZE} samples, mean loss {result.loss:.6g}"


def numbers(line: summary.Line) -> list[str]:
    return [f"{number:.4g}" for number in (line.norm, line.mean, line.smallest, line.largest)]


def test_long_names_are_folded_not_cut() -> None:
    name = "model.decoder.layers.11.self_attention.output_projection.lora_A.default.weight" * 2
    text = Result({"kfac": {name: [torch.eye(3), torch.eye(200)]}}, 1, 0.5).summary()
    assert max(map(len, text.splitlines())) <= 100
    heads, _, *rows = text.splitlines()
    start, end = heads.index("parameter"), heads.index("part ")
    assert "".join(row[start:end].strip() for row in rows[:-2]) == 2 * name


def test_a_notebook_shows_a_table(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = result._repr_html_()
    assert shown.count("<tr>") == 15
    assert "<td>0.weight</td><td>B</td><td>[4, 4]</td><td>float64</td>" in shown
    assert "more lines" not in shown
    monkeypatch.setattr(summary, "MOST_LINES", 4)
    shown = result._repr_html_()
    assert shown.count("<tr>") == 5
    assert "10 more lines" in shown
    assert "<td>&lt;b&gt;</td>" in Result({"x": {"<b>": torch.ones(1)}}, 1, 0.0)._repr_html_()


def test_a_data_frame(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match=r"pip install '\.\[frames\]'"):
        result.to_frame()
    monkeypatch.undo()
    pytest.importorskip("pandas")
    frame = result.to_frame()
    assert frame.index.names == ["quantity", "parameter", "part"]
    assert list(frame.columns) == ["shape", "dtype", "norm", "mean", "smallest", "largest"]
    assert len(frame) == 14
    value = result["variance"]["0.weight"]
    assert isinstance(value, torch.Tensor)
    assert frame.loc[("variance", "0.weight", ""), "mean"] == pytest.approx(float(value.mean()))
    assert frame.loc[("kflr", "0.weight", "A"), "shape"] == (3, 3)


def test_values_of_any_kind() -> None:
    tables = {
        "none": {"w": torch.empty(0, 3)},
        "whole": {"w": torch.tensor([3, 4])},
        "complex": {"w": torch.tensor([3 + 4j, 0])},
        "half": {"w": torch.full((4000,), 100.0, dtype=torch.float16)},
        "nested": {"w": [torch.ones(1), [torch.ones(2)], torch.zeros(1)]},
        "broken": {"w": torch.tensor([1.0, math.nan])},
    }
    lines = {(line.quantity, line.part): line for line in summary.lines_of(tables)}
    assert (lines["none", ""].norm, math.isnan(lines["none", ""].mean)) == (0, True)
    assert (lines["whole", ""].norm, lines["whole", ""].mean) == (5, 3.5)
    assert (lines["complex", ""].norm, lines["complex", ""].largest) == (5, 5)
    assert lines["half", ""].norm == pytest.approx(100 * 4000**0.5)
    assert [part for quantity, part in lines if quantity == "nested"] == ["0", "1", "2"]
    assert math.isnan(lines["broken", ""].norm)


def test_files_that_are_no_results(tmp_path: Path) -> None:
    import safetensors.torch

    (tmp_path / "text").write_text("no tensors")
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "other")
    for name, words in [
        ("absent", "cannot be read"),
        ("text", "cannot be read"),
        ("other", "it is not values over"),
    ]:
        with pytest.raises(BadInput, match=words):
            Result.load(tmp_path / name)


def test_a_save_that_ends_early_leaves_the_file_before(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    (tmp_path / "link").symlink_to(tmp_path / "result")
    for path in (tmp_path / "result", str(tmp_path / "link")):
        result.save(path)
        assert Result.load(path).loss == result.loss

    def ended(tensors: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"some")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", ended)
    with pytest.raises(KeyboardInterrupt):
        result.save(tmp_path / "result")
    assert Result.load(tmp_path / "link").loss == result.loss
    assert (tmp_path / "link").is_symlink()


def test_gradients_of_samples_have_lines_too() -> None:
    model, data = small()
    result = packprop.compute(model, nn.CrossEntropyLoss(), data, [BatchGrad()], progress=False)
    shapes = {line.parameter: line.shape for line in summary.lines_of(result.tables)}
    assert shapes["0.weight"] == (SIZE, 4, 3)
