"""What cannot be a store, or cannot be stored, is refused in four parts, before anything is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import Store, StoreWriter, extensions
from packprop.errors import BadInput, PackpropError
from packprop.extensions import BatchGrad, BatchL2Grad, Projected
from packprop.store.folder import ShardHeader
from packprop.store.schema import checksum_of
from tests.selection import one_in
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
    with pytest.raises(BadInput, match=rf"extension {extension.name}\n.*not have a row for each sample"):
        StoreWriter(tmp_path / "store", model, [BatchGrad(), extension])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([BatchGrad(subsampling=[0])], "subsampling"),
        ([BatchGrad(), BatchGrad()], "another extension is also saved as 'grad_batch'"),
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
    with pytest.raises(BadInput, match=r"not empty: it contains 'notes.txt'"):
        StoreWriter(tmp_path, model, [BatchGrad()])
    with pytest.raises(BadInput, match="it is a file"):
        StoreWriter(file, model, [BatchGrad()])
    assert (file.read_text(), list(tmp_path.iterdir())) == ("mine", [file])
    written(tmp_path / "store", [3])
    with pytest.raises(BadInput, match="it holds shard 0 of a store"):
        StoreWriter(tmp_path / "store", model, [BatchGrad()])
    assert Store(tmp_path / "store").samples == 3


@pytest.mark.parametrize("what", ["header", "folder", "lock"])
def test_what_the_system_refuses(tmp_path: Path, what: str) -> None:
    """A full disk, and rights that are missing, when a store is begun."""

    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "a file")

    model, *_ = problem()
    with pytest.MonkeyPatch.context() as patch:
        where: tuple[Any, str] = {
            "header": (ShardHeader, "save"),
            "folder": (Path, "mkdir"),
            "lock": (Path, "open"),
        }[what]
        patch.setattr(*where, refuses)
        with pytest.raises(BadInput, match=r"packprop cannot write there: Permission denied \('a file'\)"):
            StoreWriter(tmp_path / "store", model, [BatchGrad()])
    with StoreWriter(tmp_path / "store", model, [BatchGrad()]):  # and then it can
        pass
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="packprop cannot write there: Not a directory"):
        StoreWriter(tmp_path / "file" / "store", model, [BatchGrad()])


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
    header.write_text(json.dumps({**json.loads(header.read_text()), "version": 3}))


def described(**entries: Any) -> Callable[[Path], None]:
    """A header whose first array is described otherwise, with a checksum that is right."""
    return header(lambda found: found["arrays"][0].update(entries))


def header(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A header that was changed by someone who knows how checksums are made."""

    def damage(path: Path) -> None:
        found = json.loads(path.read_text())
        change(found)
        content = {name: value for name, value in found.items() if name not in ("format", "checksum")}
        path.write_text(json.dumps({**found, "checksum": checksum_of(content)}))

    return damage


