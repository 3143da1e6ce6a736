"""The folder of a checkpoint: what it refuses, and what damage it survives."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packprop import BadInput, PackpropError, PackpropWarning, extensions
from packprop.applications.dataset import folder as files
from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.digests import digest, spot_check
from packprop.applications.dataset.folder import Damaged, Folder
from packprop.applications.dataset.identity import identity_of
from packprop.engine.algebra.monoid import SUM
from packprop.engine.algebra.statistics import summed_grad
from packprop.store.schema import checksum_of
from packprop.types import GRADIENT, Extension, Row
from tests.dataset.kills import same
from tests.dataset.small import compute, small
from tests.dataset.test_checkpoint import breaking, run, split
from tests.selection import often, one_in, thorough


def begun(folder: Path, after: int = 3, **options: Any) -> None:
    """A run that ended with a checkpoint."""
    model, (x, y) = small_one()
    asked = options.pop("asked", [extensions.Variance(), extensions.KFAC(mc_samples=2)])
    with pytest.raises(BadInput, match="the disk is gone"):
        compute(
            model, nn.CrossEntropyLoss(), breaking(split(x, y), after), *asked, checkpoint=folder, **options
        )


def small_one() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return small(23)


def other_weights(model: nn.Module) -> Any:
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-12  # type: ignore[index,operator,union-attr]  # a sequence of layers
    return {}


def frozen(model: nn.Module) -> Any:
    model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]  # a sequence of layers
    return {}


def other_mode(model: nn.Module) -> Any:
    model.eval()
    return {}


OTHERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "weights": (other_weights, "its values of the model's parameters and buffers: 0.weight"),
    "frozen": (frozen, "its model: tensors: 0.weight"),
    "mode": (other_mode, "its model: in training mode"),
    "options": (
        lambda _: {"asked": [extensions.Variance(), extensions.KFAC(mc_samples=3)]},
        "its extensions: mc_samples: 2 there, 3 here",
    ),
    "extensions": (
        lambda _: {"asked": [extensions.Variance()]},
        "['Variance', 'KFAC'] there, ['Variance'] here",
    ),
    "generator": (
        lambda _: {"asked": [extensions.Variance(), extensions.KFAC(2, generator=torch.Generator())]},
        "its extensions: generator: None there, a generator here",
    ),
    "reduction": (
        lambda _: {"loss": nn.CrossEntropyLoss(reduction="sum")},
        "its loss: reduction: mean there, sum here",
    ),
    "weights of classes": (lambda _: {"loss": nn.CrossEntropyLoss(torch.ones(2).double())}, "its loss: weight"),
    "function": (lambda _: {"loss": nn.functional.cross_entropy}, "its loss: "),
    "mode of the loss": (
        lambda _: {"loss": nn.CrossEntropyLoss().eval()},
        "its loss: in training mode: True there, False here",
    ),
    "form of data": (lambda _: {"data": small_one()[1]}, "its data: "),
    "budget": (lambda _: {"memory": "1GiB"}, "its memory: None there, 1GiB here"),
}


@one_in(2)
@pytest.mark.parametrize("change", OTHERS)
def test_a_checkpoint_of_something_else_is_refused(change: str, tmp_path: Path) -> None:
    begun(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model, (x, y) = small_one()
    prepare, why = OTHERS[change]
    options = prepare(model)
    asked = options.pop("asked", [extensions.Variance(), extensions.KFAC(mc_samples=2)])
    loss, data = options.pop("loss", nn.CrossEntropyLoss()), options.pop("data", split(x, y))
    with pytest.raises(BadInput) as error:
        compute(model, loss, data, *asked, checkpoint=tmp_path, **options)
    assert why in error.value.why
    assert str(tmp_path) in error.value.where
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The last checkpoint as if it had been written otherwise, with a checksum that is right."""
    (path,) = list(folder.glob("checkpoint-*.json"))
    content = json.loads(path.read_text())["content"]
    change(content["facts"])
    path.write_text(json.dumps({"checksum": checksum_of(content), "content": content}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda facts: facts.update(format=3), "in format 3, not in format 7"),
        (lambda facts: facts.update(what="a store"), "it is 'a store'"),
        (lambda facts: facts["identity"].update({"version of torch": "1.0"}), "version of torch: 1.0 there"),
        (lambda facts: facts["identity"].update({"version of packprop": "9"}), "version of packprop: 9 there"),
    ],
)
def test_another_version_is_refused(change: Any, why: str, tmp_path: Path) -> None:
    begun(tmp_path)
    rewritten(tmp_path, change)
    model, (x, y) = small_one()
    with pytest.raises(BadInput) as error:
        compute(model, nn.CrossEntropyLoss(), split(x, y), extensions.Variance(), extensions.KFAC(mc_samples=2),
                checkpoint=tmp_path)  # fmt: skip
    assert why in error.value.why


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("a year of work")
    model, data = small_one()
    with pytest.raises(BadInput, match=r"other files: thesis\.tex"):
        compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), checkpoint=tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "a year of work"


