"""Work that will take minutes says so after its first columns, and what is cheaper; other work says nothing."""

from __future__ import annotations

import dataclasses
import io
import itertools
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.tensors import long_work
from packprop.errors import PackpropWarning
from tests.selection import one_in


def run(extension: Any, model: nn.Module | None = None, outputs: int = 40) -> None:
    torch.manual_seed(0)
    net = packprop.extend(model or nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, outputs)))
    loss = packprop.extend(nn.CrossEntropyLoss())(net(torch.randn(4, 3)), torch.tensor([0, 1, 2, 1]))
    with packprop.backpack(extension, memory=one_column_at_a_time(net, extension)):
        loss.backward()


def one_column_at_a_time(model: nn.Module, extension: Any) -> Any:
    """A plan without vectorised sweeps."""
    plan = packprop.plan(
        model, nn.CrossEntropyLoss(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 1])), [extension]
    )
    return dataclasses.replace(plan, chunk_sizes=plan.chunk_sizes._replace(cotangents=0))


def ticking(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by so many seconds whenever it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(long_work, "clock", lambda: step * next(ticks))


class Terminal(io.StringIO):
    """A terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_a_terminal_shows_how_long_work_has_taken(
    shown: bool, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
    monkeypatch.setenv("TERM", "xterm")
    with long_work.waiting("compiling 7 operations of a step", shown):
        pass
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]  # a Terminal
    assert ("packprop: compiling 7 operations of a step" in said) == (shown and is_terminal)
    assert ("0:00:00" in said) == (shown and is_terminal)
    assert said.endswith("\033[2K") == (shown and is_terminal)  # the line is empty again


@one_in(3)
@pytest.mark.parametrize(
    ("make", "cheaper"),
    [
        (extensions.DiagHessian, "DiagGGNMC or DiagHessianMC in place of DiagHessian"),
        (extensions.BatchDiagHessian, "BatchDiagGGNMC in place of BatchDiagHessian"),
        (extensions.DiagGGNExact, "DiagGGNMC in place of DiagGGNExact"),
        (extensions.KFLR, "KFAC in place of KFLR"),
        (lambda: extensions.EKFAC(fisher="exact"), "KFAC in place of EKFAC"),
    ],
)
def test_long_work_says_how_long_and_what_is_cheaper(
    make: Any, cheaper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking(4.0, monkeypatch)
    with pytest.warns(PackpropWarning, match="will take about") as caught:
        run(make())
    (said,) = [str(warning.message) for warning in caught]  # once in a pass
    assert cheaper in said
    assert "columns took" in said
    assert "minutes" in said


@pytest.mark.parametrize(("hidden", "columns"), [(0, 39), (1, 30)])
def test_the_number_of_columns_is_that_of_all_of_a_kind(
    hidden: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the loss; or first 30 at the second nonlinearity, which the first one needs no sweep for."""
    ticking(4.0, monkeypatch)
    layers = [nn.Linear(3, 30), nn.Tanh(), *[nn.Linear(30, 30), nn.Tanh()] * hidden, nn.Linear(30, 40)]
    with pytest.warns(PackpropWarning, match=rf"1 of {columns} columns took 4 s"):
        run(extensions.DiagHessian(), nn.Sequential(*layers))


def test_eigenvectors_are_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(40.0, monkeypatch)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)))
    with pytest.warns(PackpropWarning, match="% of the work on eigenvectors took 40 s"):
        run(extensions.EKFAC(fisher="empirical"), model)  # which has no columns


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(extensions.DiagHessian())
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_for_work_of_some_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticking(1.0, monkeypatch)
    monkeypatch.setattr(long_work, "LONG", 1e9)
    run(extensions.DiagGGNExact())
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(extensions.DiagGGNExact())
    assert "DiagGGNExact" in capsys.readouterr().err


def test_a_plan_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(4.0, monkeypatch)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        packprop.plan(nn.Linear(3, 40), nn.CrossEntropyLoss(), batch, [extensions.KFLR()])
