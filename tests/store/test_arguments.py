"""Wrong arguments, failed writes and other stores change nothing that a store holds."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packprop import Store, StoreWriter
from packprop.errors import BadInput, PackpropError
from packprop.store.plain import GrowingArray
from tests.selection import thorough


def opened(folder: Path, **options: Any) -> StoreWriter:
    return StoreWriter(folder, nn.Linear(1, 1), [], **options)


def four(folder: Path) -> None:
    with opened(folder) as writer:
        writer.write(a=torch.arange(4.0), terms=4.0)


class AtOnce(Executor):
    """Does what it is given at once, and keeps the error for later, as a thread does."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except OSError as error:
            future.set_exception(error)
        return future


class Failing:
    """A disk that refuses one call to write, cut or save, or all of them from there on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after(10**9)
        for name in ("pwrite", "ftruncate", "fsync"):
            monkeypatch.setattr(os, name, functools.partial(self._call, getattr(os, name)))

    def after(self, calls: int, for_good: bool = False) -> None:
        self.left, self._for_good = calls, for_good

    def _call(self, really: Any, *args: Any) -> Any:
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self._for_good):
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(*args)


def until_it_works(call: Any) -> None:
    """Call something that the disk refuses once, or twice: when it is written, and when it is saved."""
    for _ in range(2):
        with contextlib.suppress(PackpropError):
            return call()
    call()


WRONG: list[tuple[Any, Any]] = [(-1, 0.0), (True, 1.0), (2.0, 2.0), (2, np.nan), (2, np.inf), (2, "x")]


@pytest.mark.parametrize(("samples", "terms"), WRONG, ids=str)
def test_wrong_places_change_nothing(tmp_path: Path, samples: Any, terms: Any) -> None:
    four(tmp_path / "store")
    with pytest.raises(BadInput, match="it is no"), opened(tmp_path / "store", resume=True) as writer:
        writer.resume_at(samples, terms)
    store = Store(tmp_path / "store")
    assert (store["a"].torch().tolist(), store.terms, store.finished) == ([0, 1, 2, 3], 4.0, True)


@pytest.mark.parametrize("number", [torch.tensor(2.0), np.float32(2), np.int64(2), 2], ids=repr)
def test_numbers_of_any_type(tmp_path: Path, number: Any) -> None:
    four(tmp_path / "store")
    with opened(tmp_path / "store", resume=True) as writer:
        writer.resume_at(np.int64(2), number)
        writer.write(a=torch.zeros(2), terms=number)
    store = Store(tmp_path / "store")
    assert (store["a"].torch().tolist(), store.terms) == ([0, 1, 0, 0], 4.0)


@pytest.mark.parametrize("samples", [-1, True, 2.0, "2"], ids=repr)
def test_samples_that_are_no_number(tmp_path: Path, samples: Any) -> None:
    wrong = pytest.raises(BadInput, match=r"samples=.*\n.*not a whole number")
    with opened(tmp_path / "store") as writer, wrong:
        writer.add({}, samples)
    assert Store(tmp_path / "store").samples == 0


ZERO, NO_NUMBER = "all values would be zero", "not a finite number of at least 0"
WRONG_TERMS = [(terms, ZERO) for terms in (0, 0.0, -0.0, torch.tensor(0.0))]
WRONG_TERMS += [(terms, NO_NUMBER) for terms in (np.nan, np.inf, -4.0, True, "4", None, torch.ones(2))]


@pytest.mark.parametrize(("terms", "why"), WRONG_TERMS, ids=repr)
def test_wrong_terms_leave_nothing(tmp_path: Path, terms: Any, why: str) -> None:
    with opened(tmp_path / "store") as writer:
        with pytest.raises(BadInput, match=rf"terms=.*\n.*{why}"):
            writer.write(a=torch.ones(2), terms=terms)
        writer.write(a=torch.ones(3))
    assert Store(tmp_path / "store").samples == 3


@pytest.mark.parametrize(
    "options",
    [
        {"shard": -1},
        {"shard": True, "shards": 2},
        {"shard": 1.0, "shards": 2},
        {"shard": 3, "shards": 2},
        {"shard": 0, "shards": 0},
        {"shard": 0, "shards": 100_001},
        {"dtype": torch.int64},
        {"dtype": torch.complex64},
        {"dtype": "float16"},
        {"seconds": np.nan},
        {"seconds": -1.0},
        {"seconds": True},
        {"seconds": "10"},
        {"seconds": None},
        {"notes": {"a": np.nan}},
        {"notes": {"a": torch.ones(2)}},
        {"notes": [1]},
    ],
    ids=str,
)
def test_shards_and_precisions_that_cannot_be(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        opened(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_a_chunk_may_take_any_time(tmp_path: Path) -> None:
    with opened(tmp_path / "store", seconds=np.inf) as writer:
        writer.write(a=torch.ones(2))
    assert Store(tmp_path / "store").samples == 2


def test_rows_without_a_mark_can_be_cut(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.write(a=torch.arange(4.0), terms=4)
        writer.resume_at(2, 2.0)
    store = Store(tmp_path / "store")
    assert (store["a"].torch().tolist(), store.verify()) == ([0, 1], 2)


def test_named_values_come_with_all_batches_or_none(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.write(a=torch.ones(2), loss=torch.ones(2))
        with pytest.raises(BadInput, match=r"'loss'\n.*earlier batches have it"):
            writer.write(a=torch.ones(2))
        with pytest.raises(BadInput, match=r"'b'\n.*the 2 samples before this batch do not"):
            writer.write(a=torch.ones(2), loss=torch.ones(2), b=torch.ones(2))
        writer.write(a=torch.ones(2), loss=torch.ones(2))
    store = Store(tmp_path / "store")
    assert (store.samples, list(store)) == (4, ["a", "loss"])


def test_a_batch_that_fails_leaves_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(value: float) -> dict[tuple[str, str], Tensor]:
        return {(name, ""): torch.full((2,), value) for name in "ab"}

    really = GrowingArray.put

    def put(self: GrowingArray, start: int, rows: Tensor) -> None:
        if self.path.parent.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device")
        really(self, start, rows)

    with opened(tmp_path / "store") as writer:
        writer.add(both(1.0), 2)
        with monkeypatch.context() as patch, pytest.raises(PackpropError, match="No space left"):
            patch.setattr(GrowingArray, "put", put)
            writer.add(both(2.0), 2)
        writer.add({("b", ""): torch.full((2,), 3.0)}, 2)
    store = Store(tmp_path / "store")
    assert store["a"].torch().tolist() == [1, 1, 0, 0]
    assert store["b"].torch().tolist() == [1, 1, 3, 3]


@thorough
@pytest.mark.parametrize("seconds", [0.0, 10.0], ids=["a chunk for each batch", "one chunk"])
def test_a_write_that_fails_anywhere_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The disk refuses one call after the other: of rows, of marks, of what waits for them."""
    failing = Failing(monkeypatch)
    for number in itertools.count():
        folder, batches = tmp_path / str(number), torch.arange(1.0, 9.0).split(2)
        with opened(folder, seconds=seconds) as writer:
            vars(writer)["_pool"] = AtOnce()
            failing.after(number)
            for batch in batches:
                until_it_works(lambda batch=batch: writer.write(a=batch, b=-batch[:, None]))
            until_it_works(writer.commit)
            failed = failing.left < 0
            failing.after(10**9)
        store = Store(folder)
        assert store["a"].torch().tolist() == [*range(1, 9)], number
        assert store["b"].torch().flatten().tolist() == [*range(-1, -9, -1)], number
        assert (store.verify(), store.terms, store.finished) == (8, 4.0, True)
        if not failed:
            break
    assert number > 10


