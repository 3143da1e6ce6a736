"""The page of a training run: the lines of a monitor over steps, from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import packprop
from packprop import BadInput, PackpropWarning
from packprop.applications.reports import cli
from packprop.applications.reports.page.training import findings_of, outlying_samples, read_lines, training_page
from packprop.monitor import QUANTITIES, JsonLines
from tests.reports.pages import read_page


def run(path: Path, steps: int = 6) -> None:
    """A short run in which the sample named `bad` is far off in every step."""
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = packprop.Monitor(model, every=1, quantities=QUANTITIES, log=str(path))
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    x[3] *= 50
    for _ in range(steps):
        optimizer.zero_grad()
        with monitor.step(identifiers=["bad" if at == 3 else at for at in range(16)]):
            loss(model(x), y).backward()
            optimizer.step()


def test_every_quantity_is_a_figure_over_the_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run.jsonl")
    assert cli.main(["page", str(tmp_path / "run.jsonl")]) == 0
    assert capfd.readouterr().err == f"open {tmp_path / 'run.html'} in a browser\n"
    lines = read_lines(tmp_path / "run.jsonl")
    page = read_page((tmp_path / "run.html").read_text(encoding="utf-8"))
    drawn = {
        each.attributes["data-chart"]: json.loads(each.text)
        for each in page.all("script", type="application/json")
    }
    expected = {
        "signal_to_noise",
        "gradient_norm",
        "sample_norm_median",
        "update_ratio",
        "ggn_trace",
        "sharpness",
    }
    assert expected <= {*drawn} <= {*expected, "critical_batch_size"}
    for key in expected:
        (figure,) = (each for each in page.all("figure") if each.all(id=key))
        cells = [row.all("td")[0].text for row in figure.all("tbody")[0].all("tr")]
        assert len(cells) == len(lines) == 6
        (rows,) = drawn[key]["datasets"].values()
        assert [row["value"] for row in rows] == [line[key] for line in lines]
    assert "bad" in page.text
    links = {each.attributes["href"] for each in page.all("a")}
    assert links <= {f"#{each.attributes.get('id')}" for each in page.below()}


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "gradient_norm": 1}\n')
    assert cli.main(["page", str(path), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "name a file in an existing folder that you can write to" in capfd.readouterr().err


def test_a_run_without_figures_has_no_contents() -> None:
    page = read_page(training_page([{"step": step, "loss": 1.0} for step in range(2)], "run"))
    assert not page.all("nav")


def test_a_folder_named_like_a_run_is_that_of_a_profile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.jsonl").mkdir()
    assert cli.main(["page", f"{tmp_path / 'run.jsonl'}/"]) == 2
    assert "A profile was to be read" in capfd.readouterr().err


def test_outliers_are_counted_over_steps(tmp_path: Path) -> None:
    lines = [
        {
            "step": 1,
            "outliers": [{"sample": 7, "norm": 2.0}, {"sample": "a", "norm": 9.0}],
            "gradient_norm": 1.0,
        },
        {"step": 5, "outliers": [{"sample": 7, "norm": 3.0}], "gradient_norm": 20.0},
        {"step": 9, "outliers": None, "gradient_norm": 1.5},
    ]
    assert outlying_samples(lines) == [("7", 2, 5, 3.0), ("a", 1, 1, 9.0)]
    said = [finding.says for finding in findings_of(lines, outlying_samples(lines))]
    assert said == [
        "The gradient was 13.3 times its median in step 5.",
        "1 sample stood out more than once.",
    ]
    page = training_page(lines, "a <b>")
    assert "a &lt;b&gt;" in page


def test_a_step_that_was_run_again_counts_once(tmp_path: Path) -> None:
    """A run that went on from a checkpoint writes some steps a second time."""
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"step": 2, "gradient_norm": 1}\n{"step": 4, "gradient_norm": 2}\n\n{"step": 2, "gradient_norm": 3}\n'
    )
    assert [(line["step"], line["gradient_norm"]) for line in read_lines(path)] == [(2, 3), (4, 2)]


def test_lines_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    """A run that was killed while it wrote a line, and goes on."""
    path = tmp_path / "run.jsonl"
    log = JsonLines(path)
    for step in range(3):
        log({"gradient_norm": float(step)}, step)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.warns(PackpropWarning, match="leaves out 1 line of .*run.jsonl', cut off by a kill"):
        assert [line["step"] for line in read_lines(path)] == [0, 1]
    log({"gradient_norm": 5.0}, 2)
    with pytest.warns(PackpropWarning, match="leaves out 1 line"):
        assert [(line["step"], line["gradient_norm"]) for line in read_lines(path)] == [(0, 0), (1, 1), (2, 5)]
    assert path.read_text().count("\n") == 4
    path.write_text(path.read_text() + '{"st')
    with pytest.warns(PackpropWarning, match="leaves out 2 lines"):
        assert len(read_lines(path)) == 3


@pytest.mark.parametrize("text", [None, "", "{", '{"loss": 3}\n', "[1]\n", "3\n"])
def test_what_is_no_run_is_refused(text: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match="The page of a training run was asked for"):
        read_lines(path)
    assert cli.main(["page", str(path)]) == 2
    assert "log='run.jsonl'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("intervals", "says"),
    [
        (((80, 130), (150, None)), "The noise scale grew from 100 to 200 samples."),
        (((60, None), (90, 400)), "The noise scale changed from 100 to 200 samples, which may be chance."),
        (((60, 140), (0, None)), "The noise scale changed from 100 to 200 samples, which may be chance."),
        ((None, None), "The noise scale grew from 100 to 200 samples."),
    ],
)
def test_a_noise_scale_that_may_not_have_moved(intervals: tuple[object, ...], says: str) -> None:
    lines: list[dict[str, object]] = []
    for step, (scale, ends) in enumerate(zip((100.0, 200.0), intervals, strict=True)):
        line: dict[str, object] = {"step": step, "critical_batch_size": scale}
        if isinstance(ends, tuple):
            line["critical_batch_size_low"], line["critical_batch_size_high"] = ends
        lines.append(line)
    (found,) = findings_of(lines, [])
    assert found.says == says
    assert ("at last" in found.because) == (intervals[1] is not None)


def test_an_interval_without_an_upper_end_is_shown() -> None:
    """Also that of a step whose signal is lost in the noise: there is no estimate, but a lower end."""
    key = "critical_batch_size"
    ends = [(50.0, 20.0, 90.0), (None, 70.0, None), (80.0, 60.0, None)]
    lines = [
        {"step": step, key: scale, f"{key}_low": low, f"{key}_high": high}
        for step, (scale, low, high) in enumerate(ends)
    ]
    page = read_page(training_page(lines, "run"))
    (figure,) = (json.loads(each.text) for each in page.all("script", type="application/json"))
    drawn = [rows for rows in figure["datasets"].values() if len(rows) == 3]
    assert [[row["value"] for row in rows] for rows in drawn] == [[50.0, None, 80.0]] * 2
    assert [[row["low"] for row in rows] for rows in drawn] == [[20.0, 70.0, 60.0]] * 2
    assert [row["high"] is not None for rows in drawn for row in rows].count(False) == 2  # of the line alone
    assert [each.text for each in page.all("dd")] == ["80", "> 60"]
