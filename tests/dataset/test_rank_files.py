"""What ranks have added up, in files of their own: a run that goes on rounds as one that was left alone."""

from __future__ import annotations

import contextlib
import errno
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import PackpropError, Result
from packprop.applications.dataset.folder import Damaged, Folder
from packprop.applications.dataset.run import Run
from packprop.engine.tensors.nesting import tensors_in
from tests.dataset.kills import same
from tests.dataset.on_ranks import SIZE, asked, network, samples
from tests.dataset.test_shard_files import same_on_disk
from tests.dataset.test_sharded import pytestmark as needs_sharding
from tests.dataset.test_sharded import sharded
from tests.distributed.processes import in_processes
from tests.selection import thorough

pytestmark = needs_sharding


def compute(folder: Path | None, make: Callable[[], nn.Module] = network, **options: Any) -> Result:
    options = {"batch_size": SIZE, "progress": False, "compiled": False, "every": 1} | options
    data = samples(61)
    found = packprop.compute(make(), nn.CrossEntropyLoss(), data, asked(), checkpoint=folder, **options)
    return found.whole()


@contextlib.contextmanager
def failing_in_step(step: int, fails: bool) -> Iterator[None]:
    """Inside, a run fails in that step of its own; so it does on all ranks."""
    take, calls = Run._take, iter(range(1, step))

    def failing(self: Run, *given: Any) -> None:
        if fails and next(calls, None) is None:
            raise OSError(errno.EIO, "the disk is gone")
        take(self, *given)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises((PackpropError, OSError), match="the disk is gone"),
    ):
        patch.setattr(Run, "_take", failing)
        yield


def ends(folder: Path, step: int, rank: int, **options: Any) -> None:
    """A run that fails, on the second rank."""
    with failing_in_step(step, rank == 1):
        compute(folder, **options)


def goes_on(rank: int, folder: Path, make: Callable[[], nn.Module]) -> list[bool]:
    """Ended three times, in both readings; and when it has come to its end."""
    alone = compute(None, make)
    for step in (4, 3, 3):
        ends(folder, step, rank, make=make, every=2)
    return [same(compute(folder, make), alone) for _ in range(2)]


@thorough
@pytest.mark.parametrize("make", [network, sharded], ids=["whole", "sharded"])
@pytest.mark.parametrize("world", [2, 3])
def test_as_many_ranks_round_alike(world: int, make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """To the last bit; three ranks add up in an order that depends on the places of sums among all."""
    for found in in_processes(goes_on, world, tmp_path, make):
        assert found == [True, True]


def hidden(patch: pytest.MonkeyPatch) -> None:
    """This rank does not see the folder, and comes to nothing in it."""

    read = Path.read_text

    def elsewhere(self: Path, *given: Any, **options: Any) -> str:
        if self.name == "ranks.part":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return read(self, *given, **options)

    def unseen(self: Folder, *given: Any, **options: Any) -> Any:
        raise AssertionError("a rank wrote to, or read from, a folder that it does not see")

    patch.setattr(Path, "read_text", elsewhere)
    patch.setattr(Folder, "written", unseen)
    patch.setattr(Folder, "opened", unseen)


def without_the_folder(rank: int, folder: Path) -> None:
    """A rank on another machine: the first one writes and reads for it."""
    alone = compute(None)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            hidden(patch)
        ends(folder, 4, rank)
        ends(folder, 6, rank)
        assert same(compute(folder), alone)
    assert same(compute(folder), alone)


def damaged(rank: int, folder: Path) -> None:
    """Where a file of a rank is not what was written, or is missing, the work goes on from the one before."""
    alone = compute(None)
    for change in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!")):
        copy = same_on_disk(rank, folder)
        if rank == 0:
            change(max(copy.glob("state-*-1-*")))
        torch.distributed.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert same(compute(copy), alone)
        told = ["the run continues from the one before" in str(each.message) for each in caught]
        assert sum(told) == (rank == 0)


def killed_before_the_end_of_a_checkpoint(rank: int, folder: Path) -> None:
    """What ranks had written when they were killed is neither read nor kept."""
    copy = same_on_disk(rank, folder)
    last = max(copy.glob("state-*-1-*"))
    names = [f"state-{number}-1-0.safetensors" for number in ("000002", "000009")]
    if rank == 0:
        max(copy.glob("checkpoint-*")).unlink()
        for name in names:
            shutil.copy(last, copy / name)
    torch.distributed.barrier()
    assert same(compute(copy), compute(None))
    torch.distributed.barrier()
    assert not [name for name in names if (copy / name).exists()]
    kept = {path.stem.removeprefix("checkpoint-") for path in copy.glob("checkpoint-*")}
    assert {path.stem.split("-")[1] for path in copy.glob("state-*")} == kept


def full_disk(rank: int, folder: Path) -> None:
    """A rank that cannot write is told of once, nothing of that checkpoint stays, and the next is written."""
    calls, written, write = list[Any](), Folder.written, Run._keep
    left: list[int] = []

    def failing(self: Folder, *given: Any) -> Any:
        calls.append(given)
        if rank == 1 and len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(self, *given)

    def keep(self: Run) -> None:
        write(self)
        left.append(len([*folder.glob("state-*")]))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Folder, "written", failing)
        patch.setattr(Run, "_keep", keep)
        ends(folder, 5, rank)
    told = [str(each.message) for each in caught if "could not be written" in str(each.message)]
    assert len(told) == (rank == 0)
    if rank == 0:
        assert "rank 1: [Errno 28] No space left on device" in told[0]
        assert left == [2, 2, 4, 4]  # two files for each checkpoint
    assert same(compute(folder), compute(None))