def text(old: str, new: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def marked(**entries: Any) -> Callable[[Path], None]:
    """Marks of which the first one says something else, with checksums that are right."""

    def damage(path: Path) -> None:
        before, lines = json.loads((path.parent / "header.json").read_text())["token"], []
        for index, line in enumerate(path.read_text().splitlines()):
            found = {key: value for key, value in json.loads(line).items() if key != "checksum"}
            found |= {} if index else entries
            before = checksum_of(found, before)
            lines.append(json.dumps({**found, "checksum": before}) + "\n")
        path.write_text("".join(lines))

    return damage


HOSTILE: list[tuple[str, Callable[[Path], Any], str]] = [
    *(
        ("header.json", described(file=file), "is not the path of an array in this folder")
        for file in (
            "/etc/passwd",
            "../samples.npy",
            "a/../../x.npy",
            "grad_batch/../../../x.npy",
            "../x.npy",
            "./x.npy",
            "a/b/c.npy",
            "x.npy",
            "",
            "grad_batch/x.txt",
            "grad_batch\\x.npy",
            "a/x.npy\n",
        )
    ),
    ("header.json", described(file=7), "file is 7, not of type str"),
    ("header.json", described(file="grad_batch/0.bias.npy"), "occurs twice"),
    ("header.json", described(file="Grad_batch/0.BIAS.npy"), "occurs twice"),
    ("header.json", described(parameter="0.bias"), "occurs twice"),
    ("header.json", described(shape=[-4, -3]), r"shape\[0\] is -4"),
    ("header.json", described(shape=["4", "3"]), r"shape\[0\] is '4'"),
    ("header.json", described(shape="43"), "shape is '43', not a list"),
    ("header.json", described(shape=None), "shape is None, not a list"),
    ("header.json", described(shape=[4.0, 3.0]), r"shape\[0\] is 4.0"),
    ("header.json", described(shape=[True, 3]), r"shape\[0\] is True"),
    ("header.json", described(shape=[10**30]), r"shape\[0\] is 10000"),
    ("header.json", described(shape=[2**61]), "too many axes or entries for a file"),
    ("header.json", described(shape=[0, 2**40, 2**40]), "too many axes or entries for a file"),
    ("header.json", described(shape=[1] * 64), "too many axes or entries for a file"),
    ("header.json", described(shape=[2**40]), r"not a .npy file of rows \[1099511627776\]"),
    ("header.json", described(shape=[3, 4]), r"not a .npy file of rows \[3, 4\] in float64"),
    ("header.json", described(dtype="int64"), r"not a .npy file of rows \[4, 3\] in int64"),
    ("header.json", described(dtype=None), "dtype is None"),
    ("header.json", described(dtype=["float64"]), "dtype is "),
    ("header.json", described(degree="1"), "degree is '1', not a finite number"),
    ("header.json", described(degree=float("nan")), "degree is nan, not a finite number"),
    ("header.json", described(degree=10**400), "degree is 1000"),
    ("header.json", described(projection={"kind": "x", "dimension": 4, "seed": 0}), "projection|kind"),
    ("header.json", described(projection=[]), "projection is "),
    ("header.json", described(more=1), "an unknown entry 'more'"),
    ("header.json", header(lambda found: found["arrays"][0].pop("shape")), "lacks the entry 'shape'"),
    ("header.json", header(lambda found: found.pop("arrays")), "lacks the entry 'arrays'"),
    ("header.json", header(lambda found: found.pop("model")), "lacks the entry 'model'"),
    ("header.json", header(lambda found: found.update(arrays={})), "arrays is "),
    ("header.json", header(lambda found: found.update(arrays=[[]])), r"arrays\[0\] is \[\]"),
    ("header.json", header(lambda found: found.update(shard=1)), "it is the header of shard 1"),
    ("header.json", header(lambda found: found.update(shards=-1)), "shards is -1"),
    ("header.json", header(lambda found: found.update(model=7)), "model is 7"),
    ("header.json", header(lambda found: found["model"].update({"0.bias": 7})), "model.0.bias is 7"),
    ("header.json", header(lambda found: found["model"].update({"0.bias": [[4], "float64"]})), "a list of 3"),
    ("header.json", header(lambda found: found.update(version="2")), "version 2 of the format"),
    ("header.json", header(lambda found: found.update(version=[2])), r"version \[2\] of the format"),
    ("header.json", lambda path: path.write_text("[" * 100_000), "cannot read this header"),
    ("header.json", lambda path: path.write_text("[" * 300 + "]" * 300), "more than 100 levels"),
    ("header.json", lambda path: path.write_text('{"a": ' + "9" * 10_000 + "}"), "cannot read this header"),
    ("header.json", text('"shard"', '"shard": 3, "shard"'), "'shard' occurs twice"),
    ("header.json", text("0.weight", "0.Weight"), "its checksum does not match"),
    ("header.json", text('"degree": 1.0', '"degree": 2.0'), "its checksum does not match"),
    ("header.json", text('"version": 2', '"version": 1'), "version 1 of the format"),
    ("header.json", lambda path: (path.unlink(), path.mkdir()), "cannot read this header"),
    ("chunks.jsonl", lambda path: path.write_text("[" * 100_000 + "\n"), "line 1 of file"),
    ("chunks.jsonl", lambda path: path.write_text("7\n"), "line 1 of file"),
    ("chunks.jsonl", marked(samples=10**30), "line 1 of file .*\n.*samples is 1000"),
    ("chunks.jsonl", marked(samples=2**61), "line 2 of file .*\n.*cannot begin at row 3, inside"),
    ("chunks.jsonl", marked(samples="3"), "samples is '3'"),
    ("chunks.jsonl", marked(terms=float("inf")), "terms is inf"),
    ("chunks.jsonl", marked(terms="x"), "terms is 'x'"),
    ("chunks.jsonl", marked(finished=1), "finished is 1"),
    ("chunks.jsonl", marked(start=4), "a chunk cannot begin at row 4"),
    ("chunks.jsonl", marked(start=None), "start is None"),
    ("chunks.jsonl", marked(checksums=[]), "checksums is "),
    ("chunks.jsonl", marked(checksums={"samples.npy": [1, 2]}), "2 checksums for 1 blocks"),
    ("chunks.jsonl", marked(checksums={"samples.npy": [-1]}), r"samples.npy\[0\] is -1"),
    ("chunks.jsonl", text('"samples": 3', '"samples": 2'), "line 1 of file .*\n.*has changed since"),
    ("chunks.jsonl", lambda path: path.write_text(path.read_text().split("\n", 1)[1]), "line 1 of file"),
    (
        "chunks.jsonl",
        lambda path: path.write_text(""),
        "3 rows are safe, and the marks in chunks.jsonl end at 0",
    ),
    ("chunks.jsonl", Path.unlink, "3 rows are safe, and the marks in chunks.jsonl end at 0"),
    ("chunks.jsonl", lambda path: (path.unlink(), path.mkdir()), "it cannot be read"),
    ("samples.npy", lambda path: (path.unlink(), path.mkdir()), "it cannot be read"),
    (
        "samples.npy",
        lambda path: path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPI")),
        "not a .npy file",
    ),
    (
        "samples.npy",
        lambda path: path.write_bytes(path.read_bytes().replace(b"(3,", b"(9,")),
        "says that 9 rows",
    ),
    (
        "grad_batch/0.weight.npy",
        lambda path: path.write_bytes((path.parent / "0.bias.npy").read_bytes() * 4),
        "not a .npy file of rows",
    ),
]
"""What an attacker, or a disk, may write: none of it is believed."""


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("header.json", lambda path: path.write_text(path.read_text()[:-50]), "cannot read this header"),
    ("header.json", lambda path: path.write_text("{}"), "cannot read this header"),
    ("header.json", lambda path: path.write_text("[1]"), "cannot read this header"),
    ("header.json", lambda path: path.write_bytes(b"\xff\xfe"), "cannot read this header"),
    ("header.json", lambda path: path.write_text(path.read_text().replace("float64", "float65")), "float65"),
    ("header.json", Path.unlink, "cannot read this header"),
    ("header.json", _version, "version 3 of the format, and this packprop reads version 2"),
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


@one_in(5)
@pytest.mark.parametrize(
    ("file", "damage", "words"), [*DAMAGE, *HOSTILE], ids=[f"{d[0]}-{d[2]}" for d in [*DAMAGE, *HOSTILE]]
)
def test_damaged_files(tmp_path: Path, file: str, damage: Callable[[Path], Any], words: str) -> None:
    model, *_ = written(tmp_path / "store", [3])
    damage(tmp_path / "store" / "shard-00000" / file)
    with pytest.raises(BadInput, match=words):
        Store(tmp_path / "store")
    with pytest.raises(BadInput, match=words):
        StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True)


