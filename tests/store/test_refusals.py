"""What cannot be a store, or cannot be stored, is refused in four parts, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import Store, StoreWriter, extensions
from packprop.errors import BadInput, PackpropError
from packprop.extensions import BatchGrad, BatchL2Grad
from tests.store.small import problem, write_batch, written


@pytest.mark.parametrize(
    "extension",
    [
        extensions.Variance(),
        extensions.KFAC(),
        extensions.EKFAC(),
        extensions.BatchDotGrad(),
        extensions.HMP(),
        extensions.DiagHessian(),
    ],
    ids=lambda extension: extension.name,
)
def test_values_that_do_not_grow(tmp_path: Path, extension: Any) -> None:
    model, *_ = problem()
    with pytest.raises(BadInput, match=rf"extension {extension.name}\n.*no row for each sample"):
        StoreWriter(tmp_path / "store", model, [BatchGrad(), extension])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([BatchGrad(subsampling=[0])], "subsampling"),
        ([BatchGrad(), BatchGrad()], "another one that is saved as 'grad_batch'"),
    ],
    ids=["subsampling", "twice"],
)
def test_other_extensions(tmp_path: Path, asked: list[Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        StoreWriter(tmp_path / "store", nn.Linear(1, 1), asked)


def test_places_that_are_taken(tmp_path: Path) -> None:
    model, *_ = problem()
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(BadInput, match=r"not empty: 'notes.txt' is there"):
        StoreWriter(tmp_path, model, [BatchGrad()])
    with pytest.raises(BadInput, match="it is a file"):
        StoreWriter(file, model, [BatchGrad()])
    assert (file.read_text(), list(tmp_path.iterdir())) == ("mine", [file])
    written(tmp_path / "store", [3])
    with pytest.raises(BadInput, match="shard 0 of a store is there"):
        StoreWriter(tmp_path / "store", model, [BatchGrad()])
    assert Store(tmp_path / "store").samples == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: dict(extensions=[BatchL2Grad()]), "other extensions"),
        (lambda: dict(extensions=[BatchGrad(per="token")]), "other extensions"),
        (lambda: dict(model=nn.Linear(3, 2)), "other model"),
        (lambda: dict(notes={"data": "digits"}), "other notes"),
        (lambda: dict(shards=2), "other shards"),
    ],
    ids=["extension", "option", "model", "notes", "shards"],
)
def test_going_on_with_something_else(tmp_path: Path, change: Callable[[], Any], words: str) -> None:
    model, *_ = written(tmp_path / "store", [3])
    with pytest.raises(BadInput, match=words):
        StoreWriter(
            tmp_path / "store", **{**dict(model=model, extensions=[BatchGrad()], resume=True), **change()}
        )
    StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True).close()


def _version(header: Path) -> None:
    header.write_text(json.dumps({**json.loads(header.read_text()), "version": 2}))


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("header.json", lambda path: path.write_text(path.read_text()[:-50]), "no header that can be read"),
    ("header.json", lambda path: path.write_text("{}"), "no header that can be read"),
    ("header.json", lambda path: path.write_text("[1]"), "no header that can be read"),
    ("header.json", lambda path: path.write_bytes(b"\xff\xfe"), "no header that can be read"),
    ("header.json", lambda path: path.write_text(path.read_text().replace("float64", "float65")), "float65"),
    ("header.json", Path.unlink, "no header that can be read"),
    ("header.json", _version, "version 2 of the format, and this is version 1"),
    ("chunks.jsonl", lambda path: path.write_text("xyz\n"), "line 1 of file"),
    ("chunks.jsonl", lambda path: path.write_text('{"samples": -1}\n'), "line 1 of file"),
    ("chunks.jsonl", lambda path: path.write_text('{"rows": 1}\n'), "line 1 of file"),
    (
        "grad_batch/0.weight.npy",
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "it has 415 bytes, and 416",
    ),
    ("grad_batch/0.weight.npy", Path.unlink, "it has 0 bytes, and 416"),
    ("samples.npy", lambda path: path.write_bytes(b""), "it has 0 bytes"),
]


@pytest.mark.parametrize(("file", "damage", "words"), DAMAGE, ids=[f"{d[0]}-{d[2]}" for d in DAMAGE])
def test_damaged_files(tmp_path: Path, file: str, damage: Callable[[Path], Any], words: str) -> None:
    model, *_ = written(tmp_path / "store", [3])
    damage(tmp_path / "store" / "shard-00000" / file)
    with pytest.raises(BadInput, match=words):
        Store(tmp_path / "store")
    with pytest.raises(BadInput, match=words):
        StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True)


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_no_store(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "store")
    with pytest.raises(BadInput, match="not the folder of a store"):
        Store(tmp_path / "store")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(a=torch.tensor(1.0)), "no row for each"),
        (dict(a=torch.ones(2, 3), b=torch.ones(3)), "no row for each of 2"),
        (dict(a=torch.ones(2, 4)), r"shape \[4\], and those before \[3\]"),
        (dict(a=torch.ones(2, 3).double()), "they are torch.float64, and those before torch.float32"),
        (dict(a=torch.ones(2, 3), b=[1.0, 2.0]), "not a dense tensor"),
        (dict(a=torch.ones(2, 3).to_sparse()), "not a dense tensor"),
        (dict(a=torch.ones(2, 3), c=torch.ones(2).to(torch.float8_e4m3fn)), "precision float8_e4m3fn"),
        (dict(a=torch.ones(2, 3), identifiers=[1]), "one whole number for each of 2"),
        (dict(a=torch.ones(2, 3), identifiers=[0.5, 1.0]), "one whole number for each of 2"),
        (dict(a=torch.ones(2, 3), identifiers=["a", "b"]), "one whole number for each of 2"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=torch.ones(2, 3))
        with pytest.raises(BadInput, match=words):
            writer.write(**values)
    store = Store(tmp_path / "store")
    assert (store.samples, list(store)) == (2, ["a"])


def test_nothing_was_computed(tmp_path: Path) -> None:
    model, x, y = problem()
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        with pytest.raises(PackpropError, match=r"'0.weight' and 3 more\n.*no grad_batch"):
            writer.write()
        write_batch(writer, model, x, y)
        with pytest.raises(PackpropError, match="no grad_batch"):  # it was taken off
            writer.write(unused_are_zero=True)
    with pytest.raises(PackpropError, match="it is closed"):
        writer.write()
    assert Store(tmp_path / "store").samples == 7


def test_precisions_that_nobody_reads(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="float8_e5m2"):
        StoreWriter(tmp_path / "store", nn.Linear(1, 1), [], dtype=torch.float8_e5m2)
    assert not (tmp_path / "store").exists()


def test_the_graph_is_not_stored(tmp_path: Path) -> None:
    model, x, y = problem()
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]) as writer:
        loss = nn.functional.cross_entropy(model(x), y)
        with packprop.backpack(*writer.extensions):
            loss.backward(create_graph=True)
        writer.write()
    assert Store(tmp_path / "store")["grad_batch", "0.weight"].torch().requires_grad is False
