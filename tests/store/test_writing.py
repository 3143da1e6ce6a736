"""What is written to a store by hand is what is read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import packprop
from packprop import Store, StoreWriter
from packprop.errors import PackpropError
from packprop.extensions import BatchDiagGGNExact, BatchGrad, BatchL2Grad
from packprop.store import plain, writing
from tests.references.running import assert_near
from tests.store.small import problem, rows_one_by_one, write_batch, written


@pytest.mark.parametrize("cuts", [[7], [3, 1, 3], [1] * 7], ids=str)
def test_rows_of_batches_of_any_size_have_one_scale(tmp_path: Path, cuts: list[int]) -> None:
    model, x, y = written(tmp_path / "store", cuts)
    store = Store(tmp_path / "store")
    assert (store.samples, store.terms, store.finished) == (7, 7.0, True)
    assert store.identifiers.tolist() == list(range(7))
    for name, expected in rows_one_by_one(model, x, y).items():
        assert_near(store["grad_batch"][name].torch(), expected, name)
    assert_near(
        store["loss"].torch(), nn.functional.cross_entropy(model(x), y, reduction="none").detach(), "loss"
    )


def test_values_are_taken_off_the_parameters(tmp_path: Path) -> None:
    model, *_ = written(tmp_path / "store", [3])
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_numpy_reads_the_files(tmp_path: Path) -> None:
    written(tmp_path / "store", [4, 3], dtype=torch.float16)
    shard = tmp_path / "store" / "shard-00000"
    header = json.loads((shard / "header.json").read_text())
    (weight,) = [each for each in header["arrays"] if each["parameter"] == "0.weight"]
    assert (weight["quantity"], weight["shape"], weight["dtype"]) == ("grad_batch", [4, 3], "float16")
    values = np.load(shard / weight["file"], mmap_mode="r")
    assert (values.shape, values.dtype) == ((7, 4, 3), np.float16)
    assert torch.equal(
        torch.from_numpy(values.copy()), Store(tmp_path / "store")["grad_batch", "0.weight"].torch()
    )
    assert np.load(shard / "samples.npy").tolist() == list(range(7))


@pytest.mark.parametrize("dtype", sorted(plain.DESCRIPTIONS, key=str), ids=str)
def test_every_precision_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = torch.complex128 if dtype.is_complex else torch.float64
    values = (torch.randn(5, 2, 3, dtype=source) * 100).to(dtype)
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        for rows in (values[:2], values[2:]):
            writer.write(a=rows)
    array = Store(tmp_path / "store")["a"]
    assert array.dtype == dtype
    assert torch.equal(array.torch(), values)
    exact = values.float() if dtype == torch.bfloat16 else values
    assert np.array_equal(array.numpy(), exact.numpy())


def test_values_without_axes_and_without_entries(tmp_path: Path) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.none = nn.Parameter(torch.empty(0, 3))
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        for size in (2, 0, 1):
            model.scale.grad_batch = torch.arange(float(size))
            model.none.grad_batch = torch.empty(size, 0, 3)
            writer.write()
    store = Store(tmp_path / "store")
    assert store["grad_batch"]["scale"].torch().tolist() == [0, 1, 0]
    assert store["grad_batch"]["none"].torch().shape == (3, 0, 3)


@pytest.mark.parametrize("batches", [0, 1])
def test_a_store_of_nothing(tmp_path: Path, batches: int) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        for _ in range(batches):
            writer.write(a=torch.empty(0, 2))
    store = Store(tmp_path / "store")
    assert (store.samples, store.finished, list(store)) == (0, True, ["a"] * batches)
    if batches:
        assert store["a"].torch().shape == store["a"][[]].shape == (0, 2)
        assert store["a"].numpy().shape == (0, 2)
        assert list(store["a"]) == []


def test_numbers_that_do_not_fit_are_refused_not_stored(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), [], dtype=torch.float16) as writer:
        writer.write(a=torch.ones(2, 1))
        for beside in (1.0, torch.nan, torch.inf):
            with pytest.raises(PackpropError, match=r"7e\+04.*is 6.55e\+04"):
                writer.write(a=torch.tensor([[beside], [-7e4]]))
        writer.write(a=torch.tensor([[torch.nan], [torch.inf]]))
    assert Store(tmp_path / "store")["a"].torch().flatten()[:2].tolist() == [1, 1]
    assert Store(tmp_path / "store").samples == 4


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "compute"])
def test_rows_times_terms_fit_where_the_parameter_is_narrow(tmp_path: Path, by_hand: bool) -> None:
    """A loss that is a mean has rows within float16; its terms, of which there are four, take them out."""
    model = packprop.extend(nn.Linear(2, 1, bias=False).half())
    nn.init.zeros_(model.weight)
    x, y, loss = torch.full((4, 2), 3000.0).half(), torch.full((4, 1), -20.0).half(), nn.MSELoss()
    for dtype in (torch.float32, None):
        with StoreWriter(tmp_path / f"{dtype}", model, [BatchGrad()], dtype=dtype) as writer:
            refused = pytest.raises(PackpropError, match=r"1\.2e\+05.*float16")
            with contextlib.nullcontext() if dtype else refused:
                if by_hand:
                    with packprop.backpack(*writer.extensions), packprop.record():
                        loss(model(x), y).backward()
                    writer.write(terms=4)
                else:
                    packprop.compute(model, loss, (x, y), [BatchGrad()], store=writer, progress=False)
    assert (Store(tmp_path / "torch.float32")["grad_batch", "weight"].torch() == 2 * 20 * 3000).all()
    assert Store(tmp_path / "None").samples == 0
    for data in (tmp_path / "torch.float32", (x, y)):
        found = packprop.influence(data, model, loss, (x[:1], y[:1]))
        assert (found.largest.products == 2 * 120000.0**2).all()


def test_parameters_that_a_batch_does_not_use(tmp_path: Path) -> None:
    model, x, y = problem()
    parts = [model[:1], model]  # the first batch goes through the first layer alone
    with StoreWriter(tmp_path / "store", model, [BatchGrad(), BatchL2Grad()]) as writer:
        for part, inputs, targets in zip(parts, x.split([3, 4]), y.split([3, 4]), strict=True):
            for unused_are_zero in (False, True):
                loss = nn.functional.cross_entropy(part(inputs), targets)
                with packprop.backpack(*writer.extensions):
                    loss.backward()
                if part is model or unused_are_zero:
                    writer.write(terms=len(inputs), unused_are_zero=unused_are_zero)
                    break
                with pytest.raises(PackpropError, match="unused_are_zero"):
                    writer.write(terms=len(inputs))
    store = Store(tmp_path / "store")
    first, last = rows_one_by_one(model[:1], x[:3], y[:3]), rows_one_by_one(model, x[3:], y[3:])
    for name, expected in last.items():
        found = store["grad_batch", name].torch()
        assert_near(found[3:], expected, name)
        assert_near(found[:3], first.get(name, torch.zeros(3, *expected.shape[1:]).double()), name)
    assert store["batch_l2", "2.weight"][:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("later", ["unused", "frozen", "compiled"])
def test_values_of_an_earlier_pass_are_not_those_of_a_batch(tmp_path: Path, later: str) -> None:
    model, x, y = problem()
    part = model if later == "frozen" else model[:1]
    with packprop.backpack(BatchGrad()):
        nn.functional.cross_entropy(model(x), y).backward()
    if later == "frozen":
        model[0].requires_grad_(False)
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        step = packprop.compile(part, nn.CrossEntropyLoss(), writer.extensions, backend="eager")

        def batch() -> None:
            if later == "compiled":
                step(x, y)
                return
            with packprop.backpack(*writer.extensions):
                nn.functional.cross_entropy(part(x), y).backward()

        for _ in range(4 if later == "compiled" else 1):
            batch()
        with pytest.raises(PackpropError, match=r"parameter '[02].weight', with grad_batch of an earlier pass"):
            writer.write(terms=7, unused_are_zero=True)
        for parameter in model.parameters():
            del parameter.grad_batch
        batch()
        writer.write(terms=7, unused_are_zero=True)
    assert Store(tmp_path / "store").samples == 7
    assert not any("2." in name for name in Store(tmp_path / "store")["grad_batch"]) or later == "frozen"


def test_rows_that_are_left_out_later_are_zeros_too(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        for step in range(3):
            a, b = torch.full((2, 2), 1.0 + step), torch.full((2,), 5.0)
            writer.add({("a", ""): a, ("b", ""): b} if step == 1 else {("a", ""): a}, 2)
    store = Store(tmp_path / "store")
    assert store["b"].torch().tolist() == [0, 0, 5, 5, 0, 0]
    assert store["a"].torch()[:, 0].tolist() == [1, 1, 2, 2, 3, 3]


def test_large_values_and_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "OPEN_FILES", 2)
    monkeypatch.setattr(writing, "CHUNK", 2000)
    torch.manual_seed(0)
    values = {f"a{number}": torch.randn(40, 10 * number) for number in range(1, 6)}
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        for start in range(0, 40, 4):
            writer.write(**{name: value[start : start + 4] for name, value in values.items()})
            assert sum(array._file is not None for array in writer._arrays.values()) <= 2
    for name, value in values.items():
        assert torch.equal(Store(tmp_path / "store")[name].torch(), value)
    lines = (tmp_path / "store" / "shard-00000" / "chunks.jsonl").read_text().splitlines()
    assert len(lines) > 3


def test_a_full_disk_loses_nothing_that_was_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    room, really = [10**9], os.pwrite

    def pwrite(file: int, data: Any, place: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", "a disk")
        return really(file, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        write_batch(writer, model, x[:3], y[:3])
        writer.commit()
        room[0] = 100
        with pytest.raises(PackpropError, match=r"No space left.*\n.*first 3 samples are safe"):
            write_batch(writer, model, x[3:], y[3:])
            writer.commit()
        assert Store(tmp_path / "store").samples == 3
        room[0] = 10**9
        writer.resume_at(3, 3.0)
        write_batch(writer, model, x[3:], y[3:])
    for name, expected in rows_one_by_one(model, x, y).items():
        assert_near(Store(tmp_path / "store")["grad_batch", name].torch(), expected, name)


def test_what_is_open_is_not_seen_and_what_was_seen_stays(tmp_path: Path) -> None:
    model, x, y = problem()
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        assert Store(tmp_path / "store").samples == 0
        write_batch(writer, model, x[:2], y[:2])
        assert Store(tmp_path / "store").samples == 0
        writer.commit()
        early = Store(tmp_path / "store")
        before = early["grad_batch", "0.weight"].torch()
        write_batch(writer, model, x[2:], y[2:])
        writer.commit()
        assert (early.samples, early.finished) == (2, False)
        assert torch.equal(early["grad_batch", "0.weight"].torch(), before)
        assert Store(tmp_path / "store").samples == 7
    assert Store(tmp_path / "store").finished


def test_an_error_inside_keeps_whole_batches(tmp_path: Path) -> None:
    model, x, y = problem()
    with pytest.raises(KeyError), StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        write_batch(writer, model, x[:2], y[:2])
        raise KeyError
    store = Store(tmp_path / "store")
    assert (store.samples, store.finished) == (2, False)


def test_second_order_rows(tmp_path: Path) -> None:
    model, x, y = problem()
    with StoreWriter(tmp_path / "store", model, [BatchDiagGGNExact(), BatchL2Grad()]) as writer:
        for inputs, targets in zip(x.split(3), y.split(3), strict=True):
            write_batch(writer, model, inputs, targets)
    with packprop.record():
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    with packprop.backpack(BatchDiagGGNExact(), BatchL2Grad()):
        loss.backward()
    store = Store(tmp_path / "store")
    for name, parameter in model.named_parameters():
        assert_near(store["diag_ggn_exact_batch", name].torch(), parameter.diag_ggn_exact_batch, name)
        assert_near(store["batch_l2", name].torch(), parameter.batch_l2, name)


def test_values_of_two_passes_are_not_those_of_a_batch(tmp_path: Path) -> None:
    """Each extension has values of one pass."""
    model, x, y = problem()
    with StoreWriter(tmp_path / "store", model, [BatchGrad(), BatchL2Grad()]) as writer:
        for asked in (writer.extensions, writer.extensions[:1]):
            with packprop.backpack(*asked):
                nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(PackpropError, match="with batch_l2 of an earlier pass than that of"):
            writer.write(terms=7)


def test_values_without_a_name(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(**{"": torch.ones(2), "a": torch.zeros(2)})
    assert Store(tmp_path / "store")[""].torch().tolist() == [1, 1]