def test_names_that_lead_out_are_written_inside(tmp_path: Path) -> None:
    names = ["..", ".", "../../x", "/etc/x", "a\0b", "CON"]
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.add({(name, name): torch.ones(2) for name in names}, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    store = Store(tmp_path / "store")
    assert [store[name, name].torch().tolist() for name in names] == [[1, 1]] * len(names)


@one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        "header.json",
        "header.json.part",
        "chunks.jsonl",
        "lock",
        "samples.npy",
        "grad_batch/0.bias.npy",
        "grad_batch",
        ".",
    ],
)
def test_links_that_lead_out(tmp_path: Path, name: str) -> None:
    """Nothing behind a link is read or written; the folder as a whole may be a link."""
    model, *_ = written(tmp_path / "real", [3])
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Store(tmp_path / "link").samples == 3
    place, other = tmp_path / "real" / "shard-00000" / name, tmp_path / "other"
    if place.exists():
        place.rename(other)
    else:
        other.write_text("mine")
    place.symlink_to(other)
    before = {path: path.read_bytes() for path in (*other.rglob("*"), other) if path.is_file()}
    with pytest.raises(BadInput, match="a link that leads out of the folder"):
        Store(tmp_path / "real")
    with pytest.raises(BadInput, match="a link that leads out of the folder"):
        StoreWriter(tmp_path / "real", model, [BatchGrad()], resume=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "name", ["header.json", "header.json.part", "chunks.jsonl", "lock", "samples.npy", "x"]
)
def test_pipes_are_not_waited_for(tmp_path: Path, name: str) -> None:
    model, *_ = written(tmp_path, [3])
    place = tmp_path / "shard-00000" / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    for use in (Store, lambda path: StoreWriter(path, model, [BatchGrad()], resume=True)):
        with pytest.raises(BadInput, match="neither a file nor a folder"):
            use(tmp_path)


