"""Rows have checksums: none that was changed comes back, however it is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packprop import PackpropError, Store, StoreWriter
from packprop.store import checksums
from packprop.store.checksums import COLUMNS, checksum
from tests.selection import one_in


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 64)


def filled(folder: Path, rows: int = 100, chunk: int = 23, **options: Any) -> torch.Tensor:
    """A store of rows of 24 bytes (two in a block), and of single numbers, in several chunks."""
    values = torch.arange(3.0 * rows).double().reshape(rows, 3)
    with StoreWriter(folder, nn.Linear(1, 1), [], **options) as writer:
        for part in values.split(chunk):
            writer.write(a=part, b=part[:, 0])
            writer.commit()
    return values


def flip(path: Path, place: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def flip_row(folder: Path, row: int, file: str = "a/values.npy", row_bytes: int = 24) -> None:
    path = folder / "shard-00000" / file
    with path.open("rb") as opened:
        np.lib.format.read_magic(opened)
        np.lib.format.read_array_header_1_0(opened)
        flip(path, opened.tell() + row * row_bytes + 5)


READS: dict[str, Callable[[Store], Any]] = {
    "row": lambda store: store["a"][70],
    "slice": lambda store: store["a"][60:80],
    "list": lambda store: store["a"][[1, 70]],
    "mask": lambda store: store["a"][torch.arange(100) == 70],
    "steps": lambda store: store["a"][::10],
    "torch": lambda store: store["a"].torch(),
    "numpy": lambda store: store["a"].numpy(),
    "iteration": lambda store: list(store["a"]),
    "blocks": lambda store: list(store["a"].blocks(7)),
    "lent": lambda store: store["a"].lent(0, 100),
    "top": lambda store: store.top("a", torch.ones(1, 3), 2),
    "frame": lambda store: store.to_frame("a"),
    "verify": Store.verify,
}


@one_in(2)
@pytest.mark.parametrize("read", READS)
def test_a_changed_bit_never_comes_back(tmp_path: Path, read: str) -> None:
    if read == "frame":
        pytest.importorskip("pandas")
    values = filled(tmp_path / "store")
    store = Store(tmp_path / "store")
    READS[read](store)
    flip_row(tmp_path / "store", 70)
    store = Store(tmp_path / "store")
    for _ in range(2):
        with pytest.raises(PackpropError, match=r"rows 69 to 70 of .*a/values.npy.*\n.*changed since"):
            READS[read](store)
    assert torch.equal(store["a"][:69], values[:69])
    assert torch.equal(store["a"][[*range(69), *range(71, 100)]], values[[*range(69), *range(71, 100)]])


def test_identifiers_are_compared(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    flip_row(tmp_path / "store", 3, "samples.npy", 8)
    store = Store(tmp_path / "store")
    for read in (lambda: store.identifiers, lambda: store.rows_of([3]), lambda: store.to_frame()):
        with pytest.raises(PackpropError, match=r"rows 0 to 7 of .*samples.npy"):
            read()
    assert store["a"].torch().shape == (100, 3)


def test_all_that_is_damaged_is_named(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    assert Store(tmp_path / "store").verify() == 100
    for row in (0, 50, 99):
        flip_row(tmp_path / "store", row)
    flip_row(tmp_path / "store", 7, "b/values.npy", 8)
    with pytest.raises(PackpropError) as error:
        Store(tmp_path / "store").verify()
    for words in (
        "'a', rows 0 to 1 of",
        "'a', rows 50 to 51 of",
        "'a', rows 98 to 99 of",
        "'b', rows 0 to 7 of",
    ):
        assert words in error.value.where
    assert error.value.where.count("rows") == 4


def test_blocks_that_were_read_are_not_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "store")
    store, calls = Store(tmp_path / "store"), []

    def counted(rows: np.ndarray) -> int:
        calls.append(len(rows))
        return checksum(rows)

    monkeypatch.setattr(checksums, "checksum", counted)
    assert not calls
    store["a"][70]
    assert calls == [2]
    store["a"][69:71], store["a"].torch(), store["a"].torch()
    assert sum(calls) == 100
    store.verify()
    assert sum(calls) == 100 + 3 * 100


@one_in(2)
@pytest.mark.parametrize("back", [0, 23, 30, 46, 99, 100])
def test_after_a_step_back(tmp_path: Path, back: int) -> None:
    """A chunk that is cut has new checksums; what stays of it is compared with the old ones first."""
    values = filled(tmp_path / "store")
    more = -values
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), [], resume=True) as writer:
        writer.resume_at(back, 1.0)
        writer.write(a=more, b=more[:, 0])
    store = Store(tmp_path / "store")
    assert store.verify() == back + 100
    assert torch.equal(store["a"].torch(), torch.cat([values[:back], more]))
    flip_row(tmp_path / "store", back)
    with pytest.raises(PackpropError, match="'a', rows"):
        Store(tmp_path / "store").verify()


def test_a_damaged_chunk_is_not_cut(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    flip_row(tmp_path / "store", 50)
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), [], resume=True) as writer:
        with pytest.raises(PackpropError, match="rows 50 to 51 of"):
            writer.resume_at(60, 1.0)
        assert writer.samples == 100
    with pytest.raises(PackpropError, match="'a', rows 50 to 51 of"):
        Store(tmp_path / "store").verify()


def test_rows_that_came_after_others_are_zero_before(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=torch.ones(9))
        writer.commit()
        writer.add({("b", ""): torch.ones(9)}, 9)
    store = Store(tmp_path / "store")
    assert store.verify() == 18
    assert store["b"].torch().tolist() == [0] * 9 + [1] * 9
    flip_row(tmp_path / "store", 2, "b/values.npy", 4)
    with pytest.raises(PackpropError, match="'b', rows 0 to 8 of"):
        Store(tmp_path / "store").verify()


def test_several_shards(tmp_path: Path) -> None:
    for shard in range(2):
        filled(tmp_path / "store", shard=shard, shards=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(tmp_path / "store").verify() == 200
    path = tmp_path / "store" / "shard-00001" / "b" / "values.npy"
    flip(path, path.stat().st_size - 1)
    with pytest.raises(PackpropError, match=r"rows 92 to 99 of .*shard-00001/b/values.npy"):
        Store(tmp_path / "store")["b"].torch()


@one_in(2)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 7)], ids=str)
def test_rows_of_any_kind(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randint(2, (50, *shape)).to(dtype)
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=values)
    store = Store(tmp_path / "store")
    assert torch.equal(store["a"].torch(), values)
    assert torch.equal(store["a"][[3, 40]], values[[3, 40]])
    assert store.verify() == 50


@pytest.mark.parametrize("size", [0, 1, 7, 8 * COLUMNS - 1, 8 * COLUMNS, 3 * 8 * COLUMNS + 5, 10**5])
def test_any_bit_changes_a_checksum(size: int) -> None:
    source = np.random.default_rng(size)
    entries = source.integers(0, 256, size, np.uint8)
    known = checksum(entries)
    for place in {0, size // 2, size - 1, *source.integers(0, max(size, 1), 20).tolist()} if size else ():
        for bit in range(8):
            entries[place] ^= 1 << bit
            assert checksum(entries) != known
            entries[place] ^= 1 << bit
    assert checksum(entries) == checksum(entries.view(np.int8)) == known


def test_exchanged_pages_change_a_checksum() -> None:
    entries = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8)
    known, pages = checksum(entries), entries.reshape(-1, 4096)
    for one, other in ((0, 1), (3, 200), (100, 255)):
        pages[[one, other]] = pages[[other, one]]
        assert checksum(entries) != known
        pages[[one, other]] = pages[[other, one]]
