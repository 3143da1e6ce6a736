"""Damaged files are refused in four parts, or change nothing; ``corruption.py`` makes more of them."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from packprop import BadInput, PackpropError, Result, extensions
from packprop.applications.dataset.folder import described
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.result import _checksum
from packprop.applications.dataset.shards import take_up_shards
from packprop.applications.dataset.state import MergedResults
from packprop.engine.algebra import Moments
from packprop.engine.tensors.nesting import tensors_in
from packprop.store.schema import checksum_of
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
            for file in [path for path in (folder / kind).rglob("*") if path.is_file()]:
                used = tmp_path / "used"
                shutil.copytree(folder / kind, used)
                (used / file.relative_to(folder / kind)).write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
                with contextlib.suppress(PackpropError):
                    use(used)
                shutil.rmtree(used)
    assert not (tmp_path / "bomb").exists()


def signed(
    place: Path, of_content: Callable[[dict[str, Any]], Any], of_state: Callable[[dict[str, Any]], Any]
) -> None:
    """All checkpoints as if they had been written otherwise, with checksums that are right."""
    for path in place.glob("checkpoint-*.json"):
        content = json.loads(path.read_text())["content"]
        file = place / content["files"][0]["name"]
        tensors = safetensors.torch.load_file(file)
        last = str(len(tensors) - 1)
        state = json.loads(tensors[last].numpy().tobytes())
        of_state(state)
        tensors[last] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        safetensors.torch.save_file(tensors, file)
        content["files"] = [described(file)]
        of_content(content)
        path.write_text(json.dumps({"checksum": checksum_of(content), "content": content}))


def same(value: dict[str, Any]) -> None:
    """Change nothing."""


def nested(content: dict[str, Any]) -> None:
    for _ in range(400):
        content["facts"]["identity"] = [content["facts"]["identity"]]


def state(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found["items"] = [[key, value if key == name else item] for key, item in found["items"]]

    return change


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[dict[str, Any]], Any], str]] = {
    "an absolute name": (lambda c: c["files"][0].update(name="/etc/passwd"), same, "no name of a file"),
    "a name outside": (lambda c: c["files"][0].update(name="../x"), same, "no name of a file"),
    "a folder": (lambda c: c["files"][0].update(name=".."), same, "no name of a file"),
    "negative bytes": (lambda c: c["files"][0].update(bytes=-1), same, "bytes is -1"),
    "no files": (lambda c: c.pop("files"), same, "there is no file of a rank"),
    "nothing": (lambda c: c.update(files=[]), same, "there is no file of a rank"),
    "no facts": (lambda c: c["facts"].pop("reading"), same, "lacks the entry 'reading'"),
    "no description": (lambda c: c["facts"].pop("identity"), same, "lacks the entry 'identity'"),
    "nesting": (nested, same, "more than 100 levels"),
    "a huge number": (lambda c: c["facts"].update(number=10**40), same, "number is 1000"),
    "a text": (lambda c: c["facts"].update(number="7"), same, "number is '7'"),
    "not a reading": (lambda c: c["facts"].update(reading=2), same, "reading is 2"),
    "no place": (same, lambda found: found["items"].pop(0), "lacks the entry 'place'"),
    "no values": (same, lambda found: found.pop("items"), "which values it holds"),
    "a tensor that is not there": (same, state("results", {"tensor": 10**6}), "which values it holds"),
    "a tensor from the end": (same, state("results", {"tensor": -1}), "tensor is -1"),
    "a tuple of nothing": (same, state("place", {"Moments": [1, 2]}), "Moments"),
    "an attribute of torch": (same, state("place", {"order": ["same", [1], [1], None]}), "order"),
    "a kind that is unknown": (same, state("place", {"os": ["system"]}), "which values it holds"),
    "two kinds": (same, state("place", {"tuple": [], "items": []}), "which values it holds"),
    "shards before the begin": (same, state("shards", [[0, 0, "x", [-3], {"tensor": 0}]]), "is -3"),
    "shards of what is not there": (
        same,
        state("shards", [{"tuple": [0, 0, "x", [3], {"tensor": 0}]}]),
        "shards of parameter 'x'(.|\n)*one of them is not part",
    ),
}


@one_in(3)
@pytest.mark.parametrize("change", CHANGES)
def test_checkpoints_that_were_made_up(tmp_path: Path, change: str) -> None:
    checkpoint_made(tmp_path)
    of_content, of_state, words = CHANGES[change]
    signed(tmp_path, of_content, of_state)
    with pytest.raises(PackpropError, match=words):
        checkpoint_used(tmp_path)


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
    {"format": "values over a data set, format 2"},
]


@one_in(2)
@pytest.mark.parametrize("notes", NOTES, ids=lambda notes: f"{next(iter(notes.items()))!s:.40}")
def test_results_that_were_made_up(tmp_path: Path, notes: dict[str, str]) -> None:
    """With notes that make no sense, and a checksum that is right."""
    result_made(tmp_path / "used")
    (file,) = (tmp_path / "used").iterdir()
    known = Result.load(file)
    with safetensors.safe_open(file, framework="pt") as opened:
        told = opened.metadata()
    tensors = safetensors.torch.load_file(file)
    del told["checksum"]
    in_order = [tensors[name] for name in json.loads(told["names"])]
    signed = {**told, "checksum": str(_checksum(told, in_order))}
    safetensors.torch.save_file(tensors, file, metadata=signed)
    assert corruption.are_equal(Result.load(file), known)
    told |= notes
    signed = {**told, "checksum": str(_checksum(told, in_order))}
    safetensors.torch.save_file(tensors, file, metadata=signed)
    with pytest.raises(BadInput, match="it cannot be read"):
        Result.load(file)


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ((0, 0, "a", [1], torch.ones(2)), "1 of its entries are in no file"),
        ((0, 0, "a", [2**61], torch.ones(3)), "3 of its entries are in no file"),
        ((0, 0, "a", [0, 0], torch.ones(3)), "not part of a tensor"),
        ((0, 0, "a", [0, 0], torch.ones(3, 3)), "not part of a tensor"),
        ((0, 0, "b", [0], torch.ones(3)), "not part of a tensor"),
        ((0, 0, "a", [0], None), "not part of a tensor"),
        ((0, 0, "a", [0], Moments(3, torch.ones(3), None)), "not part of a tensor"),  # type: ignore[arg-type]  # made up
        ((1, 0, "a", [0], torch.ones(3)), "not part of a tensor"),
        ((0, 1, "a", [0], torch.ones(3)), "not part of a tensor"),
    ],
    ids=str,
)
def test_shards_that_were_made_up(shard: Any, words: str) -> None:
    results = MergedResults([extensions.SumGradSquared()])
    shapes = {"a": torch.Size([3])}
    right = 0, 0, "a", [0], torch.ones(3)
    take_up_shards(results, [[right]], shapes, "cpu", Ranks())
    assert torch.equal(results.partial.pop((0, 0, "a")), torch.ones(3))
    with pytest.raises(PackpropError, match=words):
        take_up_shards(results, [[shard]], shapes, "cpu", Ranks())


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
    with pytest.raises(BadInput, match="its checksum does not match"):
        Result.load(file)
    assert torch.is_tensor(next(iter(safetensors.torch.load_file(file).values())))