def test_rows_that_cannot_be_taken_back_close_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch)
    with opened(tmp_path / "store") as writer:
        writer.write(a=torch.ones(2))
        writer.commit()
        failing.after(1, for_good=True)  # identifiers are written, nothing else is
        with pytest.raises(PackpropError, match="No space left"):
            writer.write(a=torch.full((2,), 2.0))
        failing.after(10**9)
        with pytest.raises(PackpropError, match="it is closed"):
            writer.write(a=torch.full((2,), 2.0))
    with opened(tmp_path / "store", resume=True) as writer:
        writer.write(a=torch.full((2,), 3.0))
    assert Store(tmp_path / "store")["a"].torch().tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("then", ["goes on", "full"])
def test_a_mark_that_is_written_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    really, calls = os.pwrite, [0]

    def pwrite(file: int, content: Any, place: int) -> int:
        if bytes(content[:1]) == b"{":
            calls[0] += 1
            if calls[0] == 1:
                return really(file, content[:20], place)
        elif calls[0] == 1 and then == "full":
            calls[0] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(file, content, place)

    with opened(tmp_path / "store") as writer:
        writer.write(a=torch.ones(2))
        writer.commit()
        writer.write(a=torch.ones(2))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            if then == "full":
                with pytest.raises(PackpropError, match="No space left"):
                    writer.commit()
            else:
                writer.commit()
        assert Store(tmp_path / "store").samples == (2 if then == "full" else 4)
        writer.write(a=torch.ones(2))
    assert Store(tmp_path / "store").verify() == 6


def test_indices_and_blocks_that_cannot_be(tmp_path: Path) -> None:
    four(tmp_path / "store")
    array = Store(tmp_path / "store")["a"]
    for index in ((1, 1), (), (0,)):
        with pytest.raises(IndexError, match="rows alone"):
            array[index]
    for rows in (0, -1, True, 2.0):
        with pytest.raises(BadInput, match="whole number of at least 1"):
            array.blocks(rows)


def test_a_place_of_another_store_is_refused(tmp_path: Path) -> None:
    four(tmp_path / "other")
    with opened(tmp_path / "store") as writer:
        writer.commit()
        empty = writer.checksum
        writer.write(a=torch.arange(4.0), terms=4)
        writer.commit()
        place = 4, 4.0, writer.checksum
    for given in (place, (0, 0.0, empty)):
        with pytest.raises(BadInput, match="another store"), opened(tmp_path / "other", resume=True) as writer:
            writer.resume_at(*given)
    other = Store(tmp_path / "other")
    assert (other.verify(), other.finished) == (4, True)
    with opened(tmp_path / "store", resume=True) as writer:
        writer.resume_at(*place)
        writer.resume_at(2, 2.0)
        writer.write(a=torch.zeros(2), terms=2)
        with pytest.raises(BadInput, match="another store"):
            writer.resume_at(*place)
        writer.resume_at(0, 0.0, empty)


def test_errors_name_the_call_that_was_wrong(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.write(a=torch.zeros(2, 3))
        for call, wrong in {
            "write": lambda: writer.write(a=torch.zeros(2, 4)),
            "add": lambda: writer.add({("a", ""): torch.zeros(2, 4)}, 2),
            "resume_at": lambda: writer.resume_at(9, 9.0),
        }.items():
            with pytest.raises(BadInput) as error:
                wrong()
            assert error.value.asked == f"StoreWriter({str(tmp_path / 'store')!r}).{call}(...) was called."
