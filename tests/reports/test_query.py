"""`packprop query`: what Python says, as tables or JSON, and how it says what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import packprop
from packprop.applications.reports import cli
from packprop.extensions import EKFAC, KFLR, BatchGrad
from tests.reports.factories import FACTORIES, Run
from tests.selection import one_in

QUERIES = """
torch.manual_seed(0)
MODEL = network()


def queries():
    return MODEL, nn.CrossEntropyLoss(), (INPUTS[:3], CLASSES[:3])
"""


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in a folder with a store, curvature and factories."""
    torch.manual_seed(0)
    (tmp_path / "wanted.py").write_text(FACTORIES + QUERIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "wanted", raising=False)
    import wanted  # type: ignore[import-not-found]  # written by the test

    data = wanted.INPUTS, wanted.CLASSES
    asked = [BatchGrad(), EKFAC(fisher="exact"), KFLR()]
    result = packprop.compute(
        wanted.MODEL.eval(), torch.nn.CrossEntropyLoss(), data, asked, store="store", progress=False
    )
    result.save("both.safetensors")
    packprop.Result({"kflr": result["kflr"]}, 30, 0.0).save("kflr.safetensors")

    def call(*arguments: str) -> tuple[int, str, str]:
        wanted.MODEL.train()
        status = cli.main(["query", *arguments])
        return status, *capfd.readouterr()

    return call


FACTORY = "--factory", "wanted:queries"


def test_it_says_what_python_says(query: Run, tmp_path: Path) -> None:
    curvature = "--curvature", "both.safetensors", "--entry", "ekfac", "--damping", "0.01"
    status, out, err = query("store", *FACTORY, *curvature, "--k", "4")
    assert status == 0
    model, loss, data = sys.modules["wanted"].queries()
    assert not model.training
    blocks = packprop.Result.load("both.safetensors")["ekfac"]
    expected = packprop.influence("store", model, loss, data, curvature=blocks, damping=0.01, k=4)
    assert out.splitlines()[:-1] == str(expected).splitlines()[:-1]  # all but what the curvature is called
    assert "F: ekfac" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "read 30 samples once" in err
    status, out, err = query("store", *FACTORY, *curvature, "--k", "4", "--json")
    assert (status, err) == (0, "")
    plain = json.loads(out)
    assert plain["queries"] == expected.to_dict()["queries"]
    assert (plain["curvature"], plain["damping"]) == ("ekfac", 0.01)


def test_options(query: Run) -> None:
    plain = query("store", *FACTORY, "--json")[1]
    one = "--curvature", "kflr.safetensors", "--damping", "0.1", "--json"
    exact = query("store", *FACTORY, *one)[1]
    factored = query("store", *FACTORY, *one, "--factored")[1]
    some = ("--memory", "2000", "--batch-size", "2", "--quantity", "grad_batch", "--device", "cpu", "--json")
    batches = query("store", *FACTORY, *some)[1]
    first, second = json.loads(plain), json.loads(batches)
    assert len({plain, exact, factored}) == 3
    assert second["readings"] > 1
    for one_query, other in zip(first["queries"], second["queries"], strict=True):
        assert [row["row"] for row in one_query["largest"]] == [row["row"] for row in other["largest"]]


@one_in(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", *FACTORY], "it is not the folder of a store"),
        (["store", "--factory", "wanted:absent"], "wanted has no 'absent'"),
        (["store", "--factory", "wanted:a_class"], "give an instance, Linear(...)"),
        (["store", "--factory", "wanted:loss_class"], "give an instance, CrossEntropyLoss(...)"),
        (["store", "--factory", "wanted:empty"], "it held no batch"),
        (["store", *FACTORY, "--damping", "1"], "without curvature"),
        (["store", *FACTORY, "--curvature", "kflr.safetensors"], "damping=None"),
        (
            ["store", *FACTORY, "--curvature", "both.safetensors", "--damping", "1"],
            "one of them must be chosen",
        ),
        (["store", *FACTORY, "--curvature", "absent.safetensors", "--damping", "1"], "it cannot be read"),
        (["store", *FACTORY, "--curvature", "wanted.py", "--damping", "1"], "it cannot be read"),
        (["store", *FACTORY, "--curvature", "kflr.safetensors", "--entry", "kfac"], "holds kflr"),
        (["store", *FACTORY, "--device", "nothing"], "--device nothing"),
        (["store", *FACTORY, "--memory", "200"], "more than"),
    ],
)
def test_what_is_wrong(query: Run, arguments: list[str], words: str) -> None:
    status, out, err = query(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert [line.split(":")[0].strip() for line in err.splitlines()[1:4]] == ["where", "why", "instead"]


def test_errors_of_packprops_own(query: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("packprop.applications.reports.query.influence", fails)
    status, _, err = query("store", *FACTORY)
    assert status == 1
    assert err.startswith("error: packprop query was called.\n")


def test_interrupted(query: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packprop.applications.reports.query.influence", interrupted)
    status, _, err = query("store", *FACTORY)
    assert (status, err) == (130, "interrupted; nothing was written\n")
