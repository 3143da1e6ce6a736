"""Rows are read lazily: slices, lists, iteration, tensors, arrays, data frames, largest inner products."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packprop import Store, StoreWriter
from packprop.errors import BadInput
from packprop.store.search import products_of_rows
from tests.references.running import assert_near
from tests.selection import one_in
from tests.store.small import problem, rows_one_by_one, written


@pytest.fixture
def array(tmp_path: Path) -> Any:
    """Two shards of seven rows together."""
    values = torch.arange(42.0).reshape(7, 2, 3)
    for shard, rows in enumerate(values.split([3, 4])):
        with StoreWriter(tmp_path / "store", nn.Linear(1, 1), [], shard=shard, shards=2) as writer:
            writer.write(a=rows)
    return Store(tmp_path / "store")["a"], values


@one_in(2)
@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        6,
        slice(None),
        slice(2, 5),
        slice(5, 2),
        slice(-3, None),
        slice(None, None, 2),
        slice(6, None, -2),
        [6, 0, 0, -2],
        [],
        torch.tensor([3, 1]),
        np.array([3, 1]),
        torch.tensor([True, False, True, True, False, False, True]),
        torch.tensor(4),
    ],
    ids=str,
)
def test_rows_by_index(array: Any, index: Any) -> None:
    stored, values = array
    if isinstance(index, slice):
        expected = torch.from_numpy(values.numpy()[index].copy())
    else:
        expected = values[torch.as_tensor(index).long() if isinstance(index, list) else index]
    assert torch.equal(stored[index], expected)
    stored[index].zero_()
    assert torch.equal(stored.torch(), values)


@pytest.mark.parametrize("index", [7, -8, [0, 7], [[0]], True, torch.ones(3, dtype=torch.bool)], ids=str)
def test_rows_that_are_not_there(array: Any, index: Any) -> None:
    with pytest.raises(IndexError):
        array[0][index]


def test_rows_in_turn(array: Any) -> None:
    stored, values = array
    assert len(stored) == len(list(stored)) == 7
    assert torch.equal(torch.stack(list(stored)), values)
    assert [len(block) for block in stored.blocks(3)] == [3, 3, 1]
    assert repr(stored) == "StoredArray('a', shape=[7, 2, 3], dtype=torch.float32)"


def test_arrays_of_numpy_are_mapped_and_kept(tmp_path: Path) -> None:
    written(tmp_path / "store", [3])
    values = Store(tmp_path / "store")["grad_batch", "0.weight"].numpy()
    assert isinstance(values.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 0


@one_in(3)
@pytest.mark.parametrize("memory", [1, 100, 2**20])
@pytest.mark.parametrize("k", [1, 3, 50])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_largest_inner_products(tmp_path: Path, memory: int, k: int, dtype: Any) -> None:
    torch.manual_seed(0)
    values = torch.randn(9, 2, 5)
    for shard, rows in enumerate(values.split([4, 5])):
        with StoreWriter(tmp_path / "store", nn.Linear(1, 1), [], shard=shard, shards=2, dtype=dtype) as writer:
            writer.write([10 * shard + number for number in range(len(rows))], a=rows)
    store, queries = Store(tmp_path / "store"), torch.randn(3, 2, 5)
    found = store.top("a", queries, k, memory=memory)
    products = queries.flatten(1) @ store["a"].torch().float().flatten(1).T
    expected = products.sort(descending=True)
    assert_near(found.products, expected.values[:, :k], "products", 1e-5)
    assert torch.equal(found.rows, expected.indices[:, :k])
    assert torch.equal(found.identifiers, store.identifiers[found.rows])


def test_inner_products_of_all_parameters(tmp_path: Path) -> None:
    model, x, y = written(tmp_path / "store", [4, 3])
    queries = rows_one_by_one(model, x[:2], y[:2])
    found = Store(tmp_path / "store").top("grad_batch", queries, 7)
    flat = torch.cat([rows.flatten(1) for rows in rows_one_by_one(model, x, y).values()], 1)
    expected = (flat[:2] @ flat.T).sort(descending=True)
    assert_near(found.products, expected.values, "products")
    assert torch.equal(found.rows, expected.indices)


def test_no_samples_no_products(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=torch.empty(0, 3))
    found = Store(tmp_path / "store").top("a", torch.ones(2, 3), 4)
    assert found.products.shape == found.identifiers.shape == found.rows.shape == (2, 0)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_inner_products_of_rows_without_axes_or_entries(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, more = torch.randn(5, *shape), torch.randn(5, 3)
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.add({("g", "scale"): rows, ("g", "weight"): more, ("alone", ""): rows}, 5)
    store, queries = Store(tmp_path / "store"), {"scale": torch.randn(2, *shape), "weight": torch.randn(2, 3)}
    alone = queries["scale"].reshape(2, -1 if shape == () else 0) @ rows.reshape(5, -1 if shape == () else 0).T
    for found, products in (
        (store.top("alone", queries["scale"], 5), alone),
        (store.top("g", queries, 5), alone + queries["weight"] @ more.T),
    ):
        assert_near(found.products, products.sort(descending=True).values, "products", 1e-5)


def test_a_data_frame_of_no_samples(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(loss=torch.empty(0), x=torch.empty(0, 2))
    assert Store(tmp_path / "store").to_frame("loss", "x").shape == (0, 3)


@pytest.mark.parametrize(
    ("queries", "k", "words"),
    [
        (torch.ones(2, 4), 1, "rows in the store are \\[3\\]"),
        (torch.ones(3), 1, "rows in the store are \\[3\\]"),
        (torch.tensor(1.0), 1, "rows in the store are \\[3\\]"),
        ({"w": torch.ones(2, 3)}, 1, "queries for \\['w'\\]"),
        (torch.ones(2, 3), 0, "k=0"),
        (torch.ones(2, 3), True, "k=True"),
    ],
    ids=str,
)
def test_queries_that_do_not_fit(tmp_path: Path, queries: Any, k: Any, words: str) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=torch.ones(2, 3))
    with pytest.raises(BadInput, match=words):
        Store(tmp_path / "store").top("a", queries, k)
    for memory in (0, -1, True, 1.5, "1MiB"):
        with pytest.raises(BadInput, match=f"memory={memory!r}"):
            Store(tmp_path / "store").top("a", torch.ones(2, 3), 1, memory=memory)


WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_products_of_whole_numbers_do_not_overflow(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype) * (1 if dtype == torch.bool else 120)
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=rows.to(dtype))
    store, queries = Store(tmp_path / "store"), torch.tensor([[0.5, 1.25, 2.0]])
    found = store.top("a", queries, 2)
    assert found.products.tolist() == (queries @ rows.mT.float()).sort(descending=True).values.tolist()
    assert found.rows.tolist() == [[1, 0]]


@pytest.mark.parametrize("of", ["rows", "queries"])
def test_products_of_complex_numbers(tmp_path: Path, of: str) -> None:
    torch.manual_seed(0)
    rows, queries = torch.randn(5, 3, dtype=torch.complex64), torch.randn(2, 3, dtype=torch.complex64)
    real = {"rows": (rows, queries.real), "queries": (rows.real, queries)}[of]
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=real[0], b=torch.view_as_real(rows))
    store = Store(tmp_path / "store")
    with pytest.raises(BadInput, match=r"complex64.*\n.*no order\n.*view_as_real"):
        store.top("a", real[1], 2)
    found = store.top("b", torch.view_as_real(queries), 5)
    expected = (queries.conj() @ rows.mT).real.sort(descending=True)
    assert_near(found.products, expected.values, "products", 1e-5)
    assert torch.equal(found.rows, expected.indices)


def test_products_are_added_up_in_single_precision_at_least() -> None:
    class Half:
        shape, dtype = torch.Size([2, 4000]), torch.float16

        def __len__(self) -> int:
            return 2

        def lent(self, start: int, stop: int) -> Tensor:
            return torch.full((2, 4000), 100.0, dtype=torch.float16)[start:stop]

    queries = {"": torch.full((1, 4000), 10.0)}
    ((_, products),) = products_of_rows("", {"": Half()}, queries, 10**6)
    assert products.tolist() == [[4e6, 4e6]]


def test_a_data_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *_ = problem()
    del model
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write([5, 3], loss=torch.tensor([0.5, 0.25]), x=torch.tensor([[1, 2], [3, 4]]))
    store = Store(tmp_path / "store")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match=r"pip install '\.\[frames\]'"):
        store.to_frame()
    monkeypatch.undo()
    pytest.importorskip("pandas")
    frame = store.to_frame()
    assert (list(frame.columns), list(frame.index), frame.index.name) == (["loss"], [5, 3], "sample")
    assert frame["loss"].tolist() == [0.5, 0.25]
    assert store.to_frame("x").to_numpy().tolist() == [[1, 2], [3, 4]]
    assert list(store.to_frame("x", "loss").columns) == ["loss", "x[0]", "x[1]"]
    with pytest.raises(BadInput, match="quantity 'y'"):
        store.to_frame("y")


def test_rows_by_identifier(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(torch.tensor([30, 10, 20, 10]), a=torch.arange(4))
    store = Store(tmp_path / "store")
    assert store.rows_of([20, 30]).tolist() == [2, 0]
    assert store.rows_of([]).tolist() == []
    for wrong, words in ((10, "2 samples"), (15, "0 samples"), (99, "0 samples")):
        with pytest.raises(BadInput, match=f"identifier {wrong}\n.*{words}"):
            store.rows_of([30, wrong])


def test_a_store_is_a_mapping(tmp_path: Path) -> None:
    written(tmp_path / "store", [2])
    store = Store(tmp_path / "store")
    assert list(store) == ["grad_batch", "loss"]
    assert len(store) == 2
    assert set(store["grad_batch"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for missing in ("kfac", ("grad_batch", "9.weight")):
        with pytest.raises(KeyError):
            store[missing]


def test_a_store_and_its_writer_print_in_one_line_and_name_what_is_there(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with StoreWriter(tmp_path / "store", model, []) as writer:
        writer.write(loss=torch.ones(3))
        assert repr(writer) == f"<StoreWriter {str(tmp_path / 'store')!r}: 3 samples so far>"
    store = Store(tmp_path / "store")
    assert repr(store) == f"<Store {str(tmp_path / 'store')!r}: loss of 3 samples>"
    for key in ("grad_batch", ("grad_batch", "weight"), ("loss", "weight")):
        assert store.get(key) is None
        with pytest.raises(BadInput, match=r"(?s)was read.*it has 'loss'.*ask for one of these"):
            store[key]
