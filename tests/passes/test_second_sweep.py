"""Corrected eigenvalues take a second sweep: chunks, and what is kept between the sweeps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.memory.live import LiveBytes
from packprop.engine.passes import chunks, column_sweeps
from tests.cases import BY_NAME
from tests.references.eigenvalues import drawn, step
from tests.references.oracle import Oracle
from tests.references.running import assert_near, backward
from tests.selection import one_in, thorough


def sweeps(monkeypatch: pytest.MonkeyPatch, *asked: Any) -> int:
    counted = []
    run = column_sweeps.sweep
    with monkeypatch.context() as patched:
        patched.setattr(column_sweeps, "sweep", lambda *a, **k: counted.append(1) or run(*a, **k))
        step(*asked)
    return len(counted)


def test_columns_are_swept_twice_only_where_they_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "COTANGENTS", 0)
    assert sweeps(monkeypatch, extensions.KFAC(), drawn(1)) == 6  # two seeds, and fresh draws
    assert sweeps(monkeypatch, drawn(1)) == 5
    assert sweeps(monkeypatch, drawn(3)) == 15
    assert sweeps(monkeypatch, extensions.EKFAC(fisher="empirical")) == 1
    assert sweeps(monkeypatch, extensions.EKFAC(fisher="exact")) == 2 * sweeps(monkeypatch, extensions.KFLR())
    monkeypatch.setattr(chunks, "COTANGENTS", 64 * 2**20)
    assert sweeps(monkeypatch, drawn(3)) == 2
    assert sweeps(monkeypatch, extensions.EKFAC(fisher="exact")) == 1


@one_in(3)
@pytest.mark.parametrize("options", [{"fisher": "exact"}, {"subsampling": [4, 1]}, {}], ids=str)
def test_chunks_change_no_number(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    expected = step(drawn(3, **options))
    for cotangents in (64 * 2**20, 0):
        for scratch in (8 * 2**20, 2000, 0):
            monkeypatch.setattr(chunks, "COTANGENTS", cotangents)
            monkeypatch.setattr(chunks, "SCRATCH", scratch)
            model = step(drawn(3, **options))
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert_near(
                    kronecker.dense(mine.ekfac), kronecker.dense(theirs.ekfac), f"{cotangents}, {scratch}"
                )


def test_the_first_pass_is_gone_when_the_hook_runs() -> None:
    seen = []

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            seen.append(parameter.ekfac)
            del parameter.ekfac

    model = step(extensions.EKFAC(fisher="exact"), extension_hook=hook)
    assert len(seen) == len(list(model.parameters()))
    assert all(isinstance(each, kronecker.Eigen) for each in seen)


def test_no_pass_holds_a_gradient_for_each_sample() -> None:
    torch.manual_seed(0)
    samples, width = 512, 256
    model = packprop.extend(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)))
    loss = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(samples, width), torch.randint(10, (samples,))
    counted = LiveBytes()
    with counted:
        value = loss(model(x), y)
        with packprop.backpack(extensions.EKFAC(fisher="exact")):
            value.backward()
    assert counted.peak < samples * width * width * 4 / 4


@thorough
def test_groups_are_mixed_in_chunks() -> None:
    """A basis of all output channels mixes groups, so that rows are formed even at a single position."""
    torch.manual_seed(0)
    samples, channels = 512, 256
    model = packprop.extend(nn.Sequential(nn.Conv2d(channels, channels, 1, groups=2), nn.Flatten()))
    loss = packprop.extend(nn.MSELoss())
    x = torch.randn(samples, channels, 1, 1)
    counted = LiveBytes()
    with counted, packprop.backpack(extensions.EKFAC()):
        loss(model(x), torch.zeros(samples, channels)).backward()
    assert counted.peak < samples * model[0].weight.numel() * 4 / 2


def test_gradients_of_eigenvalues_hold_the_eigenvectors_fixed() -> None:
    """The trace does not depend on the eigenvectors, so its gradient is exact."""
    problem, other = BY_NAME["linear-deep"].problem(2), BY_NAME["linear-deep"].problem(2)
    oracle = Oracle(other, create_graph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        backward(problem, extensions.EKFAC(fisher="exact"), create_graph=True)
    for name, parameter in problem.parameters.items():
        found = parameter.ekfac
        assert not any(vectors.requires_grad for vectors in found.vectors)
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        mine = torch.autograd.grad(kronecker.trace(found), list(problem.parameters.values()), **options)
        trace = oracle.ggn_block[name].trace()
        theirs = torch.autograd.grad(trace, list(other.parameters.values()), **options)
        for one, two in zip(mine, theirs, strict=True):
            assert_near(one, two, name, floor=1e-3)
    problem.model.zero_grad()
