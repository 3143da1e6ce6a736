"""Checkpointing and offloading stay what they are: the same numbers, and the memory that they save."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from benchmarks.checkpointing import EXTENSIONS, Bytes, Size, Step
from packprop import extensions
from packprop.engine.algebra import cells
from packprop.engine.passes import chunks
from tests.recording.saving import REFERENCE, WAYS, Net, assert_equal, plain, run
from tests.references.running import ROWS, Row
from tests.selection import often, one_in, thorough
from tests.versions import needs_hooks


@one_in(12)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_the_same(way: str) -> None:
    assert_equal(run(WAYS[way], ROWS), run(REFERENCE.get(way, plain), ROWS))


@one_in(5)
@often(lambda way, row: way == "checkpoint")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("way", ["checkpoint", "save_on_cpu"])
def test_each_extension_alone(way: str, row: Row) -> None:
    assert_equal(run(WAYS[way], [row]), run(plain, [row]))


SMALL = Size(samples=256, width=128, blocks=6, layers=4)


@functools.cache
def plain_training(way: str) -> Bytes:
    return Step(way, None, SMALL).bytes()


@thorough
@often(lambda extension: extension == "Variance")
@needs_hooks
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_peak_is_that_of_checkpointing(extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 10 % above plain training with checkpointing plus the results, in tracked bytes."""
    # chunks as small beside this network as the default ones beside a large one
    monkeypatch.setattr(chunks, "SCRATCH", 2**16 if extension == "Variance" else 2**19)
    monkeypatch.setattr(cells, "IN_CACHE", 2**12)
    base, mine = plain_training("checkpoint"), Step("checkpoint", extension, SMALL).bytes()
    assert mine.peak < 1.1 * (base.peak + mine.results)
    assert mine.kept < 1.01 * base.kept
    assert plain_training("plain").kept > 1.1 * base.peak  # so that the bound tells


@needs_hooks
def test_nothing_is_held_and_nothing_is_left() -> None:
    """What a region computes lives while it runs; after the pass nothing is left, without a collection."""
    seen: list[weakref.ref[Tensor]] = []

    def block(x: Tensor) -> Tensor:
        x = torch.sin(x)
        seen.append(weakref.ref(x))
        out: Tensor = model(x)
        return out

    model = packprop.extend(nn.Linear(5, 5))
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"retain_graph": True}):
            loss = packprop.extend(nn.MSELoss())(
                checkpoint(block, torch.randn(3, 5, requires_grad=True), use_reentrant=False), torch.randn(3, 5)
            )
            assert [reference() for reference in seen] == [None] * len(seen)
            with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
                loss.backward(**options)
            assert len(seen) > 1
            if not options:
                assert [reference() for reference in seen] == [None] * len(seen)
            del loss
            assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_activations_die_with_the_graph() -> None:
    """Neither extending nor a pass holds what a model has computed longer than autograd does."""
    seen: list[weakref.ref[Tensor]] = []
    model = packprop.extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)))
    for part in model:
        part.register_forward_hook(lambda _, args, out: seen.append(weakref.ref(args[0])))
    gc.collect()
    gc.disable()
    try:
        for inside in (False, True):
            seen.clear()
            with packprop.backpack(*([extensions.BatchGrad(), extensions.KFAC()] if inside else [])):
                loss = packprop.extend(nn.MSELoss())(model(torch.randn(3, 5)), torch.randn(3, 2))
                assert any(reference() is not None for reference in seen)
                loss.backward()
            assert [reference() for reference in seen] == [None] * len(seen)
            del loss
            loss = model(torch.randn(3, 5)).sum()
            del loss
            assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_a_region_runs_once_for_each_pass() -> None:
    """Reading off the graph what a checkpoint saved needs no run of its own inside of the pass."""
    runs: list[int] = []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        out: Tensor = model(torch.sin(x))
        return out

    model = packprop.extend(nn.Linear(5, 5))
    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    counts = []
    for _ in range(4):
        runs.clear()
        loss = packprop.extend(nn.MSELoss())(checkpoint(block, x, use_reentrant=False), y)
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        counts.append(len(runs))
    assert counts[-1] == 2, counts


def test_plain_training_sees_no_difference() -> None:
    """A checkpoint in an extended model saves and computes as often as in one that is not extended."""

    def train(extended: bool) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        model = Net(WAYS["checkpoint"])
        calls: list[int] = []
        model.mix.register_forward_pre_hook(lambda *_: calls.append(1))
        if extended:
            packprop.extend(model)
        model(torch.randn(4, 6)).sum().backward()
        return len(calls), [p.grad for p in model.parameters() if p.grad is not None]

    (calls, expected), (again, found) = train(False), train(True)
    assert calls == again == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
