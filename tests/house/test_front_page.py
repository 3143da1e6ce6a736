"""The front page of the site: twelve jobs, each a few lines that run, with a page that has the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import packprop
from packprop import compat
from packprop.examples import SmallResNet
from tests.house.pages import ROOT
from tests.selection import one_in

PAGE = (ROOT / "docs/index.md").read_text(encoding="utf-8")
CARD = re.compile(r"^:::\{grid-item-card\} \.\.\. (.*?)\n(.*?)^:::$", re.MULTILINE | re.DOTALL)
CARDS: dict[str, str] = dict(CARD.findall(PAGE))
LINES = 6
"""Lines that a job takes at most."""

# What a user is left with after each.
LEFT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "measure each sample's gradient": lambda names: Path("norms.pt").exists() and names["norms"].shape == (12,),
    "know what each weight is worth": lambda names: names["fisher"]["head.weight"].shape == (10, 8),
    "find wrong labels": lambda names: Path("profile.html").stat().st_size > 100_000,
    "precondition with Kronecker factors": lambda names: names["p"].grad.isfinite().all(),
    "choose a batch size": lambda names: "noise_scale" in Path("run.jsonl").read_text(),
    "train privately": lambda names: names["clipped"].norms.shape == (12,),
    "stay within my memory": lambda names: names["model"].head.weight.variance.shape == (10, 8),
    "see which samples did this": lambda names: names["influence"] is packprop.influence,
    "compute eigenvalues and a trace": lambda names: names["top"].shape == (3,),
    "run my BackPACK script": lambda names: names["DiagGGNExact"] is not None,
    "use several processes": lambda names: names["model"].head.weight.variance.shape == (10, 8),
    "add an extension or a function": lambda names: used(names).shape == (10, 8),
}


def used(names: dict[str, Any]) -> torch.Tensor:
    with packprop.backpack(names["LargestEntry"]()):
        names["loss"](names["model"](names["x"]), names["y"]).backward()
    head = names["model"].head.weight
    assert torch.equal(head.largest_entry, rows_of(names).abs().amax(0))
    found: torch.Tensor = head.largest_entry
    return found


def rows_of(names: dict[str, Any]) -> torch.Tensor:
    with packprop.backpack(packprop.extensions.BatchGrad()):
        names["loss"](names["model"](names["x"]), names["y"]).backward()
    rows: torch.Tensor = names["model"].head.weight.grad_batch
    return rows


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is yours: a residual network, as `packprop profile` takes it, and a batch."""
    monkeypatch.chdir(tmp_path)
    model, loss = packprop.extend(SmallResNet(width=4)).eval(), packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(12, 1, 8, 8), torch.randint(10, (12,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = {
        "torch": torch,
        "optimizer": optimizer,
        "model": model,
        "loss": loss,
        "x": x,
        "y": y,
        "data": (x, y),
        "noise": 0.5,
    }
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/joined", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        yield {**known, "parallel": parallel, "loader": [(x, y)] * 2}
    finally:
        dist.destroy_process_group()
        compat.uninstall()


def test_there_are_twelve() -> None:
    assert [*CARDS] == [*LEFT]


@one_in(6)
@pytest.mark.parametrize("job", CARDS)
def test_a_job_runs_as_it_stands(job: str, names: dict[str, Any]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", CARDS[job], re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= LINES
    exec(compile(code, f"docs/index.md: {job}", "exec"), names)
    assert LEFT[job](names)


@pytest.mark.parametrize("job", CARDS)
def test_a_job_is_short_and_leads_to_its_page(job: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", CARDS[job], re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 6
    assert max(map(len, lines)) <= 78
    links = re.findall(r"\]\((.*?)\)", CARDS[job].rpartition("```")[2])
    assert links
    assert all((ROOT / "docs" / target).exists() for target in links)