def test_what_a_kill_left_half_written_is_not_in_the_way(tmp_path: Path) -> None:
    """Before the first checkpoint, too; the first name is one that safetensors has given."""
    names = [".tmpbmX3Li", "state-000001.safetensors.part"]
    for name in names:
        (tmp_path / name).touch()
    model, data = small_one()
    compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), checkpoint=tmp_path)
    assert not {path.name for path in tmp_path.iterdir()} & {*names}


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, data = small_one()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match="packprop cannot write there"):
            compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), checkpoint=path)


def hold(path: Path, ready: Any, end: Any) -> None:
    with Folder(path).locked():
        ready.set()
        end.wait(60)
    os._exit(0)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """In one process, and in two; a lock is gone when its process is."""
    model, (x, y) = small_one()

    def again() -> None:
        compute(model, nn.CrossEntropyLoss(), (x, y), extensions.Variance(), checkpoint=tmp_path)

    with Folder(tmp_path).locked(), pytest.raises(BadInput, match="another run writes"):
        again()
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    child = context.Process(target=hold, args=(tmp_path, ready, end))
    child.start()
    assert ready.wait(60)
    with pytest.raises(BadInput, match="another run writes"):
        again()
    child.kill()
    child.join()
    again()


def damaged(folder: Path, name: str, how: str) -> None:
    """Damage the newest file of a kind."""
    path = sorted(folder.glob(f"{name}-*"))[-1]
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@one_in(2)
@often(lambda name, how: how == "one bit")
@pytest.mark.parametrize("how", ["removed", "truncated", "empty", "one bit"])
@pytest.mark.parametrize("name", ["checkpoint", "state"])
def test_damage_costs_no_more_than_the_last_checkpoint(name: str, how: str, tmp_path: Path) -> None:
    alone, _, _ = run("list")
    with pytest.raises(KeyboardInterrupt):
        run("list", 4, checkpoint=tmp_path, every=1)
    damaged(tmp_path, name, how)
    if (name, how) == ("checkpoint", "removed"):
        found, model, _ = run("list", checkpoint=tmp_path)
    else:
        with pytest.warns(PackpropWarning, match="first 2 batches, 10 samples"):
            found, model, _ = run("list", checkpoint=tmp_path)
    assert same(found, alone)
    assert len(model.calls) == 2 * 5 - 2


def test_where_nothing_can_be_read_nothing_is_begun(tmp_path: Path) -> None:
    begun(tmp_path, every=1)
    for path in tmp_path.glob("checkpoint-*"):
        path.write_bytes(b"{}")
    with pytest.raises(PackpropError, match="none of it can be read") as error:
        begun(tmp_path)
    assert "remove the folder" in error.value.instead


