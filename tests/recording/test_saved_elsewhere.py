"""Checkpointing and offloading stay what they are: the same numbers, and the memory that they save."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from benchmarks.checkpointing import EXTENSIONS, Bytes, Size, Step
from packprop import extensions
from packprop.algebra import cells
from packprop.engine import chunks
from packprop.recording.marks import USE, marks_of, nodes_above
from tests.recording.saving import REFERENCE, WAYS, Net, assert_equal, plain, run
from tests.references.running import ROWS, Row
from tests.selection import often
from tests.versions import needs_hooks


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_the_same(way: str) -> None:
    assert_equal(run(WAYS[way], ROWS), run(REFERENCE.get(way, plain), ROWS))


@often(lambda way, row: way == "checkpoint")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "save_on_cpu"])
def test_each_extension_alone(way: str, row: Row) -> None:
    assert_equal(run(WAYS[way], [row]), run(plain, [row]))


SMALL = Size(samples=256, width=128, blocks=6, layers=4)


@functools.cache
def plain_training(way: str) -> Bytes:
    return Step(way, None, SMALL).bytes()


@often(lambda way, extension: extension == "Variance")
@pytest.mark.parametrize("way", [pytest.param("checkpoint", marks=needs_hooks), "reentrant checkpoint"])
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_peak_is_that_of_checkpointing(way: str, extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 10 % above plain training with checkpointing plus the results, in tracked bytes."""
    # chunks as small beside this network as the default ones beside a large one
    monkeypatch.setattr(chunks, "SCRATCH", 2**16 if extension == "Variance" else 2**19)
    monkeypatch.setattr(cells, "IN_CACHE", 2**12)
    base, mine = plain_training(way), Step(way, extension, SMALL).bytes()
    assert mine.peak < 1.1 * (base.peak + mine.results)
    assert mine.kept < 1.01 * base.kept
    assert plain_training("plain").kept > 1.1 * base.peak  # so that the bound tells


def uses_of(loss: Tensor) -> Iterator[Any]:
    for node in nodes_above([loss.grad_fn]):
        yield from (use for use, *_ in marks_of(node).get(USE, ()))


@needs_hooks
def test_nothing_is_held_and_nothing_is_left() -> None:
    """Inside a checkpoint a use holds no input; after the pass nothing of it is alive, without a collection."""
    seen: list[weakref.ref[Tensor]] = []

    def block(x: Tensor) -> Tensor:
        x = torch.sin(x)
        seen.append(weakref.ref(x))
        return model(x)

    model = packprop.extend(nn.Linear(5, 5))
    gc.collect()
    gc.disable()
    try:
        loss = packprop.extend(nn.MSELoss())(
            checkpoint(block, torch.randn(3, 5, requires_grad=True), use_reentrant=False), torch.randn(3, 5)
        )
        assert [reference() for reference in seen] == [None]
        assert [use.source is not None for use in uses_of(loss)] == [True]
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        assert len(seen) > 1
        del loss
        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_no_hooks_no_cost() -> None:
    """Where no hooks are in force uses hold their inputs, and nothing is run again."""
    model = packprop.extend(nn.Linear(5, 5))
    loss = model(torch.randn(3, 5)).sum()
    assert [use.source for use in uses_of(loss)] == [None]


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