def cannot_be_read(rank: int, folder: Path) -> None:
    """A rank that cannot read its sums stops all of them; what is said to be done about it helps."""
    copy, opened = same_on_disk(rank, folder), Folder.opened

    def failing(self: Folder, file: Any) -> Any:
        if file.name == last:
            raise Damaged("Input/output error")
        return opened(self, file)

    last = max(copy.glob("state-*-1-*")).name
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Folder, "opened", failing)
        with pytest.raises(PackpropError, match="Input/output error") as error:
            compute(copy)
        assert "remove the last checkpoint-*.json" in str(error.value)
        if rank == 0:
            max(copy.glob("checkpoint-*.json")).unlink()
        torch.distributed.barrier()
        assert same(compute(copy), compute(None))


def every_check(rank: int, folder: Path) -> None:
    kept = folder / "kept"
    ends(kept, 5, rank)
    for check in (damaged, killed_before_the_end_of_a_checkpoint, cannot_be_read):
        check(rank, kept)
    full_disk(rank, folder / "full")
    without_the_folder(rank, folder / "hidden")


@thorough
def test_files_of_ranks_are_safe(tmp_path: Path) -> None:
    in_processes(every_check, 2, tmp_path)


def ended_twice(rank: int, folder: Path) -> None:
    ends(folder, 3, rank)
    ends(folder, 2, rank)


@thorough
def test_fewer_ranks_go_on(tmp_path: Path) -> None:
    """One process takes up what two had; then their files go.

    Each call of theirs had names of its own: a rank that outlives a killed run writes over nothing of the next.
    """
    in_processes(ended_twice, 2, tmp_path)
    names = [path.stem for path in tmp_path.glob("state-*-1-*")]
    assert len({name.rpartition("-")[2] for name in names}) == len(names) == 2
    found, alone = compute(tmp_path), compute(None)
    assert (found.samples, found.loss) == (alone.samples, pytest.approx(alone.loss, rel=1e-12))
    for savefield, values in alone.tables.items():
        for mine, others in zip(tensors_in(found.tables[savefield]), tensors_in(values), strict=True):
            if savefield != "ekfac":  # whose vectors may have other signs
                torch.testing.assert_close(mine, others, rtol=1e-9, atol=1e-13)
    assert not [*tmp_path.glob("*-1-*")]
    assert same(compute(tmp_path), found)
