"""A writer that is killed or stopped goes on where it was safe; several writers make one store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import packprop
from packprop import Store, StoreWriter
from packprop.engine.algebra import CAT
from packprop.errors import BadInput, PackpropError
from packprop.extensions import BatchGrad
from packprop.store.folder import ShardHeader
from packprop.types import GRADIENT, Extension, Row
from tests.references.running import assert_near
from tests.selection import thorough
from tests.store.small import problem, rows_one_by_one, write_batch, written

KILLED = """
import sys, torch
from torch import nn
from packprop.store import StoreWriter
torch.set_num_threads(1)
writer = StoreWriter(sys.argv[1], nn.Linear(1, 1), [], resume=True, seconds=0.0)
end = int(sys.argv[2])
while writer.samples < end:
    start = writer.samples
    rows = torch.arange(start, start + 1 + start % 5).double()
    given = {("a", ""): rows[:, None].expand(-1, 300)} | ({("b", ""): rows} if start > 50 else {})
    writer.add(given, len(rows), 1.0)
    print(writer.samples, flush=True)
writer.close()
"""


@thorough
def test_a_kill_loses_the_open_chunk_at_most(tmp_path: Path) -> None:
    """Killed at random points, and gone on with; some of the rows come for the first time midway.

    How many samples are safe at a kill is the disk's choice: none yet, or all that were written.
    """
    chance, folder, known = random.Random(0), tmp_path / "store", 0
    call = [sys.executable, "-c", KILLED, str(folder)]
    for round_ in range(4):
        if round_ < 3:
            child = subprocess.Popen([*call, "1000000"], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            for _ in range(chance.randrange(5, 60)):
                assert child.stdout.readline()
            time.sleep(chance.random() * 0.01)
            os.kill(child.pid, signal.SIGKILL)
            child.communicate()
        else:
            subprocess.run([*call, str(known + 100)], stdout=subprocess.DEVNULL, check=True)
        store = Store(folder)
        assert store.samples >= known
        assert store.finished == (round_ == 3)
        known = store.samples
        expected = torch.arange(known).double()
        assert torch.equal(store["a"].torch(), expected[:, None].expand(-1, 300))
        assert torch.equal(store.identifiers, torch.arange(known))
        if "b" in store:
            found = store["b"].torch()
            first = int((found == 0).sum())
            assert first == known or 50 < first < known
            assert torch.equal(found[first:], expected[first:])
    assert known >= 100
    assert "b" in store
    assert first < known


@thorough
def test_a_kill_at_every_line_of_writing(tmp_path: Path) -> None:
    """What a kill leaves between any two writes is what a copy of the folder is then: each can be read."""
    model, x, y = problem()
    rows = rows_one_by_one(model, x, y)
    seen: list[int] = []
    really, folder = os.pwrite, tmp_path / "store"

    def pwrite(*args: object) -> int:
        done = really(*args)  # type: ignore[arg-type]  # handed on as they come
        if (folder / "shard-00000" / "header.json").exists():
            store = Store(folder)
            seen.append(store.samples)
            for name in store.get("grad_batch", {}):
                assert_near(store["grad_batch", name].torch(), rows[name][: store.samples], name)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with StoreWriter(folder, model, [BatchGrad()]) as writer:
            for start in range(0, 7, 2):
                write_batch(writer, model, x[start : start + 2], y[start : start + 2])
                writer.commit()
    assert sorted(set(seen)) == [0, 2, 4, 6, 7]
    assert len(seen) > 30


def test_going_on_where_a_checkpoint_was(tmp_path: Path) -> None:
    model, x, y = problem()
    with pytest.raises(KeyError), StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        for start in range(0, 6, 2):
            write_batch(writer, model, x[start : start + 2], y[start : start + 2])
        raise KeyError
    with StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True) as writer:
        assert (writer.samples, writer.terms) == (6, 6.0)
        writer.resume_at(4, 4.0)
        assert (writer.samples, writer.terms, Store(tmp_path / "store").samples) == (4, 4.0, 4)
        write_batch(writer, model, x[4:], y[4:])
        with pytest.raises(BadInput, match="holds 7 samples, and the checkpoint was made after 9"):
            writer.resume_at(9, 9.0)
    store = Store(tmp_path / "store")
    assert (store.samples, store.terms, store.finished) == (7, 7.0, True)
    for name, expected in rows_one_by_one(model, x, y).items():
        assert_near(store["grad_batch", name].torch(), expected, name)


def test_rows_after_a_step_back_are_not_those_that_were_there(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=torch.ones(4), b=torch.ones(4))
        writer.commit()
        writer.resume_at(1, 1.0)
        writer.add({("a", ""): torch.full((3,), 2.0)}, 3)
    store = Store(tmp_path / "store")
    assert store["a"].torch().tolist() == [1, 2, 2, 2]
    assert store["b"].torch().tolist() == [1, 0, 0, 0]


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    written(tmp_path / "store", [3])
    chunks = tmp_path / "store" / "shard-00000" / "chunks.jsonl"
    with chunks.open("a") as file:
        file.write('{"samples": 99, "ter')
    assert Store(tmp_path / "store").samples == 3
    model, *_ = problem()
    with StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True) as writer:
        assert writer.samples == 3
    assert [json.loads(line)["samples"] for line in chunks.read_text().splitlines()] == [3] * 4


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    model, x, y = problem()
    folder = tmp_path / "store"
    writers = [StoreWriter(folder, model, [BatchGrad()], shard=shard, shards=2) for shard in range(2)]
    write_batch(writers[0], model, x[0::2], y[0::2])
    assert not Store(folder).finished
    write_batch(writers[1], model, x[1::2], y[1::2], identifiers=[1, 3, 5])
    for writer in writers:
        writer.commit()
    writers[1].add({("score", ""): torch.arange(2.0)}, 2, 2.0, [70, 80])
    for writer in writers:
        writer.close()
    store = Store(folder)
    assert (store.samples, store.terms, store.finished) == (9, 9.0, True)
    assert store.identifiers.tolist() == [0, 2, 4, 6, 1, 3, 5, 70, 80]
    assert store.rows_of([3, 6]).tolist() == [5, 3]
    for name, expected in rows_one_by_one(model, x, y).items():
        array = store["grad_batch", name]
        assert_near(array[store.rows_of(range(7))], expected, name)
        assert_near(array[2:6], expected[[4, 6, 1, 3]], name)
        assert array[7:].count_nonzero() == 0
        assert np.array_equal(array.numpy(), array.torch().numpy())
    assert store["score"].torch().tolist() == [0] * 7 + [0, 1]
    assert store["score"][:4].tolist() == [0] * 4


def test_a_shard_whose_writer_has_just_come(tmp_path: Path) -> None:
    model, *_ = written(tmp_path / "store", [3], shard=0, shards=2)
    (tmp_path / "store" / "shard-00001").mkdir()
    (tmp_path / "store" / "shard-00001" / "lock").touch()
    (tmp_path / "store" / "shard-00001" / "header.json.part").touch()
    store = Store(tmp_path / "store")
    assert (store.samples, store.finished) == (3, False)
    with StoreWriter(tmp_path / "store", model, [BatchGrad()], shard=1, shards=2):
        pass
    assert Store(tmp_path / "store").finished


def test_shards_of_different_stores(tmp_path: Path) -> None:
    model, *_ = problem()
    folder = tmp_path / "store"
    with StoreWriter(folder, model, [BatchGrad()], shard=0, shards=2):
        pass
    with pytest.raises(BadInput, match="other shards: 2 instead of 3"):
        StoreWriter(folder, model, [BatchGrad()], shard=1, shards=3)
    header = ShardHeader.load(folder / "shard-00000", "")
    (folder / "shard-00001").mkdir(exist_ok=True)
    replace(header, shard=1, extensions=[]).save(folder / "shard-00001")
    with pytest.raises(BadInput, match="different stores: these differ in their extensions"):
        Store(folder)


class Power(Extension):
    """An extension whose options are attributes, as no dataclass has them."""

    savefield = "power"

    def __init__(self, power: int, along: Any = None) -> None:
        self.power, self.along = power, along

    @property
    def rows(self) -> tuple[Row, ...]:
        return (Row(GRADIENT, lambda structure: structure.rows[0], over_n=CAT[0], degree=self.power),)


@dataclass(frozen=True, eq=False)
class Along(Extension):
    direction: Any
    savefield = "along"
    rows = (Row(GRADIENT, lambda structure: structure.rows[0], over_n=CAT[0]),)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Power(1), Power(2)),
        (Power(1, torch.ones(3)), Power(1, -torch.ones(3))),
        (Along(torch.ones(3)), Along(-torch.ones(3))),
        (Along(np.ones(3)), Along(np.ones(3, np.float32))),
        (Along({"to": torch.float32}), Along({"to": torch.float64})),
        (Along(torch.sin), Along(torch.cos)),
    ],
)
def test_other_options_of_an_extension_of_ones_own(tmp_path: Path, first: Extension, second: Extension) -> None:
    model, *_ = problem()
    StoreWriter(tmp_path, model, [first]).close()
    StoreWriter(tmp_path, model, [first], resume=True).close()
    with pytest.raises(BadInput, match="extensions"):
        StoreWriter(tmp_path, model, [second], resume=True)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    model, *_ = problem()
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]):
        for resume in (False, True):
            with pytest.raises(PackpropError, match=f"process {os.getpid()} has already opened it for writing"):
                StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=resume)
    with StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True):
        pass


def test_a_writer_that_was_dropped_keeps_nobody_out(tmp_path: Path) -> None:
    model, *_ = problem()
    StoreWriter(tmp_path / "store", model, [BatchGrad()])
    StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True).close()
    assert packprop.Store(tmp_path / "store").finished


def test_processes_that_were_forked_keep_nobody_out(tmp_path: Path) -> None:
    """Those of a data loader outlive a writer that is closed, or killed, by some seconds."""
    model, *_ = problem()
    writer = StoreWriter(tmp_path / "store", model, [BatchGrad()])
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        with pytest.raises(PackpropError, match="already opened it for writing"):
            StoreWriter(tmp_path / "store", model, [BatchGrad()])
        writer.close()
        StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