@pytest.mark.parametrize("name", ["header.json", "header.json.part", "chunks.jsonl", "lock", "samples.npy"])
def test_files_with_a_second_name_are_not_written_to(tmp_path: Path, name: str) -> None:
    """They are read; a copy can be gone on with, as the error says."""
    model, *_ = written(tmp_path / "store", [3])
    place, other = tmp_path / "store" / "shard-00000" / name, tmp_path / "other"
    if not place.exists():
        place.write_text("mine")
    os.link(place, other)
    before = other.read_bytes()
    assert Store(tmp_path / "store").samples == 3
    with pytest.raises(BadInput, match="a second name elsewhere") as error:
        StoreWriter(tmp_path / "store", model, [BatchGrad()], resume=True)
    assert other.read_bytes() == before
    assert "cp -r" in error.value.instead
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    StoreWriter(tmp_path / "copy", model, [BatchGrad()], resume=True).close()


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_no_store(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "store")
    with pytest.raises(BadInput, match="not the folder of a store"):
        Store(tmp_path / "store")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(a=torch.tensor(1.0)), "not have a row for each"),
        (dict(a=torch.ones(2, 3), b=torch.ones(3)), "not have a row for each of 2"),
        (dict(a=torch.ones(2, 4)), r"shape \[4\], and earlier rows \[3\]"),
        (dict(a=torch.ones(2, 3).double()), "they are torch.float64, and earlier values torch.float32"),
        (dict(a=torch.ones(2, 3), b=[1.0, 2.0]), "not a dense tensor"),
        (dict(a=torch.ones(2, 3).to_sparse()), "not a dense tensor"),
        (dict(a=torch.ones(2, 3), c=torch.ones(2).to(torch.float8_e4m3fn)), "precision float8_e4m3fn"),
        (dict(a=torch.ones(2, 3), identifiers=[1]), "one whole number for each of 2"),
        (dict(a=torch.ones(2, 3), identifiers=[0.5, 1.0]), "one whole number for each of 2"),
        (dict(a=torch.ones(2, 3), identifiers=["a", "b"]), "one whole number for each of 2"),
        (dict(a=torch.ones(2, 3), identifiers=[2**63 + 5, 2**63 + 6]), "whole numbers below 2"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        writer.write(a=torch.ones(2, 3))
        given = {(name, ""): value for name, value in values.items() if name != "identifiers"}
        with pytest.raises(BadInput, match=words):
            writer.add(given, 2, 1.0, values.get("identifiers"))
    store = Store(tmp_path / "store")
    assert (store.samples, list(store)) == (2, ["a"])


@pytest.mark.parametrize("extension", [BatchGrad(), Projected(BatchGrad(), 4)], ids=lambda each: each.savefield)
def test_names_of_extensions_are_taken(tmp_path: Path, extension: Any) -> None:
    model, x, y = problem()
    with StoreWriter(tmp_path / "store", model, [extension]) as writer:
        with pytest.raises(BadInput, match=f"values '{extension.savefield}'\\n.*an extension has this name"):
            write_batch(writer, model, x, y, **{extension.savefield: torch.zeros(len(x), 4)})
        write_batch(writer, model, x, y)
    store = Store(tmp_path / "store")
    assert store.samples == len(x)
    assert all(array.torch().any() for array in store.arrays(extension.savefield).values())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("parameter", ["", "w"])
def test_values_of_parameters_and_of_all_of_them_have_other_names(
    tmp_path: Path, parameter: str, together: bool
) -> None:
    rows = {("a", parameter): torch.ones(2)}, {("a", "w" if parameter == "" else ""): torch.ones(2)}
    with StoreWriter(tmp_path / "store", nn.Linear(1, 1), []) as writer:
        if not together:
            writer.add(rows[0], 2)
        with pytest.raises(BadInput, match=r"values 'a'.*\n.*some belong to single parameters"):
            writer.add(rows[0] | rows[1] if together else rows[1], 2)
    assert Store(tmp_path / "store").samples == (0 if together else 2)


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
