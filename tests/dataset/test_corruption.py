"""Damaged files are refused in four parts, or change nothing; ``corruption.py`` makes more of them."""

from __future__ import annotations

import contextlib
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from packprop import BadInput, PackpropError, Result
from packprop.applications.dataset.folder import _canonical
from packprop.applications.dataset.result import BEFORE
from packprop.applications.dataset.shard_storage import DESCRIPTION, divided_tensors
from packprop.engine.tensors.nesting import tensors_in
from packprop.store.schema import Unfit
from tests.dataset import corruption
from tests.dataset.corruption import Bomb, checkpoint_made, checkpoint_used, result_made
from tests.selection import one_in, thorough


@thorough
def test_damaged_files_are_refused_or_harmless() -> None:
    counts = corruption.trials(40, 40, 1)
    assert sum(counts.values()) == 80
    assert {name.split()[-1] for name in counts if "edited" not in name} == {"refused", "harmless"}


def test_the_harness_notices_what_it_looks_for(tmp_path: Path) -> None:
    """A result that is another one, a raw exception, and code that was run."""
    place = tmp_path / "used"
    result_made(place)
    (file,) = place.iterdir()
    known = Result.load(file)
    assert corruption.outcome("result", tmp_path, known, "") == "harmless"
    other = Result({**known.tables, "variance": {}}, known.samples, known.loss)
    with pytest.raises(AssertionError, match="another one"):
        corruption.outcome("result", tmp_path, other, "")
    uses = corruption.KINDS["result"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(corruption.KINDS, "result", (uses[0], lambda _: pickle.loads(file.read_bytes()) or known))
        file.write_bytes(b"no pickle")
        with pytest.raises(AssertionError, match="a raw UnpicklingError"):
            corruption.outcome("result", tmp_path, known, "")
        file.write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
        with pytest.raises(AssertionError, match="code was run"):
            corruption.outcome("result", tmp_path, known, "")


@thorough
def test_no_file_is_ever_unpickled(tmp_path: Path) -> None:
    """A pickle that would make a folder stands in place of every file, and beside it."""
    with corruption.originals() as (folder, _):
        for kind, (_, use) in corruption.KINDS.items():
            files = [path for path in (folder / kind).rglob("*") if path.is_file()]
            for file in files:
                content = file.read_bytes()
                file.write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
                with contextlib.suppress(PackpropError):
                    use(folder / kind)
                file.write_bytes(content)
    assert not (tmp_path / "bomb").exists()


def signed(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """All checkpoints as if they had been written otherwise, with checksums that are right."""
    for path in place.glob("checkpoint-*.json"):
        content = json.loads(path.read_text())["content"]
        change(content)
        path.write_text(json.dumps({"checksum": zlib.crc32(_canonical(content)), "content": content}))


def of_shards(content: dict[str, Any]) -> None:
    """A run whose model has no shards says that ranks have written some."""
    results = dict(content["facts"]["state"]["items"])["results"]
    partial = dict(results["items"])["partial"]
    partial[0][-1] = {"SavedShards": ["0/0/x/0", [3], "float64"]}


def nested(content: dict[str, Any]) -> None:
    for _ in range(400):
        content["facts"]["state"] = [content["facts"]["state"]]


def of_state(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        items = content["facts"]["state"]["items"]
        content["facts"]["state"]["items"] = [[key, value if key == name else item] for key, item in items]

    return change


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shards that are not there": (of_shards, "shards in .*\\n.*they cannot be read"),
    "an absolute name": (lambda content: content["state"].update(name="/etc/passwd"), "no name of a file"),
    "a name outside": (lambda content: content["rows"][0].update(name="../x"), "no name of a file"),
    "a shard outside": (
        lambda content: content.update(shards=[{"name": "..", "bytes": 0, "checksum": 0}]),
        "no name of a file",
    ),
    "negative bytes": (lambda content: content["state"].update(bytes=-1), "bytes is -1"),
    "no state": (lambda content: content.pop("state"), "lacks its entry 'state'"),
    "no facts": (lambda content: content["facts"].pop("state"), "lacks its entry 'state'"),
    "nesting": (nested, "nested more than 100 times"),
    "a tensor that is not there": (of_state("results", {"tensor": 10**6}), "which values it holds"),
    "a tensor from the end": (of_state("results", {"tensor": -1}), "tensor is -1"),
    "a tuple of nothing": (of_state("ranks", {"Moments": [1, 2]}), "Moments"),
    "an attribute of torch": (of_state("ranks", {"order": ["same", [1], [1], None]}), "order"),
    "a kind that is unknown": (of_state("ranks", {"os": ["system"]}), "which values it holds"),
    "two kinds": (of_state("ranks", {"tuple": [], "items": []}), "which values it holds"),
    "a huge number": (of_state("number", 10**40), "number is 1000"),
    "a text": (of_state("number", "7"), "number is '7'"),
    "nothing": (of_state("ranks", []), "there is no rank"),
    "not a reading": (of_state("reading", 2), "reading is 2"),
}


@one_in(3)
@pytest.mark.parametrize("change", CHANGES)
def test_checkpoints_that_were_made_up(tmp_path: Path, change: str) -> None:
    checkpoint_made(tmp_path)
    prepare, words = CHANGES[change]
    signed(tmp_path, prepare)
    (tmp_path / "shards-000002").mkdir()
    (tmp_path / "shards-000002" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
    with pytest.raises(PackpropError, match=words):
        checkpoint_used(tmp_path)
    assert not (tmp_path / "bomb").exists()


def test_links_out_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint_made(tmp_path / "real")
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "real" / "state-000009.safetensors.part").symlink_to(other)
    with pytest.raises(BadInput, match="a link that leads out of the folder"):
        checkpoint_used(tmp_path / "real")
    assert other.read_text() == "mine"


NOTES: list[dict[str, str]] = [
    {"values": "[" * 100_000},
    {"values": '{"items": [["a", {"tensor": 99}]]}'},
    {"values": "7"},
    {"values": '{"items": [[{"tensor": 0}, 1]]}'},
    {"names": '{"a": 1}'},
    {"names": '["nothing"]'},
    {"names": "[7]"},
    {"samples": "x"},
    {"samples": "9" * 5000},
    {"loss": "x"},
    {"reduction": "min"},
    {"format": "values over a data set, format 9"},
]


@one_in(2)
@pytest.mark.parametrize("notes", NOTES, ids=lambda notes: f"{next(iter(notes.items()))!s:.40}")
def test_results_that_were_made_up(tmp_path: Path, notes: dict[str, str]) -> None:
    """Without a checksum, as they were written before, and with notes that make no sense."""
    result_made(tmp_path / "used")
    (file,) = (tmp_path / "used").iterdir()
    known = Result.load(file)
    with safetensors.safe_open(file, framework="pt") as opened:
        told = opened.metadata()
    tensors = safetensors.torch.load_file(file)
    told = {**told, "format": BEFORE}
    del told["checksum"]
    safetensors.torch.save_file(tensors, file, metadata=told)
    assert corruption.are_equal(Result.load(file), known)
    safetensors.torch.save_file(tensors, file, metadata={**told, **notes})
    with pytest.raises(BadInput, match="it cannot be read"):
        Result.load(file)


PART = {"offsets": [0], "sizes": [3], "file": "__0_0.safetensors", "key": "0"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "os"}, "unknown precision"),
        ({"shape": [-3]}, "a whole number"),
        ({"shape": [3, 3]}, "is none of"),
        ({"shape": [4]}, "not all parts"),
        ({"shape": [2**61], "parts": [{**PART, "sizes": [2**61]}]}, "too short"),
        ({"parts": [{**PART, "offsets": [1]}]}, "is none of"),
        ({"parts": [{**PART, "file": "/etc/passwd"}]}, "no file of shards"),
        ({"parts": [{**PART, "file": "../__0_0.safetensors"}]}, "no file of shards"),
        ({"parts": [{**PART, "key": 0}]}, "key is 0"),
        ({"parts": 7}, "parts is 7"),
    ],
    ids=str,
)
def test_shards_that_were_made_up(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "__0_0.safetensors").write_bytes(bytes(100))
    right = {"dtype": "float64", "shape": [3], "parts": [PART]}
    (tmp_path / DESCRIPTION).write_text(json.dumps({"a": right}))
    assert divided_tensors(tmp_path)["a"].precision is torch.float64
    (tmp_path / DESCRIPTION).write_text(json.dumps({"a": {**right, **change}}))
    with pytest.raises(Unfit, match=words):
        divided_tensors(tmp_path)


def test_a_result_outlives_its_file(tmp_path: Path) -> None:
    result_made(tmp_path / "used")
    (file,) = (tmp_path / "used").iterdir()
    known, other = Result.load(file), Result.load(file)
    content = file.read_bytes()
    with file.open("rb+") as opened:
        opened.write(bytes(len(content)))
    assert corruption.are_equal(known, other)
    assert all(tensor.count_nonzero() for tensor in tensors_in(known["variance"]))


def test_a_changed_entry_of_a_result(tmp_path: Path) -> None:
    result_made(tmp_path / "used")
    (file,) = (tmp_path / "used").iterdir()
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadInput, match="does not have its checksum"):
        Result.load(file)
    assert torch.is_tensor(next(iter(safetensors.torch.load_file(file).values())))