@thorough
def test_a_kill_between_the_files_and_their_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of writing: what was written before is there, and the next run goes on."""
    steps = 0

    def failing(at: int) -> Callable[..., None]:
        left = iter(range(at))

        def replace(source: Any, target: Any, *, real: Any = os.replace) -> None:
            if next(left, None) is None:
                os._exit(7)
            real(source, target)

        return replace

    alone, _, _ = run("list")
    for steps in range(5):
        path = tmp_path / str(steps)
        child = os.fork()
        if not child:
            monkeypatch.setattr(files.os, "replace", failing(steps))
            run("list", checkpoint=path, every=2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        found, model, _ = run("list", checkpoint=path)
        assert same(found, alone)
        kept = 0 if steps < 2 else 2 if steps < 4 else 4
        assert len(model.calls) == 10 - kept


def test_values_that_no_file_can_hold(tmp_path: Path) -> None:
    class Odd(Extension):
        savefield = "odd"
        rows = (Row(GRADIENT, lambda structure: Oddity(summed_grad(structure)), over_n=SUM),)

    class Oddity:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __mul__(self, factor: float) -> Oddity:
            return self

    model, data = small_one()
    with pytest.raises(BadInput, match="Oddity") as error:
        compute(model, nn.CrossEntropyLoss(), data, Odd(), checkpoint=tmp_path, batch_size=5)
    assert "leave checkpoint out" in error.value.instead


def test_files_are_removed_that_nothing_names(tmp_path: Path) -> None:
    run("list", checkpoint=tmp_path, every=1)
    names = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert names == ["checkpoint"] * 2 + ["lock"] + ["state"] * 2


def test_a_digest_is_of_every_bit() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64):
        tensor = torch.ones(5, 3).to(dtype)
        changed = tensor.clone()
        changed[4, 2] = 0
        assert digest(tensor) == digest(tensor.t().contiguous().t())
        assert digest(tensor) != digest(changed)
    assert digest(torch.ones(())) != digest(torch.zeros(()))
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_a_digest_leaves_memory_as_it_is() -> None:
    """What numpy has seen is never resized again, as ``fully_shard`` resizes the memory of parameters."""
    tensor = torch.ones(3)
    digest(tensor)
    tensor.untyped_storage().resize_(0)


def test_options_of_one_extension_are_told_apart() -> None:
    model, _ = small_one()

    def facts(*asked: Extension) -> Any:
        return identity_of(model, nn.CrossEntropyLoss(), asked, Batches("", []))["extensions"]

    assert facts(extensions.KFAC()) == facts(extensions.KFAC(mc_samples=1))
    assert facts(extensions.KFAC()) != facts(extensions.KFAC(approximation="expand"))
    assert facts(extensions.Variance()) != facts(extensions.Variance(per="token"))


def test_an_unknown_file_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(Damaged):
        Folder(tmp_path).read(1)


@pytest.mark.parametrize(
    "name", ["lock", "state-000001.safetensors", "checkpoint-000009.json", "rows-000001.x.part"]
)
def test_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    model, data = small_one()
    with pytest.raises(BadInput, match="neither a file nor a folder"):
        compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), checkpoint=tmp_path)


@pytest.mark.parametrize("name", ["checkpoint-000001.json.part", "state-000001.safetensors.part"])
def test_drafts_are_not_written_through(name: str, tmp_path: Path) -> None:
    """A file that has a second name elsewhere is not changed there; nor is a copy that shares all files."""
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "kept").mkdir()
    os.link(other, tmp_path / "kept" / name)
    begun(tmp_path / "kept")
    assert other.read_text() == "mine"
    files = {path.name: path.read_bytes() for path in (tmp_path / "kept").glob("*-*")}
    (tmp_path / "copy").mkdir()
    for each in files:
        os.link(tmp_path / "kept" / each, tmp_path / "copy" / each)
    model, (x, y) = small_one()
    asked = [extensions.Variance(), extensions.KFAC(mc_samples=2)]
    compute(model, nn.CrossEntropyLoss(), split(x, y), *asked, checkpoint=tmp_path / "kept", every=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == files


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_digests_of_sparse_tensors(layout: torch.layout) -> None:
    tensor = torch.eye(3)
    moved, scaled = (each.to_sparse(layout=layout) for each in (tensor.roll(1, 0), 2 * tensor))
    for stands_for in (digest, spot_check):
        assert stands_for(tensor.to_sparse(layout=layout)) == stands_for(tensor.to_sparse(layout=layout))
        assert len({stands_for(each) for each in (tensor.to_sparse(layout=layout), moved, scaled)}) == 3
